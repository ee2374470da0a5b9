"""Shapes and formats of caches and their stored scales, while `jax.jit` traces a function."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pagecore.arrays.dtypes.formats import FORMATS, Format
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown
from pagecore.interop.jax import _xla
from pagecore.interop.jax.arguments import FLOATS, indices, scales, without_empty

Layout = Literal["NHD", "HND"]
Pair: TypeAlias = tuple[Any, Any]  # of keys and of values
CODES = frozenset(str(format.dtype) for format in FORMATS.values())
_FORMAT_OF = {(str(f.dtype), str(f.scale_dtype) if f.scale_dtype else None): f for f in FORMATS.values()}
_NUMBER_OF = {name: number for number, name in enumerate(FORMATS, 1)}  # as in format.hpp; 0: numbers are stored


class StoredCache:
    """Keys or values of one layer, or with `layer` of a stack of layers: numbers, or codes with their scales.

    Attributes
    ----------
    format : Format or None
    plane : jax.Array or None
        Stored scales.
    factor : jax.Array, float32 [Hkv], or None
        Given factors.
    dim : int
        Numbers of a row.
    """

    def __init__(
        self, label: str, codes: Any, scale: Any, global_scale: Any, stacked: bool, axes: str, heads_axis: int
    ) -> None:
        name = f"{label}_cache"
        self.codes, self.plane = codes, scale if isinstance(scale, jax.Array | np.ndarray) and scale.ndim > 1 else None
        self.shape = _cache_shape(codes, name, stacked, axes)
        self.format = _format_of(codes, self.plane, label)
        self.dim = self.shape[-1] * (self.format.codes_per_byte if self.format else 1)
        if self.plane is not None:
            self._check_plane(f"{label}_scale")
        self._factor = scale if self.plane is None else None
        self._num_heads, self._label, self._global_scale = self.shape[heads_axis], label, global_scale

    def factor(self, divides: bool) -> jax.Array | None:
        """Return the given factors, float32 ``[Hkv]``; None if all are 1. With `divides` they must not be 0."""
        name = f"{self._label}_global_scale"
        if self.format is not None and self.format.name == "nvfp4":
            factor = np.float32(_xla.number(self._global_scale, name))
            if not factor > 0:
                raise UnsupportedOption(f"{name} is {self._global_scale}; as a float32 it must be above 0")
            return scales(factor, name, self._num_heads, divides=divides)
        if not isinstance(self._global_scale, int | float | np.number) or self._global_scale != 1:
            raise UnsupportedOption(
                f"{name} is {shown(self._global_scale)} and {self._label}_cache is not nvfp4; leave it out: only nvfp4 "
                "has a global scale, and its stored scales are float8_e4m3fn"
            )
        return scales(self._factor, f"{self._label}_scale", self._num_heads, divides=divides)

    @property
    def format_number(self) -> np.int64:
        """The number of the format in the native enum; 0 if numbers are stored."""
        return np.int64(_NUMBER_OF[self.format.name] if self.format else 0)

    def _check_plane(self, name: str) -> None:
        assert self.plane is not None
        assert self.format is not None
        self.format.check_dim(f"the head_dim of {name.removesuffix('_scale')}_cache", self.dim)
        expected = (*self.shape[:-1], self.format.row_scales(self.dim))
        if self.plane.shape != expected:
            raise ShapeError(
                f"{name} has shape {self.plane.shape}; the scales of a cache {self.shape} in format "
                f"{self.format.name!r} are {expected}: pass the plane of the same pool"
            )


class CachePair:
    """The common shape of a key cache and a value cache, of one layer or, with `layer`, of a stack of layers."""

    def __init__(self, caches: Pair, scales: Pair, global_scales: Pair, layer: Any, layout: str) -> None:
        check_layout(layout)
        self.heads_first = layout == "HND"
        inner = "num_kv_heads, block_size" if self.heads_first else "block_size, num_kv_heads"
        stacked = layer is not None
        axes = f"[{'num_layers, ' if stacked else ''}num_blocks, {inner}, head_dim]"
        heads_axis = -3 if self.heads_first else -2
        self.key, self.value = (
            StoredCache(label, codes, each, factor, stacked, axes, heads_axis)
            for label, codes, each, factor in zip(("key", "value"), caches, scales, global_scales, strict=True)
        )
        key, value = self.key.shape, self.value.shape
        if key[:-1] != value[:-1]:
            raise ShapeError(
                f"key_cache has shape {key} and value_cache {value}; only their last axes, head_dim, may differ"
            )
        self.num_blocks, first, second = key[-4:-1]
        self.block_size, self.num_heads = (second, first) if self.heads_first else (first, second)
        self.layer = None if layer is None else _layer_number(layer, key[0])

    @property
    def planes(self) -> dict[str, jax.Array]:
        """Stored scales by the name of their operand."""
        given = {"key_plane": self.key.plane, "value_plane": self.value.plane}
        return {name: plane for name, plane in given.items() if plane is not None}

    def operands(self, divides: bool) -> dict[str, Any]:
        """Return the optional operands that say where and how the caches are stored."""
        factors = {"key_scale": self.key.factor(divides), "value_scale": self.value.factor(divides)}
        return {"layer": self.layer} | factors | self.planes

    def attributes(self) -> dict[str, np.int64]:
        """Return the attributes that say how the caches are stored."""
        return {
            "heads_first": np.int64(self.heads_first),
            "key_format": self.key.format_number,
            "value_format": self.value.format_number,
        }


def check_layout(layout: object) -> None:
    """Raise UnsupportedOption unless `layout` is "NHD" or "HND"."""
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise UnsupportedOption(f"layout is {shown(layout)}; it must be 'NHD' or 'HND', the order of a block's axes")


def _layer_number(layer: Any, num_layers: int) -> Any:
    if isinstance(layer, int | np.integer):
        if not 0 <= layer < num_layers:
            raise ShapeError(f"layer is {layer} and the caches hold {num_layers} layers; layers start at 0")
        return jnp.int32(layer)
    return indices(layer, "layer", 0, "a number")


def _cache_shape(array: Any, name: str, stacked: bool, axes: str) -> tuple[int, ...]:
    if not isinstance(array, jax.Array):
        raise UnsupportedDtype(
            f"{name} is a {type(array).__name__}, which JAX would copy; pass a jax.Array, or as_jax(tensor) to "
            "read a pagecore.Tensor"
        )
    if array.dtype not in FLOATS and str(array.dtype) not in CODES:
        raise UnsupportedDtype(
            f"{name} is {array.dtype}; float32, float16 and bfloat16 are served, and the codes of a format: "
            f"{', '.join(sorted(CODES))}"
        )
    ndim = 5 if stacked else 4
    if array.ndim != ndim:
        hint = "with layer=, caches are stacked" if stacked else "without layer=, a cache has one layer"
        raise ShapeError(f"{name} has shape {array.shape}; it must have {ndim} axes: {axes} ({hint})")
    return without_empty(array, name, ndim - 3, axes)


def _format_of(codes: Any, plane: Any, label: str) -> Format | None:
    """Return the format of codes and stored scales, as `pagecore.write_kv` determines it."""
    if plane is not None and not isinstance(plane, jax.Array):
        raise UnsupportedDtype(
            f"{label}_scale is a {type(plane).__name__}, which JAX would copy; pass a jax.Array, or as_jax(tensor)"
        )
    kind = str(codes.dtype)
    if plane is None and kind in FLOATS:
        return None
    found = _FORMAT_OF.get((kind, None if plane is None else str(plane.dtype)))
    if found is None:
        held = "no stored scales" if plane is None else f"scales of {plane.dtype}"
        pairs = ", ".join(f"{f.dtype} and {f.scale_dtype} ({name!r})" for name, f in FORMATS.items() if f.scale_dtype)
        raise UnsupportedDtype(f"{label}_cache is {kind} with {held}; use codes and scales of one format: {pairs}")
    return found
