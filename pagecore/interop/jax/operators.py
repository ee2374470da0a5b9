"""paged_attention and write_kv for JAX, as custom calls that run pagecore's host kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pagecore.errors import ShapeError, UnsupportedOption, shown
from pagecore.interop.jax import _xla
from pagecore.interop.jax.arguments import (
    INT32,
    check_length,
    flat_mask,
    floats,
    head_numbers,
    indices,
    number,
    switch,
    tree_words,
)
from pagecore.interop.jax.caches import CachePair, Layout
from pagecore.interop.jax.sealed import sealed_operands
from pagecore.ops import SealedBlocks
from pagecore.ops.arguments._arguments import SMALLEST_SOFTCAP

# Optional operands in the order of `Optional` in handlers.hpp; an attribute of the call lists those that are present.
OPTIONAL = (
    "layer",
    "rows",
    "cu_query_lens",
    "sinks",
    "alibi_slopes",
    "mask",
    "tree_mask",
    "positions",
    "key_scale",
    "value_scale",
    "key_plane",
    "value_plane",
    "sealed_key",
    "sealed_value",
    "sealed_key_scale",
    "sealed_value_scale",
    "sealed_block_table",
    "sealed_lens",
    "addresses",
)
WRITTEN = (2, 3)  # positions of the caches among the arrays of write_kv


def paged_attention(
    query: Any,
    key_cache: jax.Array,
    value_cache: jax.Array,
    block_table: Any,
    seq_lens: Any,
    *,
    rows: Any = None,
    cu_query_lens: Any = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    chunk: int | None = None,
    sink_tokens: int | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    mask: Any = None,
    tree_mask: Any = None,
    positions: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    key_global_scale: float = 1.0,
    value_global_scale: float = 1.0,
    sealed: SealedBlocks | None = None,
    return_lse: bool = False,
    layer: Any = None,
    layout: Layout = "NHD",
) -> Any:
    """Attend to paged keys and values: `pagecore.paged_attention` for JAX arrays on the host, inside `jax.jit` or not.

    The caches are read in place. Each call plans its batch itself; the result is bit-identical to that of
    `pagecore.paged_attention` without a plan.

    Parameters
    ----------
    query : array, [T, Hq, D]
        float32, float16 or bfloat16.
    key_cache, value_cache : jax.Array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Each in its own dtype of these three, or the codes of a format; the last axis of uint8 codes has half the
        length. With `layer`, stacks of such arrays along a new first axis.
    block_table, seq_lens, rows, cu_query_lens, sinks, alibi_slopes, mask, positions, return_lse
        As in `pagecore.paged_attention`; indices are int32, or int64 under x64.
    tree_mask : uint32 or int32, [T, 2 * words], or uint64 or int64, [T] or [T, words], optional
        As in `pagecore.paged_attention`. A jax.Array has 64-bit words under x64 only; halves of words are in the order
        low, high. NumPy arrays of 64-bit words are always accepted.
    scale, softcap, causal, window, chunk, sink_tokens
        As in `pagecore.paged_attention`; must be known when the function is traced.
    key_scale, value_scale : float, [Hkv], or jax.Array, [num_blocks, block_size, Hkv, groups], optional
        Stored numbers are multiplied by their scale, given for the layer or for each head; or the plane of the stored
        scales of a format, with the axes of the caches. May be traced.
    key_global_scale, value_global_scale : float
        Given factor of an "nvfp4" cache; must be known when the function is traced.
    sealed : SealedBlocks, optional
        As in `pagecore.paged_attention`, of arrays of JAX; with `layer`, the four planes are stacked like the caches. A
        SealedBlocks is a pytree.
    layer : int or integer array, [], optional
        Index of the layer in stacked caches. May be traced, as in a scan over layers. The caches are not sliced or
        copied.
    layout : {"NHD", "HND"}
        Order of the axes of a block. With "HND", preferred on the host, caches are
        [num_blocks, Hkv, block_size, D].

    Returns
    -------
    jax.Array or (jax.Array, jax.Array)
        [T, Hq, Dv] in the dtype of `query`; with `return_lse` also float32 [T, Hq].

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        While the function is traced: an invalid or unsupported shape, dtype or option, a gradient, or `vmap`.
    jax.errors.JaxRuntimeError
        While the function runs: invalid numbers in the arrays, with the name of pagecore's error, such as
        "InvalidBlock: ...".
    """
    cache = CachePair(
        (key_cache, value_cache), (key_scale, value_scale), (key_global_scale, value_global_scale), layer, layout
    )
    query = floats(query, "query", "[num_tokens, num_query_heads, head_dim]", 1)
    num_tokens, num_heads, dim = query.shape
    if dim != cache.key.dim:
        raise ShapeError(f"query has shape {query.shape}; axis 2 must have length {cache.key.dim}, as key_cache has")
    if num_heads % cache.num_heads != 0:
        raise ShapeError(
            f"query has {num_heads} heads and key_cache {cache.num_heads}; the number of query heads must be a "
            "multiple of the number of key heads"
        )
    lens = indices(seq_lens, "seq_lens", 1, "[num_sequences]")
    table = indices(block_table, "block_table", 2, "[num_sequences, max_blocks]")
    optional = cache.operands(divides=False) | _query_indices(query, table, lens, rows, cu_query_lens)
    optional |= _per_head(num_heads, sinks=sinks, alibi_slopes=alibi_slopes)
    if mask is not None:
        optional["mask"] = flat_mask(mask)
    limits = _xla.limits(window, chunk, sink_tokens)
    optional |= _tree(tree_mask, positions, mask, num_tokens)
    if tree_mask is not None and limits[2]:
        raise UnsupportedOption(
            f"sink_tokens is {limits[2]} and tree_mask is given; attend with mask, which lists every key, and leave "
            "sink_tokens out"
        )
    older, bits = sealed_operands(sealed, cache, lens.shape[0], table.shape[0])
    optional |= older
    attributes = cache.attributes() | bits | _attributes(dim**-0.5 if scale is None else scale, softcap, causal, limits)
    results = [jax.ShapeDtypeStruct((num_tokens, num_heads, cache.value.dim), query.dtype)]
    if switch(return_lse, "return_lse"):
        results.append(jax.ShapeDtypeStruct((num_tokens, num_heads), np.float32))
    arrays = (query, key_cache, value_cache, table, lens)
    returned = call_native("paged_attention", arrays, results, optional, attributes)
    return tuple(returned) if return_lse else returned[0]


def _query_indices(query: Any, table: Any, lens: Any, rows: Any, cu_query_lens: Any) -> dict[str, Any]:
    """Return the checked arrays that map queries to sequences; without them sequence i has query i and table row i."""
    optional = {}
    if rows is None:
        check_length(table, "block_table", 0, lens.shape[0], "one row for each of seq_lens, or pass rows= to pick some")
    else:
        optional["rows"] = indices(rows, "rows", 1, "[num_sequences]")
        check_length(optional["rows"], "rows", 0, lens.shape[0], "one for each of seq_lens")
    if cu_query_lens is None:
        check_length(query, "query", 0, lens.shape[0], "one query for each of seq_lens, or pass cu_query_lens=")
    else:
        optional["cu_query_lens"] = indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]")
        check_length(optional["cu_query_lens"], "cu_query_lens", 0, lens.shape[0] + 1, "one more than seq_lens")
    return optional


def _per_head(num_heads: int, **given: Any) -> dict[str, Any]:
    return {name: head_numbers(array, name, num_heads) for name, array in given.items() if array is not None}


def _tree(tree_mask: Any, positions: Any, mask: Any, num_tokens: int) -> dict[str, jax.Array]:
    """Return the operands of a tree; empty without one."""
    if tree_mask is None:
        if positions is not None:
            raise UnsupportedOption(
                "positions are those of the tokens of a tree; pass tree_mask too, or leave them out"
            )
        return {}
    if mask is not None:
        raise UnsupportedOption("mask and tree_mask are both given; use one of them")
    found = {"tree_mask": tree_words(tree_mask, num_tokens)}
    if positions is not None:
        found["positions"] = indices(positions, "positions", 1, "[num_tokens]")
        check_length(found["positions"], "positions", 0, num_tokens, "one for each row of query")
    return found


def _attributes(scale: Any, softcap: Any, causal: Any, limits: tuple[int, int, int]) -> dict[str, Any]:
    """Return the attributes of the call, which must be known when the function is traced."""
    cap = number(softcap, "softcap")
    if cap < 0 or 0 < cap < SMALLEST_SOFTCAP:
        raise UnsupportedOption(f"softcap is {cap}; it must be at least {SMALLEST_SOFTCAP}, or 0 for no cap")
    left, right, sink_tokens = limits
    return {
        "scale": np.float64(number(scale, "scale")),
        "softcap": np.float64(cap),
        "causal": np.int64(switch(causal, "causal")),
        "window_left": np.int64(left),
        "window_right": np.int64(right),
        "sink_tokens": np.int64(sink_tokens),
    }


def write_kv(
    key: Any,
    value: Any,
    key_cache: jax.Array,
    value_cache: jax.Array,
    slot_mapping: Any,
    *,
    key_scale: Any = None,
    value_scale: Any = None,
    key_global_scale: float = 1.0,
    value_global_scale: float = 1.0,
    four_over_six: bool = False,
    layer: Any = None,
    layout: Layout = "NHD",
    copy: bool | None = False,
) -> tuple[jax.Array, ...]:
    """Write new keys and values into paged caches: `pagecore.write_kv` for JAX. Use the returned caches afterwards.

    Inside a jitted function whose caches are donated, XLA reuses the memory of the arguments for the returned caches,
    and nothing is copied. `pagecore.interop.jax.jit` is a `jax.jit` that checks this.

    Parameters
    ----------
    key, value : array, [T, Hkv, D] and [T, Hkv, Dv]
        float32, float16 or bfloat16.
    key_cache, value_cache : jax.Array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        Each in its own dtype of these three, or the codes of a format. With `layer`, stacks of such arrays along a new
        first axis.
    slot_mapping : integers, [T'], T' <= T
        ``block * block_size + offset`` of token t; a negative slot writes nothing.
    key_scale, value_scale : float, [Hkv], or jax.Array, [num_blocks, block_size, Hkv, groups], optional
        Keys and values are divided by their scale before they are stored; or the plane of the scales of a format, which
        the call computes, with the axes of the caches.
    key_global_scale, value_global_scale : float
        Given factor of an "nvfp4" cache.
    four_over_six : bool
        Compute the scales of "nvfp4" caches by the format "nvfp4_4over6" of `pagecore.write_kv`.
    layer, layout
        As in `paged_attention`.
    copy : False or None
        False: raise if XLA copied a cache before the write, which happens outside of `jax.jit`, and if the old contents
        are used after the write. None: allow XLA to copy; the arguments keep their contents.

    Returns
    -------
    key_cache, value_cache : jax.Array
        The caches with the new tokens. The arguments are unchanged or donated.
    key_scale, value_scale : jax.Array
        The planes of stored scales, if such were given, with those of the new tokens.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        While the function is traced: an invalid or unsupported shape, dtype or option, a gradient, or `vmap`.
    jax.errors.JaxRuntimeError
        While the function runs: a slot past the end of the cache ("InvalidBlock: ..."), or a copy that `copy` forbids.
        ValueError instead if JAX reports it when the result of an asynchronous call is awaited.
        Nothing has been written; a cache that was donated to the function is lost, as after any error in JAX.
    """
    if copy is not None and copy is not False:
        raise UnsupportedOption(f"copy is {shown(copy)}; it must be False, or None to allow XLA to copy the caches")
    cache = CachePair(
        (key_cache, value_cache), (key_scale, value_scale), (key_global_scale, value_global_scale), layer, layout
    )
    key = floats(key, "key", "[num_tokens, num_kv_heads, head_dim]", 1)
    value = floats(value, "value", "[num_tokens, num_kv_heads, head_dim]", 1)
    check_length(value, "value", 0, key.shape[0], "the tokens of key")
    check_length(key, "key", 1, cache.num_heads, "the heads of key_cache")
    check_length(value, "value", 1, cache.num_heads, "the heads of value_cache")
    check_length(key, "key", 2, cache.key.dim, "the head_dim of key_cache")
    check_length(value, "value", 2, cache.value.dim, "the head_dim of value_cache")
    slots = indices(slot_mapping, "slot_mapping", 1, "[at most num_tokens]")
    if slots.shape[0] > key.shape[0]:
        raise ShapeError(f"slot_mapping has {slots.shape[0]} slots; it must have at most {key.shape[0]}, one per token")
    num_slots = cache.num_blocks * cache.block_size
    if slots.dtype == np.int32 and num_slots > INT32.max + 1:
        raise UnsupportedOption(
            f"the cache has {num_slots} slots, more than int32 can index; set jax_enable_x64 and pass int64"
        )
    optional = cache.operands(divides=True)
    named = {"key_cache": key_cache, "value_cache": value_cache}
    named |= {f"{name.removesuffix('_plane')}_scale": plane for name, plane in cache.planes.items()}
    if copy is False and not jax.config.jax_disable_jit:
        optional["addresses"] = addresses_of(named, "write_kv")
    attributes = cache.attributes() | {"four_over_six": np.int64(_is_four_over_six(cache, four_over_six))}
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in named.values()]
    arrays = (key, value, key_cache, value_cache, slots)
    return tuple(call_native("write_kv", arrays, results, optional, attributes, (*WRITTEN, *cache.planes)))


def addresses_of(written: dict[str, jax.Array], operation: str) -> jax.Array:
    """Return the addresses of the arrays of a write before XLA can copy them."""
    for name, array in written.items():
        if not isinstance(array, jax.core.Tracer):
            raise UnsupportedOption(
                f"{name} is not an argument of a function under jax.jit, so it would be copied; donate it to a "
                "jitted function, or pass copy=None to allow the copy"
            )
    result = [jax.ShapeDtypeStruct((2 * len(written),), np.uint32)]
    (addresses,) = call_native("addresses", tuple(written.values()), result, operation=operation)
    return addresses


def _is_four_over_six(cache: CachePair, wanted: Any) -> bool:
    if not switch(wanted, "four_over_six"):
        return False
    if not any(side.format is not None and side.format.name == "nvfp4" for side in (cache.key, cache.value)):
        held = cache.key.format.name if cache.key.format else cache.key.codes.dtype
        raise UnsupportedOption(f"four_over_six is True and key_cache is {held}; only nvfp4 has this option")
    return True


def call_native(
    target: str,
    arrays: tuple[jax.Array, ...],
    results: list[Any],
    optional: dict[str, Any] | None = None,
    attributes: dict[str, Any] | None = None,
    written: tuple[str | int, ...] = (),
    *,
    operation: str | None = None,
) -> list[jax.Array]:
    """Make one custom call. Errors name `operation`, by default the target.

    The results reuse the memory of `written`: positions in `arrays` and names of optional operands.
    """
    given = {name: array for name, array in (optional or {}).items() if array is not None}
    names = [name for name in OPTIONAL if name in given]
    operands = [*arrays, *(given[name] for name in names)]
    positions = [each if isinstance(each, int) else len(arrays) + names.index(each) for each in written]
    aliases = {position: result for result, position in enumerate(positions)} or None
    bits = sum(1 << OPTIONAL.index(name) for name in given)
    call = jax.ffi.ffi_call(f"pagecore_{target}", results, input_output_aliases=aliases)
    attributes = {"given": np.int64(bits)} | (attributes or {})
    returned: list[jax.Array] = _untransformed(lambda *each: call(*each, **attributes), operation or target)(*operands)
    return returned


def _untransformed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap the call so that vmap and derivatives raise UnsupportedOption with the name of the operation."""

    def refuse_batching(*_: Any) -> Any:
        raise UnsupportedOption(
            f"{name} does not support jax.vmap; one call serves a whole batch of sequences: put their tokens in one "
            "array with cu_query_lens, or use jax.lax.map"
        )

    def refuse_derivative(*_: Any) -> Any:
        raise UnsupportedOption(
            f"{name} has no gradients; put jax.lax.stop_gradient around its arguments, or use another implementation "
            "of attention"
        )

    batched = jax.custom_batching.custom_vmap(call)
    batched.def_vmap(refuse_batching)
    derived = jax.custom_jvp(batched)
    derived.defjvp(refuse_derivative)
    guarded: Callable[..., Any] = derived
    return guarded
