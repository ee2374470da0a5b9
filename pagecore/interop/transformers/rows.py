"""Which sequence stands in which row of a generation's batch, and which of its columns are tokens.

Transformers count columns: all rows are equally long, and some columns of a row are padding. The cache stores tokens
alone::

    attention_mask   0 0 1 1 1 | 1        row 0: 4 tokens        5 columns are computed, one is new
                     1 1 1 1 1 | 1        row 1: 6 tokens
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from collections.abc import Sequence as Listed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagecore.arrays.refusals import brief
from pagecore.cache import PagedKVCache, Sequence
from pagecore.errors import OutOfRows, PagecoreError, ShapeError, UnsupportedOption
from pagecore.interop.transformers.inputs import Ids, Inputs, Mask
from pagecore.storage.checks import require_int

UNKNOWN = -1  # the id of a column that was computed from embeddings


@dataclass(frozen=True)
class RowsSnapshot:
    """What rows were before a pass: how many, which ids they wait to compute, and whether new ids become known."""

    count: int
    waiting: list[Any]
    is_known: bool


class BatchRows:
    """The rows of a batch; `cache` holds their tokens.

    I1: between calls every sequence has as many computed tokens as its row of `is_token` has ones.
    I2: `given_ids` has the id of each computed column as the model was given it, or UNKNOWN; they say whether a prompt
        goes on where the rows end.
    I3: ids that a sequence knows are those its keys were computed from, at positions 0, 1, 2 ..., so that others may
        reuse them. After a pass of which that cannot be said (`reusable_ids`), no more become known until rows are
        cleared.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.sequences: list[Sequence] = []
        self.is_token: Mask = np.zeros((0, 0), np.bool_)
        self.given_ids: Ids = np.zeros((0, 0), np.int64)
        self.namespace: Hashable = None
        self._is_known = True

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_columns(self) -> int:
        """Columns that are computed."""
        return int(self.is_token.shape[1])

    @property
    def is_begun(self) -> bool:
        """Whether the rows still wait for tokens of the prompts that they began with."""
        return any(sequence.num_tokens > sequence.num_computed_tokens for sequence in self.sequences)

    def clear(self) -> None:
        """Let all sequences go, but not their namespace; what they have computed stays in the prefix cache."""
        for sequence in self.sequences:
            self.cache.remove(sequence)
        self.sequences = []
        self.is_token = np.zeros((0, 0), np.bool_)
        self.given_ids = np.zeros((0, 0), np.int64)
        self._is_known = True

    def begin(self, ids: Ids, is_token: Mask, namespace: Hashable) -> int:
        """Start anew with prompts [batch, columns]; returns how many columns need not be computed.

        They are as many as the prefix cache has of every row.
        """
        self.clear()
        self.namespace = namespace
        # Rows that have more than the others compute it again, so that all stand at one column. A window may have kept
        # too little for that: then all begin with less.
        num_columns = ids.shape[1]
        while not self._try_begin(ids, is_token, is_token[:, :num_columns].sum(axis=1), namespace):
            num_columns = self.num_columns
            self.clear()
        return self.num_columns

    def _try_begin(self, ids: Ids, is_token: Mask, limits: Any, namespace: Hashable) -> bool:
        try:
            for row, mask, limit in zip(ids, is_token, limits, strict=True):
                self.sequences.append(self.cache.add_sequence(row[mask], namespace=namespace, max_tokens=int(limit)))
            reused = [_columns(mask, s.num_computed_tokens) for mask, s in zip(is_token, self.sequences, strict=True)]
            self.is_token = is_token[:, : min(reused, default=0)].copy()
            self.given_ids = ids[:, : self.num_columns].copy()
            with suppress(UnsupportedOption):
                self._compute_again(self.is_token.sum(axis=1))
                return True
        except BaseException:
            self.clear()
            raise
        return False

    def open(self, count: int) -> None:
        """Empty rows for prompts whose ids come with the first forward pass, or never."""
        try:
            self.sequences += [self.cache.add_sequence((), namespace=self.namespace) for _ in range(count)]
        except BaseException:
            self.clear()
            raise
        self.is_token = np.zeros((count, 0), np.bool_)
        self.given_ids = np.zeros((count, 0), np.int64)

    def first_difference(self, ids: Ids, is_token: Mask) -> tuple[int, int] | None:
        """Return (row, column) of the first computed column that is another than that of the prompts [batch, columns].

        Row i of `batch` is that of ``len(self) / batch`` rows in a row, or the other way round. None where the prompts
        begin with all that is computed, as far as its ids are known. The last of their columns counts as different
        where the rows hold it already: there is nothing left to compute.
        """
        columns, count = self.num_columns, len(self)
        prompt = np.arange(count) * len(ids) // count
        if ids.shape[1] <= columns:
            return 0, ids.shape[1] - 1
        before, kept = ids[prompt, :columns], is_token[prompt, :columns]
        differs = (kept != self.is_token) | (kept & (before != self.given_ids) & (self.given_ids != UNKNOWN))
        if not differs.any():
            return None
        row, column = np.unravel_index(int(differs.argmax()), differs.shape)
        return int(row), int(column)

    def snapshot(self) -> RowsSnapshot:
        """What `restore` goes back to."""
        waiting = [
            s.tokens[s.num_computed_tokens :] if s.num_tokens > s.num_computed_tokens else () for s in self.sequences
        ]
        return RowsSnapshot(len(self), waiting, self._is_known)

    def restore(self, before: RowsSnapshot) -> None:
        """Undo what a pass that does not count did to the rows: it may have opened or repeated them, and their ids."""
        if before.count == 0:
            self.clear()
            return
        if len(self) != before.count:
            self.select(range(0, len(self), len(self) // before.count))
        self.forget_past([sequence.num_computed_tokens for sequence in self.sequences])
        self.cache.append_tokens(self.sequences, before.waiting)
        self._is_known = before.is_known

    def repeat(self, repeats: int) -> None:
        """Let each row become `repeats` rows that share its blocks."""
        try:
            count = require_int("repeats", operator.index(repeats), max=None)
        except PagecoreError:
            raise
        except Exception:
            raise ShapeError(f"repeats is {brief(repeats)}; it must be an integer of at least 1") from None
        if len(self) * count > self.cache.max_sequences:
            raise OutOfRows(
                f"repeats is {count} and the cache has {len(self)} rows, which makes {len(self) * count} of at most "
                f"{self.cache.max_sequences}; make the cache with a larger max_sequences"
            )
        self.select([row for row in range(len(self)) for _ in range(count)])

    def reusable_ids(self, inputs: Inputs) -> Ids | None:
        """The ids of new columns; None where their keys, or those before them, are not what ids and positions make.

        Refuses columns that begin anew, or that do not go on where keys from the prefix cache end.
        """
        before = np.zeros((inputs.batch, self.num_columns), np.bool_) if not len(self) else self.is_token
        positions = before.sum(axis=1)[:, None] + inputs.is_token.cumsum(axis=1) - 1
        given = inputs.positions
        if given is None:
            given = np.arange(self.num_columns, self.num_columns + inputs.columns)[None]
        if len(given) not in (1, inputs.batch):
            raise ShapeError(
                f"position_ids has {len(given)} rows and the forward pass {inputs.batch}; give one for each, or one "
                "for all of them"
            )
        given = np.broadcast_to(given, positions.shape)
        if ((given == 0) & (positions > 0) & inputs.is_token).any():
            raise ShapeError(
                f"tokens start at position 0 again, and the cache holds {self.num_columns} columns of this generation; "
                "give what follows them (as generate does with use_cache=True), or leave it with reset() or begin()"
            )
        is_canonical = bool((given == positions)[inputs.is_token].all())
        if not is_canonical and any(sequence.num_cached_tokens for sequence in self.sequences):
            raise UnsupportedOption(
                "the positions of the new tokens do not go on where the reused prefix ends; pass position_ids that "
                "count the tokens of each row and not its padding, as generate does, or reset() and compute it all"
            )
        if not is_canonical or inputs.ids is None:
            self._is_known = False
            self.forget_past([sequence.num_computed_tokens for sequence in self.sequences])
        return inputs.ids if self._is_known else None

    def append_ids(self, ids: Ids, is_token: Mask) -> None:
        """Make the ids of new columns known, where they are not yet; refuses ids that contradict what is known."""
        new: list[Any] = []
        for sequence, row, mask in zip(self.sequences, ids, is_token, strict=True):
            given = row[mask]
            known = sequence.tokens[sequence.num_computed_tokens :]
            common = min(len(known), len(given))
            differs = known[:common] != given[:common]
            if differs.any():
                at = int(differs.argmax())
                raise ShapeError(
                    f"token {sequence.num_computed_tokens + at} of a row is {given[at]} now and was {known[at]} in the "
                    "prompt that the cache began with; begin() anew with these tokens"
                )
            new.append(given[common:])
        self.cache.append_tokens(self.sequences, new)

    def forget_past(self, lengths: Listed[int]) -> None:
        """Forget the ids past these lengths, none of which is computed."""
        past = [
            (each, length) for each, length in zip(self.sequences, lengths, strict=True) if each.num_tokens > length
        ]
        if past:
            self.cache.truncate(*zip(*past, strict=True))

    def extend(self, is_token: Mask, given_ids: Ids | None) -> None:
        """Count the columns of a step, whose tokens are committed."""
        self.is_token = np.concatenate([self.is_token, is_token], axis=1)
        new = np.full(is_token.shape, UNKNOWN, np.int64) if given_ids is None else given_ids
        self.given_ids = np.concatenate([self.given_ids, new], axis=1)

    def crop(self, count: int) -> None:
        """Forget the last `count` columns."""
        if count > self.num_columns:
            raise ShapeError(f"crop would remove {count} columns; the cache has {self.num_columns}")
        kept = self.is_token[:, : self.num_columns - count]
        self.cache.truncate(self.sequences, kept.sum(axis=1))
        self.is_token = kept.copy()
        self.given_ids = self.given_ids[:, : self.num_columns].copy()

    def select(self, parents: Listed[int]) -> None:
        """Row i becomes what row parents[i] was; rows may go, and one may become several, which share its blocks."""
        if any(not 0 <= parent < len(self) for parent in parents):
            raise ShapeError(f"rows {list(parents)} are wanted; the cache has rows 0 to {len(self) - 1}")
        if not parents:
            self.clear()
            return
        if len(parents) == len(self):
            self.cache.reorder(self.sequences, [self.sequences[parent] for parent in parents])
        else:
            self._fork(parents)
        self.is_token = self.is_token[np.asarray(parents, np.int64)]
        self.given_ids = self.given_ids[np.asarray(parents, np.int64)]

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

    def _compute_again(self, lengths: Any) -> None:
        """What is past these lengths; the ids stay known."""
        ids = [sequence.tokens[length:] for sequence, length in zip(self.sequences, lengths, strict=True)]
        self.cache.truncate(self.sequences, lengths)
        self.cache.append_tokens(self.sequences, ids)


def _columns(is_token: Mask, num_tokens: int) -> int:
    """Columns before the token that follows `num_tokens`: they need not be computed. The last always is."""
    places = np.flatnonzero(is_token)
    return int(places[num_tokens]) if num_tokens < len(places) else max(0, len(is_token) - 1)
