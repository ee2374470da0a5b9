"""seal_kv and unseal_kv for JAX: whole blocks of new tokens become sealed blocks, and numbers again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pagecore.errors import UnsupportedOption, shown
from pagecore.interop.jax.arguments import check_length, indices
from pagecore.interop.jax.caches import CachePair, Layout
from pagecore.interop.jax.operators import addresses_of, call_native
from pagecore.interop.jax.sealed import PLANES, sealed_planes
from pagecore.ops import SealedBlocks


def seal_kv(
    key_cache: jax.Array,
    value_cache: jax.Array,
    sealed: SealedBlocks,
    pairs: Any,
    *,
    layer: Any = None,
    layout: Layout = "NHD",
    copy: bool | None = False,
) -> SealedBlocks:
    """Quantise whole blocks of keys and values: `pagecore.seal_kv` for JAX. Use the returned planes afterwards.

    Parameters
    ----------
    key_cache, value_cache : jax.Array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Plain caches of the newest tokens. With `layer`, stacks of such arrays along a new first axis.
    sealed : SealedBlocks
        Planes of JAX as in `paged_attention`; donate them as caches of `pagecore.interop.jax.jit`.
    pairs : integers, [n, 2]
        (block of the plain caches, sealed block), not the null block. No sealed block may occur twice.
    layer, layout, copy
        As in `write_kv`.

    Returns
    -------
    SealedBlocks
        The planes with the new blocks; block table and lengths are those of `sealed`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        While the function is traced: an invalid or unsupported shape, dtype or option, a gradient, or `vmap`.
    jax.errors.JaxRuntimeError
        While the function runs: an invalid block ("InvalidBlock: ..."), or a copy that `copy` forbids; see `write_kv`.
    """
    _check_copy(copy, "planes")
    cache = CachePair((key_cache, value_cache), (None, None), (1.0, 1.0), layer, layout)
    planes, attributes = sealed_planes(sealed, cache)
    columns = "block of the plain caches, sealed block"
    written = {f"sealed {name}": f"sealed_{name}" for name in PLANES}
    made = _call("seal_kv", cache, planes, attributes, pairs, columns, written, copy)
    return sealed._replace(**dict(zip(PLANES, made, strict=True)))


def unseal_kv(
    sealed: SealedBlocks,
    key_cache: jax.Array,
    value_cache: jax.Array,
    pairs: Any,
    *,
    layer: Any = None,
    layout: Layout = "NHD",
    copy: bool | None = False,
) -> tuple[jax.Array, jax.Array]:
    """Write the numbers of sealed blocks to blocks of plain caches: `pagecore.unseal_kv` for JAX.

    Use the returned caches afterwards.

    Parameters
    ----------
    sealed : SealedBlocks
        Planes of JAX as in `paged_attention`.
    key_cache, value_cache : jax.Array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Plain caches; donate them. With `layer`, stacks of such arrays along a new first axis.
    pairs : integers, [n, 2]
        (sealed block, block of the plain caches), not the null block. No plain block may occur twice.
    layer, layout, copy
        As in `write_kv`.

    Returns
    -------
    key_cache, value_cache : jax.Array
        The caches with the numbers of the sealed blocks.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        While the function is traced: an invalid or unsupported shape, dtype or option, a gradient, or `vmap`.
    jax.errors.JaxRuntimeError
        While the function runs: an invalid block ("InvalidBlock: ..."), or a copy that `copy` forbids; see `write_kv`.
    """
    _check_copy(copy, "caches")
    cache = CachePair((key_cache, value_cache), (None, None), (1.0, 1.0), layer, layout)
    planes, attributes = sealed_planes(sealed, cache)
    columns = "sealed block, block of the plain caches"
    written = {"key_cache": 0, "value_cache": 1}
    made = _call("unseal_kv", cache, planes, attributes, pairs, columns, written, copy)
    return made[0], made[1]


def _check_copy(copy: object, written: str) -> None:
    if copy is not None and copy is not False:
        raise UnsupportedOption(f"copy is {shown(copy)}; it must be False, or None to allow XLA to copy the {written}")


def _call(
    target: str,
    cache: CachePair,
    planes: dict[str, jax.Array],
    attributes: dict[str, np.int64],
    pairs: Any,
    columns: str,
    written: Mapping[str, str | int],
    copy: bool | None,
) -> list[jax.Array]:
    """Make the call, and return the arrays that it has written.

    `columns` names those of `pairs`. `written` has the position or the name of each operand that is written, by its
    name in errors.
    """
    given = indices(pairs, "pairs", 2, "[n, 2]")
    check_length(given, "pairs", 1, 2, f"({columns})")
    caches = (cache.key.codes, cache.value.codes)
    arrays = {name: caches[place] if isinstance(place, int) else planes[place] for name, place in written.items()}
    optional: dict[str, Any] = {"layer": cache.layer, **planes}
    if copy is False and not jax.config.jax_disable_jit:
        optional["addresses"] = addresses_of(arrays, target)
    attributes = attributes | {"heads_first": np.int64(cache.heads_first)}
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays.values()]
    return call_native(target, (*caches, given), results, optional, attributes, tuple(written.values()))
