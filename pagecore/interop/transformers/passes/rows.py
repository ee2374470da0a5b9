"""Rows of a generation's batch: the sequence of each row, and the columns that are tokens.

transformers counts columns: all rows have equal lengths, and some columns of a row are padding. The cache only stores
tokens::

    attention_mask   0 0 1 1 1 | 1        row 0: 4 tokens        5 columns are computed, one is new
                     1 1 1 1 1 | 1        row 1: 6 tokens
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Listed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagecore.cache import PagedKVCache, Sequence
from pagecore.errors import OutOfRows, ShapeError, UnsupportedOption, shown
from pagecore.interop.transformers.inputs.arguments import Ids, Inputs, Mask, read_count
from pagecore.interop.transformers.states.running import RunningStates, refuse_padding_after_tokens
from pagecore.storage.checks import require_int

UNKNOWN = -1  # the id of a column that was computed from embeddings


@dataclass(frozen=True)
class RowsSnapshot:
    """State of the rows before a forward pass.

    Attributes
    ----------
    count : int
        Number of rows.
    uncomputed : list
        Ids of each row that are appended but not computed.
    ids_are_known : bool
        As in `BatchRows`.
    """

    count: int
    uncomputed: list[Any]
    ids_are_known: bool


class BatchRows:
    """The rows of a batch, one sequence of the cache each.

    Parameters
    ----------
    cache : PagedKVCache
    layers : mapping, optional
        Index in the cache of each layer of the model that attends; by default both have the same indices.
    states : RunningStates, optional
        States of the recurrent layers; none by default.

    I1: between calls the number of computed tokens of a sequence equals the number of ones in its row of `is_token`.
    I2: `given_ids` has the id of each computed column as passed to the model, or UNKNOWN. They decide whether a prompt
        continues the rows.
    I3: the ids of a sequence are those that its keys were computed from, at positions 0, 1, 2 ..., so that other
        sequences may reuse the keys. After a pass that breaks this (see `reusable_ids`), `_ids_are_known` is False and
        no ids are appended until the rows are cleared.
    I4: unless they are stale, the states have a row for each row, after all its computed tokens. A pass that fails
        leaves no such states: the rows are removed, and `is_lost` is True until they are cleared.
    """

    def __init__(
        self, cache: PagedKVCache, layers: Mapping[int, int] | None = None, states: RunningStates | None = None
    ) -> None:
        self.cache = cache
        self.layers = {index: index for index in range(cache.num_layers)} if layers is None else layers
        self.states = RunningStates({}, torch.device("cpu")) if states is None else states
        self.is_lost = False
        self.sequences: list[Sequence] = []
        self.is_token: Mask = np.zeros((0, 0), np.bool_)
        self.given_ids: Ids = np.zeros((0, 0), np.int64)
        self.namespace: Hashable = None
        self._ids_are_known = True

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_columns(self) -> int:
        """Number of computed columns."""
        return int(self.is_token.shape[1])

    @property
    def is_begun(self) -> bool:
        """True while tokens of the prompts passed to `begin` are not computed."""
        return any(sequence.num_tokens > sequence.num_computed_tokens for sequence in self.sequences)

    def clear(self) -> None:
        """Remove all sequences and keep the namespace; their blocks stay in the prefix cache until they are evicted."""
        for sequence in self.sequences:
            self.cache.remove(sequence)
        self.sequences = []
        self.is_token = np.zeros((0, 0), np.bool_)
        self.given_ids = np.zeros((0, 0), np.int64)
        self._ids_are_known = True
        self.is_lost = False
        self.states.clear()

    def lose(self) -> None:
        """Remove all rows after a pass failed, and refuse further passes until the rows are cleared."""
        self.clear()
        self.is_lost = True

    def check_padding(self, is_token: Mask) -> None:
        """Raise UnsupportedOption for prompts with padding after tokens if the model has recurrent layers."""
        if self.states:
            refuse_padding_after_tokens(np.zeros(len(is_token), np.int64), is_token)

    def begin(self, ids: Ids, is_token: Mask, namespace: Hashable) -> int:
        """Replace the rows by prompts [batch, columns]; return the number of columns that are cached for every row."""
        self.check_padding(is_token)
        self.clear()
        self.namespace = namespace
        # All rows must continue at one column, so rows with a longer cached prefix compute its end again. If a
        # sliding-window layer no longer holds the keys for that, try again with a shorter prefix for all rows.
        num_columns = ids.shape[1]
        while not self._try_begin(ids, is_token, is_token[:, :num_columns].sum(axis=1), namespace):
            num_columns = self.num_columns
            self.clear()
        if self.states and self.num_columns:
            self.states.mark_stale()
        return self.num_columns

    def _try_begin(self, ids: Ids, is_token: Mask, limits: Any, namespace: Hashable) -> bool:
        try:
            for row, mask, limit in zip(ids, is_token, limits, strict=True):
                self.sequences.append(self.cache.add_sequence(row[mask], namespace=namespace, max_tokens=int(limit)))
            reused = [_columns(mask, s.num_computed_tokens) for mask, s in zip(is_token, self.sequences, strict=True)]
            self.is_token = is_token[:, : min(reused, default=0)].copy()
            self.given_ids = ids[:, : self.num_columns].copy()
            with suppress(UnsupportedOption):
                self._uncompute(self.is_token.sum(axis=1))
                return True
        except BaseException:
            self.clear()
            raise
        return False

    def open(self, count: int, outputs: Listed[tuple[int, bytes]] = ()) -> None:
        """Add `count` empty rows; ids come with the first forward pass, or never.

        `outputs` has the number of encoder tokens of each row and their digest, for a model with an encoder.
        """
        try:
            self.sequences += [self.cache.add_sequence((), namespace=self.namespace) for _ in range(count)]
            for sequence, (tokens, digest) in zip(self.sequences, outputs, strict=False):
                self.cache.set_cross_tokens(sequence, tokens, digest=digest)
        except BaseException:
            self.clear()
            raise
        self.is_token = np.zeros((count, 0), np.bool_)
        self.given_ids = np.zeros((count, 0), np.int64)

    def first_difference(self, ids: Ids, is_token: Mask) -> tuple[int, int] | None:
        """Return (row, column) of the first computed column that differs from the prompts [batch, columns], or None.

        Each prompt is compared with ``len(self) / batch`` adjoining rows; if there are fewer rows than prompts, each
        row is compared with the first of its ``batch / len(self)`` prompts. Columns with unknown ids are not compared.
        The last column of the prompts counts as different if the rows already hold it, since no column would be left to
        compute.
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
        """Return the state for `restore`."""
        uncomputed = [
            s.tokens[s.num_computed_tokens :] if s.num_tokens > s.num_computed_tokens else () for s in self.sequences
        ]
        return RowsSnapshot(len(self), uncomputed, self._ids_are_known)

    def restore(self, before: RowsSnapshot) -> None:
        """Undo the changes of an abandoned pass, which may have opened or repeated rows and appended ids."""
        if before.count == 0:
            self.clear()
            return
        if len(self) != before.count:
            self.select(range(0, len(self), len(self) // before.count))
        self.forget_past([sequence.num_computed_tokens for sequence in self.sequences])
        self.cache.append_tokens(self.sequences, before.uncomputed)
        self._ids_are_known = before.ids_are_known

    def repeat(self, repeats: int) -> None:
        """Replace each row by `repeats` rows that share its blocks."""
        number = read_count(repeats)
        if number is None:
            raise ShapeError(f"repeats is {shown(repeats)}; expected an integer of at least 1")
        count = require_int("repeats", number, max=None)
        if len(self) * count > self.cache.max_sequences:
            raise OutOfRows(
                f"repeats is {count} and the cache has {len(self)} rows, which makes {len(self) * count} rows; at most "
                f"{self.cache.max_sequences} are allowed: make the cache with a larger max_sequences"
            )
        self.select([row for row in range(len(self)) for _ in range(count)])

    def reusable_ids(self, inputs: Inputs) -> Ids | None:
        """Return the ids of new columns, or None if other sequences cannot reuse their keys.

        Keys are reusable if all keys of the generation depend on ids alone, at positions that count tokens. After a
        pass that breaks this, the result is None until the rows are cleared.

        Raises
        ------
        ShapeError
            The positions start at 0 again, or have a wrong number of rows.
        UnsupportedOption
            The positions do not continue a prefix that came from the prefix cache.
        """
        before = np.zeros((inputs.batch, self.num_columns), np.bool_) if not len(self) else self.is_token
        positions = before.sum(axis=1)[:, None] + inputs.is_token.cumsum(axis=1) - 1
        given = inputs.positions
        if given is None:
            given = np.arange(self.num_columns, self.num_columns + inputs.columns)[None]
        if len(given) not in (1, inputs.batch):
            raise ShapeError(
                f"position_ids has {len(given)} rows and the forward pass {inputs.batch}; pass one row for each, or "
                "one for all"
            )
        given = np.broadcast_to(given, positions.shape)
        if ((given == 0) & (positions > 0) & inputs.is_token).any():
            raise ShapeError(
                f"tokens start at position 0 again, but the cache holds {self.num_columns} columns of this generation; "
                "pass the columns that follow (as generate does with use_cache=True), or end the generation with "
                "reset() or begin()"
            )
        is_canonical = bool((given == positions)[inputs.is_token].all())
        if not is_canonical and any(sequence.num_cached_tokens for sequence in self.sequences):
            raise UnsupportedOption(
                "the positions of the new tokens do not continue the reused prefix; pass position_ids that count the "
                "tokens of each row and not its padding, as generate does, or call reset() and compute all columns"
            )
        if not is_canonical or inputs.ids is None:
            self._ids_are_known = False
            self.forget_past([sequence.num_computed_tokens for sequence in self.sequences])
        return inputs.ids if self._ids_are_known else None

    def append_ids(self, ids: Ids, is_token: Mask) -> None:
        """Append the ids of new columns to the sequences; raise ShapeError if they differ from ids of the prompt."""
        new: list[Any] = []
        for sequence, row, mask in zip(self.sequences, ids, is_token, strict=True):
            given = row[mask]
            known = sequence.tokens[sequence.num_computed_tokens :]
            common = min(len(known), len(given))
            differs = known[:common] != given[:common]
            if differs.any():
                at = int(differs.argmax())
                raise ShapeError(
                    f"token {sequence.num_computed_tokens + at} of a row is {given[at]}, but {known[at]} in the prompt "
                    "that was passed to begin(); call begin() with these tokens"
                )
            new.append(given[common:])
        self.cache.append_tokens(self.sequences, new)

    def forget_past(self, lengths: Listed[int]) -> None:
        """Drop ids past these lengths; none of them is computed."""
        past = [
            (each, length) for each, length in zip(self.sequences, lengths, strict=True) if each.num_tokens > length
        ]
        if past:
            self.cache.truncate(*zip(*past, strict=True))

    def extend(self, is_token: Mask, given_ids: Ids | None) -> None:
        """Add the columns of a pass whose tokens are committed."""
        self.is_token = np.concatenate([self.is_token, is_token], axis=1)
        new = np.full(is_token.shape, UNKNOWN, np.int64) if given_ids is None else given_ids
        self.given_ids = np.concatenate([self.given_ids, new], axis=1)

    def crop(self, count: int) -> None:
        """Remove the last `count` columns."""
        if count > self.num_columns:
            raise ShapeError(
                f"crop would remove {count} columns, but the cache has {self.num_columns}; crop at most "
                f"{self.num_columns}"
            )
        kept = self.is_token[:, : self.num_columns - count]
        self.cache.truncate(self.sequences, kept.sum(axis=1))
        self.is_token = kept.copy()
        self.given_ids = self.given_ids[:, : self.num_columns].copy()
        if self.states and count:
            self.states.mark_stale()

    def select(self, parents: Listed[int]) -> None:
        """Replace row i by row ``parents[i]``; rows that are not listed are removed, repeated rows share blocks."""
        self.select_stored(parents)
        if parents:
            self.states.select(parents)

    def select_stored(self, parents: Listed[int]) -> None:
        """Select rows as `select`, but leave the states, which have a row for each row of the batch already."""
        if any(not 0 <= parent < len(self) for parent in parents):
            raise ShapeError(f"rows {list(parents)} were selected; the cache only has rows 0 to {len(self) - 1}")
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

    def _uncompute(self, lengths: Any) -> None:
        """Drop keys past these lengths and keep the ids, so that the next pass computes the keys again."""
        pairs = zip(self.sequences, lengths, strict=True)
        longer = [(sequence, length) for sequence, length in pairs if sequence.num_computed_tokens > length]
        if longer:
            sequences, kept = zip(*longer, strict=True)
            ids = [sequence.tokens[length:] for sequence, length in longer]
            self.cache.truncate(sequences, kept)
            self.cache.append_tokens(sequences, ids)


def _columns(is_token: Mask, num_tokens: int) -> int:
    """Return the number of columns before token `num_tokens` of a row, less than all columns."""
    columns = np.flatnonzero(is_token)
    return int(columns[num_tokens]) if num_tokens < len(columns) else max(0, len(is_token) - 1)
