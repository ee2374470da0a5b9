"""AttentionSpec: the spec of an ordinary attention layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import SupportsFloat

from pagecore.arrays import DType, as_dtype
from pagecore.errors import ShapeError, UnsupportedDtype
from pagecore.storage.checks import as_float, as_tuple, require_int
from pagecore.storage.parallel import TensorParallel
from pagecore.storage.spec import CACHE_DTYPES, Plane


@dataclass(frozen=True)
class AttentionSpec:
    """The stored planes and the attention options of one layer.

    Specs are values: compared by their fields, and hashable. A spec describes the whole layer, also for one rank of
    several; `TensorParallel.shard` returns the part of a rank.

    Parameters
    ----------
    num_kv_heads, head_dim : int
        Number of key-value heads, and their dimension.
    v_head_dim : int, optional
        Dimension of values; `head_dim` by default.
    dtype : {"bfloat16", "float16", "float32"}
        Dtype of stored keys and values.
    window : int, optional
        Sliding window: number of keys that a query sees, including its own; by default all.
    num_query_heads : int, optional
        Number of query heads, a multiple of `num_kv_heads`; by default that of the query.
    scale : float, optional
        Factor of the scores q.k; ``head_dim ** -0.5`` by default.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    sinks : sequence of float, optional
        One additional logit per query head in the denominator of the softmax (GPT-OSS).

    Raises
    ------
    ShapeError, UnsupportedDtype
        Invalid sizes, numbers or dtype.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: DType | str = "bfloat16"
    window: int | None = None
    num_query_heads: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    sinks: Iterable[SupportsFloat] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("num_kv_heads", require_int("num_kv_heads", self.num_kv_heads))
        put("head_dim", require_int("head_dim", self.head_dim))
        put("v_head_dim", require_int("v_head_dim", self.head_dim if self.v_head_dim is None else self.v_head_dim))
        put("dtype", as_dtype(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise UnsupportedDtype(f"dtype is {self.dtype}; a cache stores {', '.join(CACHE_DTYPES)}")
        if self.window is not None:
            put("window", require_int("window", self.window, max=None))
        if self.num_query_heads is not None:
            put("num_query_heads", require_int("num_query_heads", self.num_query_heads))
            if self.num_query_heads % self.num_kv_heads:
                raise ShapeError(
                    f"num_query_heads is {self.num_query_heads}; it must be a multiple of num_kv_heads, "
                    f"{self.num_kv_heads}"
                )
        if self.scale is not None:
            put("scale", as_float("scale", self.scale))
            if not math.isfinite(self.scale):
                raise ShapeError(f"scale is {self.scale}; give a finite number, or None for head_dim ** -0.5")
        put("softcap", as_float("softcap", self.softcap))
        if not (math.isfinite(self.softcap) and self.softcap >= 0):
            raise ShapeError(f"softcap is {self.softcap}; give a finite number of at least 0; 0 disables it")
        if self.sinks is not None:
            listed = as_tuple("sinks", self.sinks, "one number for each query head")
            put("sinks", tuple(as_float("a sink", sink) for sink in listed))
            self._check_sinks()

    def _check_sinks(self) -> None:
        if any(math.isnan(float(sink)) for sink in self.sinks or ()):
            raise ShapeError("a sink is nan; give numbers, and -inf for a head without a sink")
        count = len(tuple(self.sinks or ()))
        heads = self.num_query_heads
        if count == 0 or count % self.num_kv_heads or (heads is not None and count != heads):
            expected = heads if heads is not None else f"a multiple of num_kv_heads {self.num_kv_heads}"
            raise ShapeError(f"sinks has {count} entries; expected one per query head, {expected}")

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Key ``(num_kv_heads, head_dim)`` and value ``(num_kv_heads, v_head_dim)``."""
        dtype = as_dtype(self.dtype)
        assert self.v_head_dim is not None
        return (
            Plane("key", (self.num_kv_heads, self.head_dim), dtype),
            Plane("value", (self.num_kv_heads, self.v_head_dim), dtype),
        )

    def shard(self, parallel: TensorParallel) -> AttentionSpec:
        """Return one rank's part of the layer: its key-value heads, and their query heads and sinks."""
        heads = parallel.heads(self.num_kv_heads)
        sinks = None if self.sinks is None else tuple(self.sinks)
        num_query_heads = self.num_query_heads if sinks is None else len(sinks)
        if num_query_heads is None:
            return replace(self, num_kv_heads=len(heads))
        queries = parallel.query_heads(num_query_heads)
        return replace(
            self,
            num_kv_heads=len(heads),
            num_query_heads=None if self.num_query_heads is None else len(queries),
            sinks=None if sinks is None else sinks[queries.start : queries.stop],
        )

    def with_dtype(self, dtype: DType | str) -> AttentionSpec:
        """Return the same layer with keys and values stored as `dtype`."""
        return replace(self, dtype=dtype)
