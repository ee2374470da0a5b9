"""Random calls of latent attention in caches of every format, and their check against float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from pagecore import latent_attention, write_latent
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close, random_numbers
from tests.reference import latent as reference

PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
FORMATS = ("float8_e4m3fn", *PACKED)


@dataclass
class Case:
    """The arguments of a call."""

    query: np.ndarray
    rope: np.ndarray
    planes: tuple[Any, Any]
    table: np.ndarray
    seq_lens: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    format: str | None = None

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows that the cache holds, dequantised; NaN where nothing was written."""
        return dequantised(self.planes, self.format, self.options.get("latent_scale", 1.0))

    @property
    def latent_dim(self) -> int:
        return self.query.shape[2]

    @property
    def joint(self) -> np.ndarray:
        return np.concatenate([self.query, self.rope], 2).astype(np.float64)

    def check(self, scale: float = 0.07, **more: Any) -> None:
        """Compare a dense call with the oracle."""
        out = np.full(self.query.shape, np.nan, self.query.dtype)
        options = {**self.options, **more}
        lists = (self.table, self.seq_lens)
        arrays = (self.joint, self.rows, self.latent_dim, *lists)
        got, lse = latent_attention(
            self.query, self.rope, *self.planes, *lists, out=out, return_lse=True, scale=scale, **options
        )
        assert got is out
        options = {k: v for k, v in options.items() if k not in ("latent_scale", "format", "plan")}
        expected = reference.latent_attention(*arrays, scale=scale, **options)
        size = None
        if self.latent_dim < 16:
            size = reference.latent_attention(*arrays, scale=scale, absolute=True, **options)[0]
        assert_output_close(out, expected[0], size)
        assert_lse_close(lse, expected[1], str(self.query.dtype))


def make_case(
    seq_lens: tuple[int, ...] = (70, 33, 1, 300),
    query_lens: tuple[int, ...] | None = None,
    *,
    heads: int = 3,
    dims: tuple[int, int] = (512, 64),
    block_size: int = 16,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    format: str | None = None,
    joint: bool = True,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Return random sequences in scattered blocks; slots that belong to none are NaN, or bytes of NaN."""
    rng = np.random.default_rng(seed)
    latent_dim, rope_dim = dims
    lens = np.array(seq_lens, np.int32)
    width = max(-(-int(n) // block_size) for n in [*lens, 1])
    num_blocks = len(lens) * width + 3
    ids = rng.permutation(np.arange(1, num_blocks))[: len(lens) * width]
    table = ids.reshape(len(lens), width).astype(np.int32)
    cache_dtype = cache_dtype or dtype
    planes: tuple[Any, Any]
    if format in PACKED:
        planes = (np.full((num_blocks, block_size, PACKED[format]), 0xFF, np.uint8), None)
    else:
        stored = ml_dtypes.float8_e4m3fn if format else DTYPES[cache_dtype]
        shape = (num_blocks, block_size)
        if joint:
            planes = (np.full((*shape, latent_dim + rope_dim), np.nan, stored), None)
        else:
            planes = tuple(np.full((*shape, dim), np.nan, stored) if dim else None for dim in dims)
    factor = {"scale": scale} if format == "float8_e4m3fn" else {}
    for row, n in zip(table, lens, strict=True):
        new = random_numbers(rng, (n, latent_dim + rope_dim), np.dtype(np.float32))
        slots = row[np.arange(n) // block_size] * block_size + np.arange(n) % block_size
        write_latent(new[:, :latent_dim], new[:, latent_dim:], *planes, slots, **factor)
    queries = len(lens) if query_lens is None else sum(query_lens)
    query = random_numbers(rng, (queries, heads, latent_dim), DTYPES[dtype]).copy()
    rope = random_numbers(rng, (queries, heads, rope_dim), DTYPES[dtype]).copy()
    options: dict[str, Any] = {}
    if query_lens is not None:
        options["cu_query_lens"] = np.cumsum([0, *query_lens]).astype(np.int32)
    if factor:
        options["latent_scale"] = scale
    return Case(query, rope, planes, table, lens, options, format)


def dequantised(planes: tuple[Any, Any], format: str | None, scale: float) -> np.ndarray:
    latent, rope = planes
    if format in PACKED:
        read = getattr(reference, f"read_{format}")
        return np.array([[read(row.tobytes()) for row in block] for block in latent])
    joint = latent if rope is None else np.concatenate([latent, rope], 2)
    return joint.astype(np.float64) if format is None else (joint.astype(np.float32) * np.float32(scale)).astype(float)
