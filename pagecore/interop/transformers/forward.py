"""One forward pass of a model: its new columns take blocks, each layer writes and attends, then it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagecore.cache import Batch
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.interop.transformers.rows import Ids, Mask, Rows


class Forward:
    """The tokens of `is_token`, [batch, columns], on their way through the model.

    Where a generation begins with several equal rows (beams, several answers to one prompt), the first of them stands
    for all: it alone is stored and attended, and the others are forked from it when the pass is done.

    States: prepared (made) -> done (finish) -> over (commit); prepared -> over (abandon). What is done can still be cropped
    without a trace: it counts when the next pass begins.
    """

    def __init__(self, rows: Rows, ids: Ids | None, is_token: Mask, batch: Batch | None = None) -> None:
        self.rows = rows
        self.is_token = is_token
        self.leaders = _leaders(ids, is_token) if len(rows) == 0 else None
        own = is_token if self.leaders is None else is_token[np.unique(self.leaders)]
        if len(rows) == 0:
            rows.open(len(own))
        counts = own.sum(axis=1)
        try:
            if ids is not None:
                _name(rows, ids if self.leaders is None else ids[np.unique(self.leaders)], own)
            out = batch if batch is not None and _fits(batch, own) else None
            self.batch = rows.cache.prepare(rows.sequences, counts, out=out)
        except BaseException:
            if rows.num_columns == 0:
                rows.clear()
            raise
        # Which of the own rows' columns are tokens, flat; None where all are.
        self.places = None if own.all() else torch.from_numpy(np.flatnonzero(own))
        self.is_done = False
        self.is_over = False

    def finish(self) -> None:
        """The model is through."""
        self.is_done = not self.is_over

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values ``[batch, heads, columns, dim]`` of a layer."""
        self._check(key)
        self.rows.cache.write(layer, self._pack(key), self._pack(value), self.batch)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scale: float | None,
        softcap: float,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Outputs ``[batch, columns, heads, dim]`` of queries ``[batch, heads, columns, dim]``; 0 where no token is."""
        self._check(query)
        options: dict[str, Any] = {"softcap": softcap}
        if scale is not None:
            options["scale"] = scale
        if sinks is not None:
            options["sinks"] = sinks.detach()
        if window != self.rows.cache.spec(layer).window:
            raise UnsupportedOption(
                f"layer {layer} attends with sliding_window {window}; the cache keeps "
                f"{self.rows.cache.spec(layer).window} for it: make the cache of this model's config"
            )
        attended = self.rows.cache.attend(layer, self._pack(query), self.batch, **options)
        return self._unpack(attended)

    def commit(self, accepted: int | None = None) -> None:
        """Count the columns, all or the first `accepted`, as computed."""
        if self.is_over:
            return
        self.is_done, self.is_over = False, True
        columns = self.is_token.shape[1] if accepted is None else accepted
        rows, kept = self.rows, self.is_token[:, :columns]
        if self.leaders is None:
            rows.cache.commit(self.batch, None if accepted is None else kept.sum(axis=1))
            if accepted is not None:
                self._forget_rejected()
            rows.extend(kept)
            return
        chosen, places = np.unique(self.leaders, return_inverse=True)
        rows.cache.commit(self.batch, None if accepted is None else kept[chosen].sum(axis=1))
        if accepted is not None:
            self._forget_rejected()
        rows.extend(kept[chosen])
        if len(chosen) < len(places):
            rows.select(places.tolist())

    def abandon(self) -> None:
        """Undo a pass that failed."""
        if self.is_over:
            return
        self.is_done, self.is_over = False, True
        self.rows.cache.abandon(self.batch)
        if self.rows.num_columns == 0:
            self.rows.clear()
        else:
            self._forget_rejected()

    def _forget_rejected(self) -> None:
        for sequence in self.rows.sequences:
            if sequence.num_tokens > sequence.num_computed_tokens:
                self.rows.cache.truncate(sequence, sequence.num_computed_tokens)

    def _check(self, array: torch.Tensor) -> None:
        if array.ndim != 4 or (array.shape[0], array.shape[2]) != self.is_token.shape:
            raise ShapeError(
                f"a layer came with {tuple(array.shape)}; this forward pass has {self.is_token.shape[0]} rows of "
                f"{self.is_token.shape[1]} columns: [rows, heads, columns, dim]"
            )

    def _pack(self, array: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] of [batch, heads, columns, dim]."""
        packed = array.transpose(1, 2)
        if self.leaders is not None:
            packed = packed[np.unique(self.leaders).tolist()]
        packed = packed.reshape(-1, *packed.shape[2:])
        return packed if self.places is None else packed[self.places.to(packed.device)]

    def _unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, columns, heads, dim] of [tokens, heads, dim]."""
        batch, columns = self.is_token.shape
        own = batch if self.leaders is None else len(np.unique(self.leaders))
        if self.places is not None:
            spread = tokens.new_zeros((own * columns, *tokens.shape[1:]))
            spread[self.places.to(tokens.device)] = tokens
            tokens = spread
        tokens = tokens.view(own, columns, *tokens.shape[1:])
        return tokens if self.leaders is None else tokens[np.unique(self.leaders, return_inverse=True)[1].tolist()]


def _fits(batch: Batch, is_token: Mask) -> bool:
    return not batch.in_flight and batch.max_sequences == len(is_token) and batch.max_tokens == int(is_token.sum())


def _leaders(ids: Ids | None, is_token: Mask) -> Any:
    """For each row the first that equals it; None where no two do, or where nobody knows the ids."""
    if ids is None or len(ids) < 2:
        return None
    both = np.concatenate([np.where(is_token, ids, -1), is_token], axis=1)
    _, first, inverse = np.unique(both, axis=0, return_index=True, return_inverse=True)
    return None if len(first) == len(ids) else first[inverse.reshape(-1)]


def _name(rows: Rows, ids: Ids, is_token: Mask) -> None:
    """Make the ids of new columns known, where they are not yet; refuses ids that contradict what is known."""
    new: list[Any] = []
    for sequence, row, mask in zip(rows.sequences, ids, is_token, strict=True):
        given = row[mask]
        known = sequence.tokens[sequence.num_computed_tokens :]
        common = min(len(known), len(given))
        if (known[:common] != given[:common]).any():
            at = int((known[:common] != given[:common]).argmax())
            raise ShapeError(
                f"token {sequence.num_computed_tokens + at} of sequence {sequence.id!r} is {given[at]} now and was "
                f"{known[at]} when the generation began; begin anew with these tokens"
            )
        new.append(given[common:])
    rows.cache.append_tokens(rows.sequences, new)
