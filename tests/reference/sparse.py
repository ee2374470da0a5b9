"""Sparse selection by its definitions, one token and head at a time: the oracle of bounds, scores and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.reference.attention import query_ranges

Array = NDArray[Any]


def write_bounds(key: Array, key_min: Array, key_max: Array, slots: Sequence[int] | Array, block_size: int) -> None:
    """Keep the bounds of each block: ``key [T, H, D]``, bounds ``[blocks, H, D]``; the first slot starts them anew."""
    for token, slot in zip(key, slots, strict=False):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), block_size)
        stored = token.astype(key_min.dtype)
        first = offset == 0
        key_min[block] = stored if first else np.minimum(key_min[block], stored)
        key_max[block] = stored if first else np.maximum(key_max[block], stored)


def write_labels(key: Array, label: Array, channels: ArrayLike, slots: Sequence[int] | Array) -> None:
    """Gather the label channels of each key, ``channels [H, S]``, into ``label [blocks, block_size, H, S]``."""
    listed = np.asarray(channels)
    for token, slot in zip(key, slots, strict=False):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), label.shape[1])
        for head in range(token.shape[0]):
            label[block, offset, head] = token[head, listed[head]].astype(label.dtype)


def score_blocks(
    query: Array,
    key_min: Array,
    key_max: Array,
    block_table: Array,
    seq_lens: ArrayLike,
    *,
    block_size: int,
    rows: ArrayLike | None = None,
    cu_query_lens: ArrayLike | None = None,
    causal: bool = True,
    group: str = "max",
) -> Array:
    """Return the upper bound of q.k in each block, float64 ``[T, Hkv, max_blocks]``, -inf for blocks not visible."""
    lens = [int(n) for n in np.asarray(seq_lens)]
    heads = key_min.shape[1]
    scores = np.full((query.shape[0], heads, block_table.shape[1]), -np.inf)
    for i, (first, end) in enumerate(query_ranges(len(lens), cu_query_lens)):
        row = block_table[i if rows is None else int(np.asarray(rows)[i])]
        for t in range(first, end):
            visible = lens[i] - (end - 1 - t) if causal else lens[i]
            for head in range(heads):
                q = query[t].astype(np.float64).reshape(heads, -1, query.shape[2])[head]
                q = q.mean(axis=0, keepdims=True) if group == "mean" else q
                for j in range(-(-max(visible, 0) // block_size)):
                    low, high = (plane[row[j], head].astype(np.float64) for plane in (key_min, key_max))
                    scores[t, head, j] = np.maximum(q * low, q * high).sum(axis=1).max()
    return scores


def score_tokens(
    query: Array,
    label: Array,
    channels: ArrayLike,
    block_table: Array,
    seq_lens: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    cu_query_lens: ArrayLike | None = None,
    reduce: str = "max_abs",
) -> Array:
    """Return query label . label of each earlier token, float64 ``[T, Hkv, max_len]``; -inf from the query's own on."""
    lens = [int(n) for n in np.asarray(seq_lens)]
    listed = np.asarray(channels)
    heads, block_size = label.shape[2], label.shape[1]
    scores = np.full((query.shape[0], heads, max(lens, default=0)), -np.inf)
    for i, (first, end) in enumerate(query_ranges(len(lens), cu_query_lens)):
        row = block_table[i if rows is None else int(np.asarray(rows)[i])]
        for t in range(first, end):
            for head in range(heads):
                q = query[t].astype(np.float64).reshape(heads, -1, query.shape[2])[head][:, listed[head]]
                chosen = q[np.abs(q).argmax(axis=0), np.arange(q.shape[1])] if reduce == "max_abs" else q.mean(axis=0)
                for j in range(max(lens[i] - (end - t), 0)):
                    stored = label[row[j // block_size], j % block_size, head].astype(np.float64)
                    scores[t, head, j] = chosen @ stored
    return scores


def select_row(
    scores: Array, budget: int, length: int, *, sinks: int = 0, recent: int = 0, threshold: int | None = None
) -> list[int]:
    """Return the selected positions of one row: sinks, the best `budget` of the middle, and the recent ones."""
    if threshold is not None and length < threshold:
        return list(range(length))
    first, last = min(sinks, length), max(length - recent, min(sinks, length))
    usable = [j for j in range(first, last) if not np.isnan(scores[j]) and scores[j] != -np.inf]
    best = sorted(usable, key=lambda j: (-scores[j], j))[:budget]
    return sorted([*range(first), *best, *range(last, length)])


def selection_mask(
    positions: Array, counts: Array, unit: int, seq_lens: ArrayLike, query_lens: Sequence[int]
) -> list[list[Array]]:
    """Return, for each key head and sequence, the bool mask ``[query_len, seq_len]`` of the selected keys."""
    lens = [int(n) for n in np.asarray(seq_lens)]
    masks = []
    for head in range(positions.shape[1]):
        own = []
        for i, (length, queries) in enumerate(zip(lens, query_lens, strict=True)):
            mask = np.zeros((queries, length), bool)
            for entry in positions[i, head, : counts[i, head]]:
                mask[:, entry * unit : (entry + 1) * unit] = True
            own.append(mask)
        masks.append(own)
    return masks
