"""Arrays of pagecore as arrays of JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagecore.arrays import Tensor, as_tensor, like
from pagecore.cache import Batch
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.jax.arguments import Layout, check_layout
from pagecore.storage.checks import require_int


def as_jax(tensor: Tensor, *, layout: Layout = "NHD") -> jax.Array:
    """An array of JAX over the memory of a `pagecore.Tensor`: `cache.key(0)`, say, to read it inside of `jax.jit`.

    Zero-copy or refused. JAX takes arrays for values that never change: wait for what reads this one, with
    `jax.block_until_ready`, before pagecore writes to the memory again. JAX never writes to it: a write in JAX makes a
    copy, which `pagecore.interop.jax.jit` refuses.

    Parameters
    ----------
    tensor : Tensor
        On the host, 64-byte aligned, contiguous, writable. A cache's planes are contiguous in a layerwise pool.
    layout : {"NHD", "HND"}
        "HND" shows a plane as [num_blocks, num_kv_heads, block_size, head_dim], as a pool lies by default
        (``KVLayout(heads="HND")``); "NHD" shows it as it is.

    Raises
    ------
    UnsupportedOption
        JAX would have to copy: strides that are not the layout's, or misaligned memory; or the tensor is read-only,
        which JAX cannot say of an array.
    UnsupportedDtype
        64-bit integers without x64, or no `pagecore.Tensor`.
    ShapeError
        "HND" of a tensor without the 4 axes of a plane.
    DeviceError
        Memory that is not the host's.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(f"a {type(tensor).__name__} is no pagecore.Tensor; make one with pagecore.as_tensor")
    check_layout(layout)
    if layout == "HND":
        if tensor.ndim != 4:
            raise ShapeError(f"the tensor has shape {tensor.shape}; layout='HND' is for the 4 axes of a cache's plane")
        tensor = as_tensor(tensor.numpy().swapaxes(1, 2))
    if not _is_row_major(tensor):
        raise UnsupportedOption(
            f"the tensor has shape {tensor.shape} and strides {tensor.strides} bytes in layout {layout!r}, which "
            "jax.jit would copy in every call; pass the layout of the pool (by default 'HND'), and let it be layerwise"
        )
    array: jax.Array = like(tensor, jnp.empty(0))
    return array


def _is_row_major(tensor: Tensor) -> bool:
    """Whether elements lie without gaps, the last axis innermost."""
    expected = tensor.itemsize
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length > 1 and stride != expected:
            return tensor.size == 0
        expected *= length
    return True


class StepArrays(NamedTuple):
    """What a jitted step needs of a batch, each int32 (slots in the cache's index dtype); a pytree.

    Attributes
    ----------
    positions, slot_mapping : array, [max_tokens]
    seq_lens : array, [max_sequences]
    cu_query_lens : array, [max_sequences + 1]
    block_table : array, [max_sequences, max_blocks]
        The rows of the batch's sequences, in its order.
    """

    positions: Any
    slot_mapping: Any
    seq_lens: Any
    cu_query_lens: Any
    block_table: Any


def step_arrays(batch: Batch, layer: int = 0, *, max_blocks: int | None = None) -> StepArrays:
    """A prepared batch as arguments of a jitted step: copies, since a step may still run when the next is prepared.

    Their shapes are those of the batch, whatever it holds, so that a step is compiled once: what is past its sequences
    and tokens is padding, which `write_kv` and `paged_attention` skip.

    Parameters
    ----------
    batch : Batch
        Of a cache on the host, or without bytes: ``PagedKVCache(device="none", index_dtype="int32")`` is the one for
        caches that JAX owns.
    layer : int
        A layer of the group whose slots and blocks are wanted.
    max_blocks : int, optional
        Width of the block table; all that a row has by default.

    Raises
    ------
    ShapeError
        A sequence holds more blocks than `max_blocks`, or that is not from 1 to what a row holds.
    UnsupportedOption
        Slots of int64 while JAX has no such integers.
    DeviceError
        A batch of a cache on CUDA.
    """
    group = batch.group(layer)
    slots = group.slot_mapping.numpy()
    if slots.dtype == np.int64 and not jax.config.jax_enable_x64:
        raise UnsupportedOption(
            "slot mappings are int64, which JAX would cut; make the cache with index_dtype='int32', or set "
            "jax_enable_x64"
        )
    table, lens = group.block_table.numpy(), batch.seq_lens.numpy().copy()
    width = table.shape[1] if max_blocks is None else require_int("max_blocks", max_blocks, max=None)
    if width > table.shape[1]:
        raise ShapeError(f"max_blocks is {width}; it must be at most {table.shape[1]}, the blocks that a row holds")
    rows = table[batch.rows.numpy()]
    if rows[:, width:].any():
        needed = np.flatnonzero(rows.any(axis=0))[-1] + 1
        raise ShapeError(f"max_blocks is {max_blocks}, and a sequence holds {needed} blocks; pass at least that")
    picked = np.ascontiguousarray(rows[:, :width])
    return StepArrays(batch.positions.numpy().copy(), slots.copy(), lens, batch.cu_query_lens.numpy().copy(), picked)
