"""Which sequence stands in which row of a generation's batch, and which of its columns are tokens.

Transformers count columns: all rows are equally long, and some columns of a row are padding. The cache stores tokens
alone::

    attention_mask   0 0 1 1 1 | 1        row 0: 4 tokens        5 columns are computed, one is new
                     1 1 1 1 1 | 1        row 1: 6 tokens
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.cache import PagedKVCache, Sequence
from pagecore.errors import ShapeError, UnsupportedOption

Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]


class Rows:
    """The rows of a batch; `cache` holds their tokens.

    I1: after each call every sequence has as many computed tokens as its row of `is_token` has ones.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.sequences: list[Sequence] = []
        self.is_token: Mask = np.zeros((0, 0), np.bool_)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_columns(self) -> int:
        """Columns that are computed."""
        return self.is_token.shape[1]

    def clear(self) -> None:
        """Let all sequences go; what they have computed stays in the prefix cache."""
        for sequence in self.sequences:
            self.cache.remove(sequence)
        self.sequences = []
        self.is_token = np.zeros((0, 0), np.bool_)

    def begin(self, ids: Ids, is_token: Mask) -> int:
        """Start anew with prompts [batch, columns]; returns how many columns need not be computed.

        They are as many as the prefix cache has of every row.
        """
        self.clear()
        try:
            for row, mask in zip(ids, is_token, strict=True):
                self.sequences.append(self.cache.add_sequence(row[mask]))
            reused = [_columns(mask, s.num_computed_tokens) for mask, s in zip(is_token, self.sequences, strict=True)]
            num_columns = min(reused, default=0)
            self.is_token = is_token[:, :num_columns].copy()
            # Rows that have more than the others compute it again, so that all stand at one column.
            for sequence, mask in zip(self.sequences, self.is_token, strict=True):
                self._shorten(sequence, int(mask.sum()))
        except BaseException:
            self.clear()
            raise
        return num_columns

    def open(self, count: int) -> None:
        """Empty rows for prompts whose ids come with the first forward pass, or never."""
        try:
            self.sequences += [self.cache.add_sequence(()) for _ in range(count)]
        except BaseException:
            self.clear()
            raise
        self.is_token = np.zeros((count, 0), np.bool_)

    def extend(self, is_token: Mask) -> None:
        """Count the columns of a step, whose tokens are committed."""
        self.is_token = np.concatenate([self.is_token, is_token], axis=1)

    def crop(self, count: int) -> None:
        """Forget the last `count` columns."""
        if not 0 <= count <= self.num_columns:
            raise ShapeError(f"crop would remove {count} columns; the cache has {self.num_columns}")
        kept = self.is_token[:, : self.num_columns - count]
        for sequence, mask in zip(self.sequences, kept, strict=True):
            self.cache.truncate(sequence, int(mask.sum()))
        self.is_token = kept.copy()

    def select(self, parents: Listed[int]) -> None:
        """Row i becomes what row parents[i] was; rows may go, and one may become several, which share its blocks."""
        if any(not 0 <= parent < len(self) for parent in parents):
            raise ShapeError(f"rows {list(parents)} are wanted; the cache has rows 0 to {len(self) - 1}")
        if len(parents) == len(self):
            self.cache.reorder(self.sequences, [self.sequences[parent] for parent in parents])
        else:
            self._fork(parents)
        self.is_token = self.is_token[np.asarray(parents, np.int64)]

    def _fork(self, parents: Listed[int]) -> None:
        taken: dict[int, Sequence] = {}
        forks: list[Sequence] = []
        chosen: list[Sequence] = []
        try:
            for parent in parents:
                if parent in taken:
                    forks.append(self.cache.fork(taken[parent]))
                    chosen.append(forks[-1])
                else:
                    chosen.append(taken.setdefault(parent, self.sequences[parent]))
        except BaseException:
            for sequence in forks:
                self.cache.remove(sequence)
            raise
        for row, sequence in enumerate(self.sequences):
            if row not in taken:
                self.cache.remove(sequence)
        self.sequences = chosen

    def _shorten(self, sequence: Sequence, length: int) -> None:
        """Compute what is past `length` again; the ids stay known."""
        if sequence.num_computed_tokens > length:
            ids = sequence.tokens
            self.cache.truncate(sequence, length)
            self.cache.append_tokens([sequence], [ids[length:]])


def read_mask(mask: Any, batch: int, columns: int) -> Mask:
    """The last `columns` columns of a padding mask, and that it speaks of as many rows; all tokens where it is None."""
    if mask is None:
        return np.ones((batch, columns), np.bool_)
    if getattr(mask, "ndim", None) != 2:
        shape = tuple(getattr(mask, "shape", ())) or type(mask).__name__
        raise UnsupportedOption(
            f"attention_mask is {shape}; a paged cache takes the padding mask [batch, tokens], and masks by itself"
        )
    if mask.shape[0] != batch:
        raise ShapeError(f"attention_mask has shape {tuple(mask.shape)} for {batch} rows of tokens")
    read: Mask = mask.detach().cpu().numpy() != 0
    return read[:, max(0, read.shape[1] - columns) :]


def _columns(is_token: Mask, num_tokens: int) -> int:
    """Columns before the token that follows `num_tokens`: they need not be computed. The last always is."""
    places = np.flatnonzero(is_token)
    return int(places[num_tokens]) if num_tokens < len(places) else max(0, len(is_token) - 1)
