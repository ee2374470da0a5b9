"""debug: index arrays on a device are looked at by a kernel first, and told of as the host tells of its own.

The kernel says whether any entry makes no sense, with less regard to what a call needs of it than the host has. Where
one does, the arrays are brought to the host, whose checks decide and raise.
"""

from libc.stdint cimport INT64_MIN, int64_t, uint64_t, uintptr_t

from pagecore.arrays._tensor cimport Tensor, new_tensor, tensor_of
from pagecore.arrays.array_view cimport ArrayView, Extent, checked_extent
from pagecore.ops._checks cimport CPU, Place, brought_to, check_length, new_at
from pagecore.ops.cpu._cpu cimport (
    check_attended,
    check_copied,
    check_independent,
    check_sequences,
    check_slots,
    check_transferred,
    fill_indices,
    fill_pairs,
    fill_table,
    total_tokens,
)
from pagecore.ops.cpu.args cimport Indices, Table

import os

from pagecore.arrays import cuda
from pagecore.arrays.refusals import brief
from pagecore.errors import UnsupportedOption
from pagecore.ops.cuda import kernels

cdef extern from "pagecore/ops/cuda/launch.hpp" namespace "pagecore::cuda" nogil:
    const int64_t kThreads
    int64_t ceil_div(int64_t n, int64_t by)

    cdef struct PcIndices:
        int size

    cdef struct PcTable:
        pass

    PcIndices device_indices(const Indices& indices)
    PcTable device_table(const Table& table)

cdef extern from "cuda_src/abi_moves.h" nogil:
    cdef enum:
        PC_MOVE_SHARED_BYTES

cdef extern from "cuda_src/abi_checks.h" nogil:
    cdef struct PcIdParams:
        PcIndices ids
        int64_t lowest
        int64_t limit
        uintptr_t offender

    cdef struct PcBatchParams:
        PcTable table
        PcIndices rows
        PcIndices seq_lens
        PcIndices cu_query_lens
        int64_t num_tokens
        int64_t num_queries
        int64_t num_blocks
        int64_t block_size
        uintptr_t offender

cdef enum:
    UINT8 = 6  # in the dtype table
    INT64 = 8
    ANY = -1

cdef uint64_t NOBODY = <uint64_t>-1  # what 0xFF in every byte makes
cdef int state = -1  # -1: not asked for yet


cdef bint debugging() except -1:
    global state
    if state < 0:
        state = wanted()
    return state


cdef bint wanted() except -1:
    cdef str value = os.environ.get("PAGECORE_DEBUG", "")
    if value not in ("", "0", "1"):
        raise UnsupportedOption(f"PAGECORE_DEBUG is {value!r}; it must be 1, or 0 or unset for no checks")
    return value == "1"


def debug(on=None):
    """Choose whether index arrays on a CUDA device are checked before an op uses them, and return it.

    Without it nobody looks at slots, block ids, lengths, rows and pairs that lie on a device: what makes no sense is
    left out or read as a hole, and results are wrong without a word. With it each call launches a check first and
    waits for it, and raises what the host would raise. What the host can see is always checked.

    Parameters
    ----------
    on : bool or None
        None is what the environment variable PAGECORE_DEBUG says: 1, or 0 or nothing for no checks.

    Returns
    -------
    bool

    Raises
    ------
    UnsupportedOption
        What is neither True, False nor None, or PAGECORE_DEBUG where it counts; nothing has changed.

    Notes
    -----
    A call that is captured in a graph cannot wait, and is refused while debug is on.
    """
    global state
    if on is not None and not isinstance(on, bool):
        raise UnsupportedOption(f"debug is {brief(on)}; it must be True, False or None for what PAGECORE_DEBUG says")
    state = wanted() if on is None else on
    return bool(state)


cdef Tensor new_verdict(const Place* place):
    """A number on the device, NOBODY as yet, where kernels leave that of the first offender."""
    cdef int64_t one = 1
    runtime = cuda.runtime()
    if runtime.is_capturing(place.stream):
        raise UnsupportedOption(
            "debug is on, and a call that is captured in a graph cannot wait for its check: capture after "
            "pagecore.debug(False)"
        )
    cdef Tensor verdict = new_at(1, &one, INT64, place)
    runtime.fill(<uintptr_t>verdict.data, 0xFF, sizeof(uint64_t), place.stream)
    return verdict


cdef bint is_guilty(Tensor verdict, const Place* place) except -1:
    """Waits for the kernels."""
    return (<uint64_t*>brought_back(verdict, place).data)[0] != NOBODY


cdef Tensor brought_back(Tensor tensor, const Place* place):
    """A copy on the host, with the strides that it has on the device."""
    if tensor is None or tensor.device_type == CPU:
        return tensor
    cdef ArrayView view = tensor.view()
    cdef Extent extent = checked_extent(view)
    cdef int64_t num_bytes = extent.high - extent.low
    cdef Tensor held = new_tensor(1, &num_bytes, UINT8, False)
    runtime = cuda.runtime()
    if num_bytes > 0:
        runtime.copy(<uintptr_t>held.data, <uintptr_t>(tensor.data + extent.low), num_bytes, place.stream)
    runtime.synchronize(place.stream, place.device_id)
    view.data = held.data - extent.low
    view.device_type = CPU
    view.device_id = 0
    return tensor_of(view, held)


