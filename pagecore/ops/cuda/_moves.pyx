"""The kernels that move data, bound: Tensors to parameter structs, launched on the call's stream."""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor, size_of
from pagecore.native.translate cimport raise_python_error
from pagecore.ops._checks cimport Place, note_written
from pagecore.ops.cpu._cpu cimport fill_cache, fill_indices, fill_rows
from pagecore.ops.cpu.args cimport Float, WriteArgs

from pagecore.arrays import cuda, streams
from pagecore.ops.cuda import kernels

cdef extern from "cuda_src/abi_moves.h" nogil:
    cdef struct PcTableParams:
        uintptr_t entries
        uintptr_t count
        uintptr_t table
        int64_t size
        int32_t capacity
        int32_t pad

    cdef struct PcWriteParams:
        pass

cdef extern from "pagecore/ops/cuda/launch.hpp" namespace "pagecore::cuda" nogil:
    const int64_t kThreads
    int64_t ceil_div(int64_t n, int64_t by)

    cdef cppclass Grid:
        int64_t x
        int64_t y
        int64_t z

cdef extern from "pagecore/ops/cuda/write_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass Divisors:
        const char* data
        float for_all

    cdef cppclass WriteLaunch:
        PcWriteParams params
        Float type_from "from"
        Float type_to "to"
        Grid grid

    vector[WriteLaunch] write_launches(
        const WriteArgs& args, const Divisors& of_keys, const Divisors& of_values,
        int64_t num_multiprocessors) except +raise_python_error

cdef enum:
    TABLE_BLOCKS = 64  # of a grid that must do for every count

# By the numbers of Float.
cdef tuple TYPES = ("float", "pc_half", "pc_bfloat16")
cdef tuple WRITES = tuple(tuple(f"write_kv<{a},{b}>" for b in TYPES) for a in TYPES)


cdef int launch(str name, const Grid& grid, const void* params, const Place* place) except -1:
    kernels.launch(
        name, (grid.x, grid.y, grid.z), kThreads, 0, place.stream, <uintptr_t>params, place.device_id)
    return 0


cdef int64_t multiprocessors(const Place* place) except -1:
    return cuda.runtime().properties(place.device_id).num_multiprocessors


cdef void fill_divisors(Divisors* divisors, Tensor for_each, float for_all) noexcept:
    divisors.data = NULL
    if for_each is not None:
        divisors.data = for_each.data
    divisors.for_all = for_all


cdef int write_kv(
        Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key_divisors,
        float key_divisor, Tensor value_divisors, float value_divisor, const Place* place) except -1:
    """Slot-mapped write of checked Tensors; see _moves.pxd."""
    cdef WriteArgs args
    cdef Divisors of_keys, of_values
    cdef size_t i
    fill_rows(&args.key, key)
    fill_rows(&args.value, value)
    fill_cache(&args.key_cache, key_cache)
    fill_cache(&args.value_cache, value_cache)
    fill_indices(&args.slots, slot_mapping)
    fill_divisors(&of_keys, key_divisors, key_divisor)
    fill_divisors(&of_values, value_divisors, value_divisor)
    cdef vector[WriteLaunch] launches = write_launches(args, of_keys, of_values, multiprocessors(place))
    for i in range(launches.size()):
        name = WRITES[<int>launches[i].type_from][<int>launches[i].type_to]
        launch(name, launches[i].grid, &launches[i].params, place)
    note_written(key_cache, place)
    note_written(value_cache, place)
    return 0


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
    grid = (min(ceil_div(capacity, kThreads), TABLE_BLOCKS), 1, 1)
    kernels.launch("scatter_entries", grid, kThreads, 0, stream, <uintptr_t>&params, table.device_id)
    streams.note_work(table, stream)
    return 0
