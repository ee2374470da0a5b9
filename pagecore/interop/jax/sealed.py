"""Sealed blocks as operands of the custom calls: shapes and dtypes, checked while `jax.jit` traces a function."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown
from pagecore.interop.jax.arguments import FLOATS, check_length, check_rank, indices
from pagecore.interop.jax.caches import CachePair
from pagecore.ops import SealedBlocks

PLANES = ("key", "value", "key_scale", "value_scale")
LANES = 16  # channels of a vector: dims and groups of channels are multiples
BITS = (2, 4)
AXES = {
    "key": "num_blocks, Hkv, block_size * bits / 32, D",
    "value": "num_blocks, block_size, Hkv, Dv * bits / 32",
    "key_scale": "num_blocks, Hkv, groups, 2, D",
    "value_scale": "num_blocks, block_size, Hkv, groups, 2",
}


def sealed_planes(sealed: object, cache: CachePair) -> tuple[dict[str, jax.Array], dict[str, np.int64]]:
    """Return the planes of sealed blocks as operands, and the attributes that say how they are stored.

    Raises
    ------
    UnsupportedOption, UnsupportedDtype, ShapeError
        Not a SealedBlocks; planes of other dtypes or shapes than the plain caches and a format of 2 or 4 bits need.
    """
    if not isinstance(sealed, SealedBlocks):
        raise UnsupportedOption(f"sealed is {shown(sealed)}; pass a SealedBlocks")
    _check_newest(cache)
    planes = {name: _plane(getattr(sealed, name), name, cache) for name in PLANES}
    shapes = {name: plane.shape[-len(AXES[name].split(",")) :] for name, plane in planes.items()}
    size, heads, key_dim, value_dim = cache.block_size, cache.num_heads, cache.key.dim, cache.value.dim
    num_blocks, words = shapes["key"][0], (shapes["key"][2], shapes["value"][3])
    bits = _bits(words[0], size, "key", "tokens of a block"), _bits(words[1], value_dim, "value", "channels")
    groups = shapes["key_scale"][2], shapes["value_scale"][3]
    _check_groups("key", groups[0], size, 1)
    _check_groups("value", groups[1], value_dim, LANES)
    expected = {
        "key": (num_blocks, heads, words[0], key_dim),
        "value": (num_blocks, size, heads, words[1]),
        "key_scale": (num_blocks, heads, groups[0], 2, key_dim),
        "value_scale": (num_blocks, size, heads, groups[1], 2),
    }
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ShapeError(
                f"sealed {name} has shape {planes[name].shape}; with the plain caches and the other planes it must end "
                f"in {shape}, [{AXES[name]}]"
            )
    attributes = {"key_bits": np.int64(bits[0]), "value_bits": np.int64(bits[1])}
    return {f"sealed_{name}": plane for name, plane in planes.items()}, attributes


def sealed_operands(
    sealed: Any, cache: CachePair, num_sequences: int, num_rows: int
) -> tuple[dict[str, jax.Array], dict[str, np.int64]]:
    """Return all operands of sealed blocks that attention reads, and the attributes; none if `sealed` is None."""
    if sealed is None:
        return {}, {}
    planes, attributes = sealed_planes(sealed, cache)
    if sealed.block_table is None or sealed.lens is None:
        raise UnsupportedOption("sealed has no block_table or no lens; attention needs both")
    table = indices(sealed.block_table, "sealed block_table", 2, "[num_sequences, max_blocks]")
    check_length(table, "sealed block_table", 0, num_rows, "the rows of block_table")
    lens = indices(sealed.lens, "sealed lens", 1, "[num_sequences]")
    check_length(lens, "sealed lens", 0, num_sequences, "one for each of seq_lens")
    return planes | {"sealed_block_table": table, "sealed_lens": lens}, attributes


def _check_newest(cache: CachePair) -> None:
    """Raise an error unless the plain caches have tokens that can be sealed."""
    for label, side in (("key", cache.key), ("value", cache.value)):
        if side.format is not None:
            raise UnsupportedDtype(
                f"{label}_cache is {side.codes.dtype}; next to sealed blocks it holds float32, float16 or bfloat16"
            )
        if side.dim % LANES:
            raise ShapeError(f"{label}_cache has a head_dim of {side.dim}; sealed blocks need a multiple of {LANES}")


def _plane(array: Any, name: str, cache: CachePair) -> jax.Array:
    if not isinstance(array, jax.Array):
        raise UnsupportedDtype(
            f"sealed {name} is a {type(array).__name__}, which JAX would copy; pass a jax.Array, or as_jax(tensor)"
        )
    if name.endswith("scale") and array.dtype not in FLOATS:
        raise UnsupportedDtype(f"sealed {name} is {array.dtype}; scales are float32, float16 or bfloat16")
    if not name.endswith("scale") and array.dtype != np.int32:
        raise UnsupportedDtype(f"sealed {name} is {array.dtype}; the codes of sealed blocks are words of int32")
    axes = AXES[name] if cache.layer is None else f"num_layers, {AXES[name]}"
    check_rank(array, f"sealed {name}", len(axes.split(",")), f"[{axes}]")
    if cache.layer is not None:
        check_length(array, f"sealed {name}", 0, cache.key.shape[0], "the layers of key_cache")
    return array


def _bits(words: int, count: int, side: str, counted: str) -> int:
    for bits in BITS:
        if words > 0 and words * 32 == count * bits:
            return bits
    raise ShapeError(
        f"sealed {side} has {words} words for {count} {counted}; codes of 2 bits need {count / 16:g}, of 4 bits "
        f"{count / 8:g}"
    )


def _check_groups(side: str, groups: int, count: int, unit: int) -> None:
    if groups == 0 or count % groups or count // groups % unit:
        multiple = f" of a multiple of {unit}" if unit > 1 else ""
        raise ShapeError(
            f"sealed {side}_scale has {groups} groups; they must divide {count} into equal groups{multiple}"
        )
