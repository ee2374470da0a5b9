"""seal_kv for JAX: whole blocks of new tokens become sealed blocks."""

from __future__ import annotations

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
    if copy is not None and copy is not False:
        raise UnsupportedOption(f"copy is {shown(copy)}; it must be False, or None to allow XLA to copy the planes")
    cache = CachePair((key_cache, value_cache), (None, None), (1.0, 1.0), layer, layout)
    planes, attributes = sealed_planes(sealed, cache)
    given = indices(pairs, "pairs", 2, "[n, 2]")
    check_length(given, "pairs", 1, 2, "(block of the plain caches, sealed block)")
    optional: dict[str, Any] = {"layer": cache.layer, **planes}
    if copy is False and not jax.config.jax_disable_jit:
        optional["addresses"] = addresses_of(
            {name.replace("_", " ", 1): one for name, one in planes.items()}, "seal_kv"
        )
    attributes |= {"heads_first": np.int64(cache.heads_first)}
    results = [jax.ShapeDtypeStruct(plane.shape, plane.dtype) for plane in planes.values()]
    arrays = (key_cache, value_cache, given)
    made = call_native("seal_kv", arrays, results, optional, attributes, tuple(planes))
    return sealed._replace(**dict(zip(PLANES, made, strict=True)))
