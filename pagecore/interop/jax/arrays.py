"""Views of pagecore tensors in JAX, and batches as arguments of a jitted step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor, as_tensor, like
from pagecore.cache import Batch
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.jax.caches import Layout, check_layout
from pagecore.storage.checks import require_int


def as_jax(tensor: Tensor, *, layout: Layout = "NHD") -> jax.Array:
    """Return a JAX array over the memory of a `pagecore.Tensor`, such as `cache.key(0)`, to read inside `jax.jit`.

    Never copies. JAX treats arrays as immutable: before pagecore writes to the memory again, wait for the computations
    that read the array, with `jax.block_until_ready`. JAX does not write to the memory: an update in JAX makes a copy,
    and `pagecore.interop.jax.jit` raises for it.

    Parameters
    ----------
    tensor : pagecore.Tensor
        In host memory, 64-byte aligned, contiguous and writable. The planes of a layerwise pool are contiguous.
    layout : {"NHD", "HND"}
        "HND" views a plane as [num_blocks, num_kv_heads, block_size, head_dim], the default order of a pool in memory
        (``KVLayout(heads="HND")``). "NHD" views the tensor with its own axes.

    Returns
    -------
    jax.Array
        Aliases `tensor`.

    Raises
    ------
    UnsupportedOption
        JAX would have to copy, because the strides are not those of the layout or the memory is not aligned; or the
        tensor is read-only, and JAX has no read-only views.
    UnsupportedDtype
        64-bit integers without x64, or `tensor` is not a `pagecore.Tensor`.
    ShapeError
        `layout` is "HND" and the tensor does not have 4 axes.
    DeviceError
        The tensor is not in host memory.
    """
    if type(tensor) is not Tensor:
        raise UnsupportedDtype(
            f"tensor is a {type(tensor).__name__}; it must be a pagecore.Tensor, as pagecore.as_tensor returns it"
        )
    check_layout(layout)
    if layout == "HND":
        if tensor.ndim != 4:
            raise ShapeError(
                f"the tensor has shape {tensor.shape}; layout='HND' needs the 4 axes of a cache's plane, so pass "
                "layout='NHD'"
            )
        tensor = as_tensor(tensor.numpy().swapaxes(1, 2))
    if not _is_row_major(tensor):
        raise UnsupportedOption(
            f"the tensor has shape {tensor.shape} and strides {tensor.strides} bytes in layout {layout!r}, so jax.jit "
            "would copy it in every call; pass the layout of the pool (by default 'HND') and use a layerwise pool"
        )
    array: jax.Array = like(tensor, jnp.empty(0))
    return array


def _is_row_major(tensor: Tensor) -> bool:
    """Return True if the elements are contiguous in row-major order."""
    expected = tensor.itemsize
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length > 1 and stride != expected:
            return tensor.size == 0
        expected *= length
    return True


class StepArrays(NamedTuple):
    """Arrays of a batch for a jitted step; a pytree. All are int32 except slots, which have the cache's index dtype.

    Attributes
    ----------
    positions, slot_mapping : array, [max_tokens]
    seq_lens : array, [max_sequences]
    cu_query_lens : array, [max_sequences + 1]
    block_table : array, [max_sequences, max_blocks]
        One row for each sequence of the batch, in the order of the batch.
    sealed_block_table : array, [max_sequences, max_blocks], or None
        The same of the sealed blocks of a layer that has some; `slot_mapping` and `block_table` are then those of its
        newest tokens.
    sealed_lens : array, [max_sequences], or None
        Tokens of each sequence in sealed blocks.
    """

    positions: Any
    slot_mapping: Any
    seq_lens: Any
    cu_query_lens: Any
    block_table: Any
    sealed_block_table: Any = None
    sealed_lens: Any = None


def step_arrays(batch: Batch, layer: int = 0, *, max_blocks: int | None = None) -> StepArrays:
    """Copy the arrays of a prepared batch, as arguments of a jitted step.

    They are copies because a step may still run while the next batch is prepared. Their shapes only depend on the sizes
    of the batch, so a step is compiled once: entries past the batch's sequences and tokens are padding, which
    `write_kv` and `paged_attention` skip.

    Parameters
    ----------
    batch : Batch
        Of a cache on the host or without bytes. If JAX owns the caches, use
        ``PagedKVCache(device="none", index_dtype="int32")``.
    layer : int
        Any layer of the group whose slots and blocks are copied.
    max_blocks : int, optional
        Width of the block table; the capacity of a row by default.

    Returns
    -------
    StepArrays

    Raises
    ------
    ShapeError
        A sequence holds more than `max_blocks` blocks, or `max_blocks` is less than 1 or above the capacity of a row.
    UnsupportedOption
        The slots are int64 and JAX has no 64-bit integers (x64 is off).
    DeviceError
        The cache of the batch is on CUDA.
    """
    group = batch.group(layer)
    slots = group.slot_mapping.numpy()
    if slots.dtype == np.int64 and not jax.config.jax_enable_x64:
        raise UnsupportedOption(
            "slot mappings are int64, which JAX would truncate; make the cache with index_dtype='int32', or set "
            "jax_enable_x64"
        )
    tables = [group.block_table] if group.sealed is None else [group.block_table, group.sealed.block_table]
    picked = [_picked(table.numpy(), batch.rows.numpy(), max_blocks) for table in tables]
    lens, cu_query_lens = batch.seq_lens.numpy().copy(), batch.cu_query_lens.numpy().copy()
    made = StepArrays(batch.positions.numpy().copy(), slots.copy(), lens, cu_query_lens, picked[0])
    if group.sealed is None:
        return made
    return made._replace(sealed_block_table=picked[1], sealed_lens=group.sealed.lens.numpy().copy())


def _picked(table: NDArray[np.int32], batch_rows: NDArray[np.int32], max_blocks: int | None) -> NDArray[np.int32]:
    """Return the rows of a block table that a batch lists, `max_blocks` wide."""
    width = table.shape[1] if max_blocks is None else require_int("max_blocks", max_blocks, max=None)
    if width > table.shape[1]:
        raise ShapeError(f"max_blocks is {width}; it must be at most {table.shape[1]}, the capacity of a row")
    rows = table[batch_rows]
    if rows[:, width:].any():
        needed = np.flatnonzero(rows.any(axis=0))[-1] + 1
        raise ShapeError(f"max_blocks is {max_blocks}, but a sequence holds {needed} blocks; pass at least {needed}")
    return np.ascontiguousarray(rows[:, :width])
