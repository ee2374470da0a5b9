"""Kernels that check index arrays in device memory, and the wait for their verdict."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport INT64
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Indices, Table, index_array, pair_column, table_array
from pagecore.ops.arguments._arguments cimport Place, new_at, to_host
from pagecore.ops.cuda.launch cimport PC_MOVE_SHARED_BYTES, kThreads

from pagecore.arrays import cuda
from pagecore.errors import UnsupportedOption
from pagecore.ops.cuda.compilation import kernels

cdef extern from "pagecore/native/rounding.hpp" namespace "pagecore" nogil:
    int64_t ceil_div(int64_t n, int64_t by)

cdef extern from "pagecore/ops/cuda/device_args.hpp" namespace "pagecore::cuda" nogil:
    cdef struct PcIndices:
        int size

    cdef struct PcTable:
        pass

    PcIndices device_indices(const Indices& indices)
    PcTable device_table(const Table& table)

cdef extern from "cuda_src/abi/checks.h" nogil:
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

cdef uint64_t NO_OFFENDER = <uint64_t>-1  # 0xFF in every byte


cdef int check_not_captured(const Place* place) except -1:
    if cuda.runtime().is_capturing(place.stream):
        raise UnsupportedOption(
            "debug is on and the stream is being captured; a captured call cannot wait for its check: call "
            "pagecore.debug(False) before the capture"
        )
    return 0


cdef Tensor new_verdict(const Place* place):
    """Return a uint64 on the device, NO_OFFENDER, to which the kernels write the smallest index of an invalid entry."""
    cdef int64_t one = 1
    check_not_captured(place)
    cdef Tensor verdict = new_at(1, &one, INT64, place)
    cuda.runtime().fill(<uintptr_t>verdict.data, 0xFF, sizeof(uint64_t), place.stream)
    return verdict


cdef bint is_guilty(Tensor verdict, const Place* place) except -1:
    return (<uint64_t*>to_host(verdict, place).data)[0] != NO_OFFENDER


cdef int launch_ids(
        Tensor verdict, const Indices& ids, int64_t lowest, int64_t limit, const Place* place) except -1:
    cdef PcIdParams params
    if ids.size == 0:
        return 0
    params.ids = device_indices(ids)
    params.lowest = lowest
    params.limit = limit
    params.offender = <uintptr_t>verdict.data
    grid = (ceil_div(ids.size, kThreads), 1, 1)
    kernels.launch("check_ids", grid, kThreads, 0, place.stream, <uintptr_t>&params, place.device_id)
    return 0


cdef bint has_invalid_ids(Tensor ids, int64_t lowest, int64_t limit, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    launch_ids(verdict, index_array(ids), lowest, limit, place)
    return is_guilty(verdict, place)


cdef bint has_invalid_pairs(
        Tensor pairs, int64_t lowest, int64_t num_sources, int64_t num_targets, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    launch_ids(verdict, pair_column(pairs, 0), lowest, num_sources, place)
    launch_ids(verdict, pair_column(pairs, 1), lowest, num_targets, place)
    return is_guilty(verdict, place)


cdef bint has_invalid_batch(
        Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_tokens, int64_t num_queries,
        int64_t num_blocks, int64_t block_size, const Place* place) except -1:
    cdef Tensor verdict = new_verdict(place)
    cdef PcBatchParams params
    params.table = device_table(table_array(block_table))
    params.seq_lens = device_indices(index_array(seq_lens))
    params.rows = device_indices(index_array(rows))
    params.cu_query_lens = device_indices(index_array(cu_query_lens))
    params.num_tokens = num_tokens
    params.num_queries = num_queries
    params.num_blocks = num_blocks
    params.block_size = block_size
    params.offender = <uintptr_t>verdict.data
    grid = (params.seq_lens.size + 1, 1, 1)
    kernels.launch(
        "check_batch", grid, kThreads, PC_MOVE_SHARED_BYTES, place.stream, <uintptr_t>&params, place.device_id)
    return is_guilty(verdict, place)