cdef int check_ids(
        Tensor verdict, const Indices& ids, int64_t lowest, int64_t limit, const Place* place) except -1:
    cdef PcIdParams params
    if ids.size == 0:
        return 0
    params.ids = device_indices(ids)
    params.lowest = lowest
    params.limit = limit
    params.offender = <uintptr_t>verdict.data
    grid = (ceil_div(ids.size, kThreads), 1, 1)
    kernels.launch(
        "check_ids", grid, kThreads, 0, place.stream, <uintptr_t>&params, place.device_id)
    return 0


cdef int check_pairs(
        Tensor verdict, Tensor pairs, int64_t lowest, int64_t num_sources, int64_t num_targets,
        const Place* place) except -1:
    cdef Indices sources, targets
    fill_pairs(&sources, &targets, pairs)
    check_ids(verdict, sources, lowest, num_sources, place)
    return check_ids(verdict, targets, lowest, num_targets, place)


cdef int64_t fewest_blocks(list caches):
    return min([(<Tensor>cache).shape_[0] for cache in caches], default=0)


cdef int check_batch(
        Tensor verdict, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_tokens,
        int64_t num_queries, int64_t num_blocks, int64_t block_size, const Place* place) except -1:
    cdef PcBatchParams params
    cdef Table table
    cdef Indices lens, picked, cu
    fill_table(&table, block_table)
    fill_indices(&lens, seq_lens)
    fill_indices(&picked, rows)
    fill_indices(&cu, cu_query_lens)
    params.table = device_table(table)
    params.seq_lens = device_indices(lens)
    params.rows = device_indices(picked)
    params.cu_query_lens = device_indices(cu)
    params.num_tokens = num_tokens
    params.num_queries = num_queries
    params.num_blocks = num_blocks
    params.block_size = block_size
    params.offender = <uintptr_t>verdict.data
    grid = (params.seq_lens.size + 1, 1, 1)
    kernels.launch(
        "check_batch", grid, kThreads, PC_MOVE_SHARED_BYTES, place.stream, <uintptr_t>&params,
        place.device_id)
    return 0


cdef int debug_slots(Tensor slot_mapping, Tensor key, Tensor key_cache, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    cdef Indices slots
    fill_indices(&slots, slot_mapping)
    check_ids(verdict, slots, INT64_MIN, key_cache.shape_[0] * key_cache.shape_[1], place)
    if is_guilty(verdict, place):
        check_slots(brought_back(slot_mapping, place), key, key_cache)
    return 0


cdef int debug_copied(list caches, Tensor pairs, bint independent, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    if independent:
        check_independent(brought_back(pairs, place), True)
    check_pairs(verdict, pairs, 0, fewest_blocks(caches), fewest_blocks(caches), place)
    if is_guilty(verdict, place):
        check_copied(caches, brought_back(pairs, place))
    return 0


cdef int debug_transferred(
        list sources, list targets, Tensor pairs, bint independent, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    if independent:
        check_independent(brought_back(pairs, place), False)
    check_pairs(verdict, pairs, 1, fewest_blocks(sources), fewest_blocks(targets), place)
    if is_guilty(verdict, place):
        check_transferred(sources, targets, brought_back(pairs, place))
    return 0


cdef int debug_sequences(
        list caches, Tensor packed, str name, Tensor block_table, Tensor seq_lens, Tensor rows,
        const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    cdef int64_t block_size = (<Tensor>caches[0]).shape_[1], num_tokens = packed.shape_[0]
    check_batch(verdict, block_table, seq_lens, rows, None, num_tokens, 0, fewest_blocks(caches), block_size, place)
    if is_guilty(verdict, place):
        lens = brought_back(seq_lens, place)
        num_tokens = total_tokens(lens, block_table.shape_[1], block_size)
        check_length(packed, name, 0, num_tokens, "the sum of seq_lens")
        check_sequences(caches, num_tokens, brought_back(block_table, place), lens, brought_back(rows, place))
    return 0


cdef int debug_attention(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, Tensor mask,
        const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    # These two stay on the host where they are given there, for the plan.
    cdef Tensor lens = brought_to(seq_lens, "seq_lens", place)
    cdef Tensor cu = None if cu_query_lens is None else brought_to(cu_query_lens, "cu_query_lens", place)
    check_batch(
        verdict, block_table, lens, rows, cu, ANY, query.shape_[0], key_cache.shape_[0], key_cache.shape_[1], place)
    # The length of a mask follows from all lengths together.
    if is_guilty(verdict, place) or mask is not None:
        check_attended(
            query, key_cache, value_cache, brought_back(block_table, place), brought_back(seq_lens, place),
            brought_back(rows, place), brought_back(cu_query_lens, place), causal, window_left, window_right,
            brought_back(mask, place))
    return 0
