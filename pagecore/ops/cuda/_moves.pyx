"""The kernels that move data, bound: Tensors to parameter structs, launched on the call's stream."""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from pagecore.arrays._tensor cimport Tensor, size_of

from pagecore.arrays import streams
from pagecore.ops.cuda import kernels

cdef extern from "cuda_src/abi_moves.h" nogil:
    cdef struct PcTableParams:
        uintptr_t entries
        uintptr_t count
        uintptr_t table
        int64_t size
        int32_t capacity
        int32_t pad

cdef enum:
    THREADS = 128
    TABLE_BLOCKS = 64  # of a grid that must do for every count


cpdef int scatter_entries(
        uintptr_t entries, uintptr_t count, int capacity, Tensor table, uintptr_t stream) except -1:
    """Write changed entries into a table on the device; see _moves.pxd."""
    cdef PcTableParams params
    if capacity <= 0:
        return 0
    params.entries = entries
    params.count = count
    params.table = <uintptr_t>table.data
    params.size = size_of(table)
    params.capacity = capacity
    params.pad = 0
    grid = (min((capacity + THREADS - 1) // THREADS, TABLE_BLOCKS), 1, 1)
    kernels.launch("scatter_entries", grid, THREADS, 0, stream, <uintptr_t>&params, table.device_id)
    streams.note_work(table, stream)
    return 0
