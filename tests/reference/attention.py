"""Attention over a paged cache in float64, one sequence at a time: the oracle of the ops.

A key is read through the block table only if some query attends to it. A NaN in any other slot therefore appears in the
result of a kernel that reads too much, and never in the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.reference.repeated import repeated
from tests.reference.trees import tree_view

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


def allowed(
    query_len: int,
    seq_len: int,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    mask: Bool | None = None,
) -> Bool:
    """Return the attention mask of a sequence, bool ``[query_len, seq_len]``."""
    p = np.arange(seq_len - query_len, seq_len)[:, None]
    j = np.arange(seq_len)[None, :]
    attended = np.ones((query_len, seq_len), dtype=bool)
    if isinstance(window, tuple):
        left, _ = window
        if left is not None and left != -1:
            attended &= j >= p - left
    elif window is not None:
        attended &= j > p - window
    if chunk is not None:
        attended &= j // chunk == p // chunk
    attended |= j < (sink_tokens or 0)
    if causal:
        attended &= j <= p
    elif isinstance(window, tuple) and window[1] is not None and window[1] != -1:
        attended &= j <= p + window[1]
    if mask is not None:
        attended &= mask
    return attended


def query_ranges(num_sequences: int, cu_query_lens: ArrayLike | None) -> list[tuple[int, int]]:
    """Return the query rows ``[first, end)`` of each sequence; one row each without cu_query_lens."""
    if cu_query_lens is None:
        return [(i, i + 1) for i in range(num_sequences)]
    cu = [int(x) for x in np.asarray(cu_query_lens)]
    return list(itertools.pairwise(cu))


def fetch(cache: NDArray[Any], blocks: NDArray[Any], wanted: Bool, scales: Float) -> Float:
    """Return the wanted tokens of a sequence, dequantised, as ``[heads, s, D]``; zeros for the other tokens."""
    block_size, heads, dim = cache.shape[1:]
    rows = np.zeros((wanted.size, heads, dim))
    j = np.flatnonzero(wanted)
    rows[j] = cache[blocks[j // block_size], j % block_size].astype(np.float64) * scales[:, None]
    return rows.swapaxes(0, 1)


def attend(
    q: Float,
    k: Float,
    v: Float,
    attended: Bool,
    *,
    scale: float,
    softcap: float,
    slopes: Float,
    sinks: Float,
    distances: NDArray[Any],
) -> tuple[Float, Float]:
    """Groups of query heads by key head: ``q [h, g, n, D]``, ``k [h, s, D]``, ``v [h, s, Dv]`` -> ``[h, g, n, Dv]``.

    Returns the lse as well, ``[h, g, n]``. A sink of -infinity is none, ``sinks`` and ``slopes`` are ``[h, g]``.
    ``distances [n, s]`` are positions of keys less those of queries.
    """
    with np.errstate(all="ignore"):  # of NaN and infinities
        scores = scale * (q @ k.swapaxes(1, 2)[:, None])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if slopes.any():
            scores = scores + slopes[..., None, None] * distances
        logits = np.where(attended, scores, -np.inf)
        top = np.maximum(logits.max(axis=-1, initial=-np.inf), sinks[..., None])
        origin = np.where(top == -np.inf, 0.0, top)
        lse = origin + np.log(np.exp(logits - origin[..., None]).sum(axis=-1) + np.exp(sinks[..., None] - origin))
        weights = np.where((lse == -np.inf)[..., None], 0.0, np.exp(logits - lse[..., None]))
        if np.isfinite(v).all():
            return weights @ v[:, None], lse
        out = np.zeros((*lse.shape, v.shape[2]))
        for i, keys in enumerate(attended):  # a key that a row does not attend to may be NaN, and 0 * NaN is NaN
            out[:, :, i] = weights[:, :, i, keys] @ v[:, keys]
        return out, lse


def parts(by_group: tuple[int, int], at_once: int) -> Iterator[tuple[slice, slice]]:
    """Yield parts of up to `at_once` query heads: whole groups, or parts of one group."""
    kv_heads, group = by_group
    h_step, g_step = max(1, at_once // group), max(1, min(group, at_once))
    for h, g in itertools.product(range(0, kv_heads, h_step), range(0, group, g_step)):
        yield slice(h, h + h_step), slice(g, g + g_step)


@repeated
def paged_attention(
    query: NDArray[Any],
    key_cache: NDArray[Any],
    value_cache: NDArray[Any],
    block_table: NDArray[Any],
    seq_lens: ArrayLike,
    *,
    rows: ArrayLike | None = None,
    cu_query_lens: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    softcap: float = 0.0,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
) -> tuple[Float, Float]:
    """`pagecore.paged_attention` by its definition: output ``[T, Hq, Dv]`` and lse ``[T, Hq]``, in float64."""
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = key_cache.shape[2]
    lens = [int(x) for x in np.asarray(seq_lens)]
    table_rows = range(len(lens)) if rows is None else [int(x) for x in np.asarray(rows)]
    scale = 1.0 / np.sqrt(dim) if scale is None else scale
    k_scales = np.broadcast_to(np.asarray(1.0 if key_scale is None else key_scale, np.float64), num_kv_heads)
    v_scales = np.broadcast_to(np.asarray(1.0 if value_scale is None else value_scale, np.float64), num_kv_heads)
    by_group = num_kv_heads, num_heads // num_kv_heads
    slopes = np.asarray(np.zeros(num_heads) if alibi_slopes is None else alibi_slopes, np.float64).reshape(by_group)
    sink_numbers = np.full(num_heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink_numbers = sink_numbers.reshape(by_group)
    flat_mask = None if mask is None else np.asarray(mask)

    out = np.zeros((num_tokens, *by_group, value_cache.shape[3]))
    lse = np.full((num_tokens, *by_group), -np.inf)
    mask_start = 0
    ranges = query_ranges(len(lens), cu_query_lens)
    for (first, end), seq_len, row in zip(ranges, lens, table_rows, strict=True):
        shape = (end - first, seq_len)
        own_mask = None
        if flat_mask is not None:
            own_mask = flat_mask[mask_start : mask_start + shape[0] * shape[1]].reshape(shape)
            mask_start += shape[0] * shape[1]
        attended = allowed(*shape, causal=causal, window=window, chunk=chunk, sink_tokens=sink_tokens, mask=own_mask)
        distances = np.arange(seq_len)[None, :] - np.arange(seq_len - shape[0], seq_len)[:, None]
        if tree_mask is not None:
            own = None if positions is None else np.asarray(positions)[first:end]
            bits = np.asarray(tree_mask).astype(np.uint64)
            rows_of_bits = (bits[:, None] if bits.ndim == 1 else bits)[first:end]
            attended, keys, at = tree_view(rows_of_bits, seq_len, positions=own, window=window, chunk=chunk)
            distances = keys - at[:, None]
        wanted = attended.any(axis=0)
        k = fetch(key_cache, block_table[row], wanted, k_scales)
        v = fetch(value_cache, block_table[row], wanted, v_scales)
        q = query[first:end].astype(np.float64).reshape(shape[0], *by_group, dim).transpose(1, 2, 0, 3)
        for h, g in parts(by_group, 2**22 // max(1, shape[0] * shape[1])):
            result, own_lse = attend(
                q[h, g],
                k[h],
                v[h],
                attended,
                scale=scale,
                softcap=softcap,
                slopes=slopes[h, g],
                sinks=sink_numbers[h, g],
                distances=distances,
            )
            out[first:end, h, g], lse[first:end, h, g] = result.transpose(2, 0, 1, 3), own_lse.transpose(2, 0, 1)
    return out.reshape(num_tokens, num_heads, out.shape[-1]), lse.reshape(num_tokens, num_heads)


def write_kv(
    new: NDArray[Any], cache: NDArray[Any], slot_mapping: Sequence[int] | NDArray[Any], scale: ArrayLike | None = None
) -> None:
    """Write one plane, token after token: ``new [T, H, D]`` into ``cache [blocks, block_size, H, D]``."""
    block_size = cache.shape[1]
    for token, slot in zip(new, slot_mapping, strict=False):
        if slot < 0:
            continue
        stored = token.astype(np.float32)
        if scale is not None:
            stored = stored / np.broadcast_to(np.asarray(scale, np.float32), token.shape[0])[:, None]
        cache[slot // block_size, slot % block_size] = stored.astype(cache.dtype)


def merge(out_a: Float, lse_a: Float, out_b: Float, lse_b: Float) -> tuple[Float, Float]:
    """Merge attention over two disjoint sets of keys, row by row."""
    return merge_parts(np.stack((out_a, out_b), axis=1), np.stack((lse_a, lse_b), axis=1))


def merge_parts(outs: Float, lses: Float, cu_parts: Any = None) -> tuple[Float, Float]:
    """Merge the parts of each token: ``outs [T, N, H, D]``, or ``[P, H, D]`` in the order of `cu_parts`."""
    ranges = list(zip(outs, lses, strict=True))
    if cu_parts is not None:
        ranges = [(outs[begin:end], lses[begin:end]) for begin, end in itertools.pairwise(cu_parts)]
    heads, dim = outs.shape[-2:]
    out, lse = np.zeros((len(ranges), heads, dim)), np.full((len(ranges), heads), -np.inf)
    for token, head in np.ndindex(lse.shape):
        parts = [(o[head], w[head]) for o, w in zip(*ranges[token], strict=True) if not np.isinf(w[head])]
        if not parts:
            continue
        top = max(weight for _, weight in parts)
        lse[token, head] = top + np.log(sum(np.exp(weight - top) for _, weight in parts))
        out[token, head] = sum(np.exp(weight - lse[token, head]) * o for o, weight in parts)
    return out, lse
