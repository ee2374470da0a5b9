"""Latent attention, its rows and its indexer in float64 NumPy and plain Python."""

from __future__ import annotations

import bisect
import functools
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.reference.repeated import repeated

Array = NDArray[Any]

E4M3_MAX, E2M1 = 448.0, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [float(x) for x in np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)]


def attend(query: Array, keys: Array, values: Array, scale: float, sinks: Array | None = None) -> tuple[Array, Array]:
    """Return output ``[H, L]`` and lse ``[H]`` of one query token ``[H, D]`` over keys ``[n, D]``."""
    scores = np.asarray(query, np.float64) @ np.asarray(keys, np.float64).T * scale
    total = scores if sinks is None else np.concatenate([scores, np.asarray(sinks, np.float64)[:, None]], 1)
    if total.shape[1] == 0:
        return np.zeros((len(query), values.shape[1])), np.full(len(query), -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):  # of NaN and infinities
        top = total.max(axis=1)
        top = np.where(np.isinf(top), 0.0, top)
        lse = top + np.log(np.exp(total - top[:, None]).sum(axis=1))
        return np.exp(scores - lse[:, None]) @ np.asarray(values, np.float64), lse


@repeated
def latent_attention(
    query: Array,
    rows: Array,
    latent_dim: int,
    table: Array,
    seq_lens: Array,
    *,
    scale: float,
    cu_query_lens: Array | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Array | None = None,
    absolute: bool = False,
) -> tuple[Array, Array]:
    """Attend to sequences; `rows` is ``[num_blocks, block_size, D]``, dequantised. `absolute` takes |values|."""
    block_size = rows.shape[1]
    cu = np.arange(len(seq_lens) + 1) if cu_query_lens is None else cu_query_lens
    out = np.zeros((*query.shape[:2], latent_dim))
    lse = np.full(query.shape[:2], -np.inf)
    for i, length in enumerate(seq_lens):
        j = np.arange(length)
        keys = rows[np.asarray(table[i])[j // block_size], j % block_size]
        for token in range(cu[i], cu[i + 1]):
            position = length - (cu[i + 1] - token)
            high = min(length, position + 1) if causal else length
            low = 0 if window is None else max(0, position - window + 1)
            seen = keys[low : max(low, high)]
            values = np.abs(seen[:, :latent_dim]) if absolute else seen[:, :latent_dim]
            out[token], lse[token] = attend(query[token], seen, values, scale, sinks)
    return out, lse


@repeated
def sparse_attention(
    query: Array, rows: Array, latent_dim: int, indices: Array, lens: Array, *, scale: float, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Attend to listed slots."""
    flat = rows.reshape(-1, rows.shape[2])
    parts = []
    for token, slots in enumerate(indices):
        seen = flat[[slot for slot in slots[: lens[token]] if slot >= 0]]
        parts.append(attend(query[token], seen, seen[:, :latent_dim], scale, sinks))
    return np.array([out for out, _ in parts]), np.array([lse for _, lse in parts])


def _nearest(levels: list[float] | tuple[float, ...], size: float) -> int:
    """Return the code of the nearest level; a tie goes to the even code, and the last level is the limit."""
    above = min(bisect.bisect_left(levels, size), len(levels) - 1)
    return min((max(above - 1, 0), above), key=lambda code: (abs(levels[code] - size), code % 2))


def e4m3(x: float) -> int:
    """Return the code of a number: saturating, to nearest even."""
    if math.isnan(x):
        return 0x7F
    return _nearest(E4M3, min(abs(x), E4M3_MAX)) | (0x80 if math.copysign(1, x) < 0 else 0)


def e2m1(x: float) -> int:
    """Return the code of a number."""
    return _nearest(E2M1, min(abs(x), 6.0)) | (8 if math.copysign(1, x) < 0 else 0)


def power_above(x: float) -> float:
    """Return the least power of two that is at least x."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def greatest(x: Array) -> np.float32:
    """Return the greatest magnitude; NaN counts as 0, infinity as the greatest finite number."""
    return np.fmin(np.nanmax(np.abs(np.append(x, np.float32(0)))), np.finfo(np.float32).max)


def fp8_ds_mla(x: Array) -> bytes:
    """Return the 656 bytes of 512 latent and 64 rope numbers."""
    tiles = np.asarray(x[:512], np.float32).reshape(4, 128)
    scales = [power_above(float(max(greatest(tile) / np.float32(448), np.float32(1e-4)))) for tile in tiles]
    codes = bytes(e4m3(float(v) / scale) for tile, scale in zip(tiles, scales, strict=True) for v in tile)
    return codes + struct.pack("<4f", *scales) + np.asarray(x[512:], np.float32).astype(ml_dtypes.bfloat16).tobytes()


def nvfp4_ds_mla(x: Array) -> bytes:
    """Return the 352 bytes of 512 latent and 64 rope numbers. A NaN makes the scale of its group NaN."""
    groups = np.asarray(x[:512], np.float32).reshape(32, 16)
    scales = [
        0x7F if np.isnan(group).any() else e4m3(float(max(greatest(group) / np.float32(6), np.float32(2**-9))))
        for group in groups
    ]
    codes = [
        0 if scale == 0x7F else e2m1(float(np.float32(v) / np.float32(E4M3[scale])))
        for group, scale in zip(groups, scales, strict=True)
        for v in group
    ]
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    ordered = bytearray(32)
    for s, scale in enumerate(scales):
        ordered[8 * (s % 4) + s // 4] = scale
    return packed + bytes(e4m3(float(v)) for v in x[512:]) + bytes(ordered)


@functools.lru_cache(1024)
def read_fp8_ds_mla(row: bytes) -> Array:
    """Return the 576 numbers of a row; products are rounded to bfloat16."""
    codes = np.frombuffer(row[:512], ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(4, 128)
    scales = np.frombuffer(row[512:528], np.float32)
    latent = (codes * scales[:, None]).astype(ml_dtypes.bfloat16)
    numbers = np.concatenate([latent.reshape(-1), np.frombuffer(row[528:], ml_dtypes.bfloat16)]).astype(np.float64)
    numbers.setflags(write=False)
    return numbers


@functools.lru_cache(1024)
def read_nvfp4_ds_mla(row: bytes) -> Array:
    """Return the 576 numbers of a row."""
    nibbles = [nibble for byte in row[:256] for nibble in (byte & 15, byte >> 4)]
    scales = np.frombuffer(row[320:], ml_dtypes.float8_e4m3fn).astype(np.float64)
    latent = [
        (-1 if nibble & 8 else 1) * E2M1[nibble & 7] * scales[8 * (i // 16 % 4) + i // 64]
        for i, nibble in enumerate(nibbles)
    ]
    numbers = np.concatenate([latent, np.frombuffer(row[256:320], ml_dtypes.float8_e4m3fn).astype(np.float64)])
    numbers.setflags(write=False)
    return numbers


def index_scores(query: Array, weights: Array, keys: Array) -> Array:
    """Return ``sum over heads of weight * relu(q.k)`` of queries ``[T, H, D]`` and keys ``[n, D]``."""
    products = np.einsum("qhd,nd->qhn", np.asarray(query, np.float64), np.asarray(keys, np.float64))
    return np.einsum("qh,qhn->qn", np.asarray(weights, np.float64), np.maximum(products, 0))


def select_topk(scores: Array, k: int, length: int) -> list[int]:
    """Return positions of the greatest scores, best first, ties ascending, padded with -1."""
    seen = [j for j in range(length) if scores[j] > -np.inf]
    best = sorted(seen, key=lambda j: (-scores[j], j))[:k]
    return best + [-1] * (k - len(best))
