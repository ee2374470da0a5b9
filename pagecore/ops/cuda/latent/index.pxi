"""Bindings of the kernels of the sparse indexer: writes of its keys, scores, and slots."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport INT64, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport Cache, Indices, ScalePlane, Table, TokenArray, index_array, table_array, token_array
from pagecore.ops.arguments._arguments cimport Place, note_written
from pagecore.ops.cuda.launch cimport Grid, kThreads

from pagecore.arrays import cuda
from pagecore.ops.cuda.compilation import kernels

cdef extern from "pagecore/ops/cuda/latent/index_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef struct PcIndexWriteParams:
        pass

    cdef struct PcIndexScoreParams:
        pass

    cdef struct PcIndexSlotParams:
        pass

    cdef cppclass IndexWriteLaunch:
        PcIndexWriteParams params
        Grid grid

    cdef cppclass IndexScoreLaunch:
        PcIndexScoreParams params
        DType query_type
        int64_t tiles
        Grid grid

    cdef cppclass IndexSlotLaunch:
        PcIndexSlotParams params
        Grid grid

    cdef cppclass IndexScoreCall:
        TokenArray query
        TokenArray weights
        Cache keys
        ScalePlane scales
        Table table
        Indices seq_lens
        Indices rows
        Indices cu_query_lens
        bint causal
        char* out
        int64_t out_stride
        int64_t width

    cdef cppclass PositionArray:
        const char* data
        int64_t num_tokens
        int64_t width
        int64_t stride
        bint wide

    IndexWriteLaunch index_write_launch(
        const TokenArray& key, const Cache& keys, const ScalePlane& scales,
        const Indices& slots) except +raise_python_error
    IndexScoreLaunch index_score_launch(
        const IndexScoreCall& call, int64_t num_multiprocessors) except +raise_python_error
    IndexSlotLaunch index_slot_launch(
        const PositionArray& positions, const Table& table, const Indices& rows, const Indices& cu_query_lens,
        int64_t num_sequences, int64_t block_size, char* out) except +raise_python_error

# By DType.
cdef tuple TYPES = ("float", "pc_half", "pc_bfloat16")
cdef tuple SCORES = tuple(f"index_scores<{name}>" for name in TYPES)


cdef int run(str name, const Grid& grid, const void* params, const Place* place) except -1:
    kernels.launch(
        name, (grid.x, grid.y, grid.z), kThreads, 0, place.stream, <uintptr_t>params, place.device_id)
    return 0


cdef int write_keys(
        const TokenArray& new, const Cache& keys, const ScalePlane& scales, Tensor slots, list written,
        const Place* place) except -1:
    cdef IndexWriteLaunch launch = index_write_launch(new, keys, scales, index_array(slots))
    if launch.grid.x == 0:
        return 0
    run("write_index_keys", launch.grid, &launch.params, place)
    for tensor in written:
        note_written(<Tensor>tensor, place)
    return 0


cdef int score_keys(
        Tensor query, const TokenArray& weights, const Cache& keys, const ScalePlane& scales, Tensor table,
        Tensor seq_lens, Tensor rows, Tensor cu_query_lens, bint causal, Tensor out, const Place* place) except -1:
    cdef IndexScoreCall call
    call.query, call.weights = token_array(query), weights
    call.keys, call.scales = keys, scales
    call.table, call.seq_lens = table_array(table), index_array(seq_lens)
    call.rows, call.cu_query_lens = index_array(rows), index_array(cu_query_lens)
    call.causal = causal
    call.out, call.out_stride, call.width = out.data, out.strides_[0], out.shape_[1]
    cdef IndexScoreLaunch launch = index_score_launch(
        call, cuda.runtime().properties(place.device_id).num_multiprocessors)
    if launch.grid.x == 0:
        return 0
    name = SCORES[<int>launch.query_type]
    if launch.tiles > 0:
        name = f"index_scores_matrix<{TYPES[<int>launch.query_type]},{launch.tiles}>"
    run(name, launch.grid, &launch.params, place)
    return note_written(out, place)


cdef int find_slots(
        Tensor positions, Tensor table, Tensor rows, Tensor cu_query_lens, int64_t num_sequences, int64_t block_size,
        Tensor out, const Place* place) except -1:
    cdef PositionArray array
    array.data = positions.data
    array.num_tokens, array.width = positions.shape_[0], positions.shape_[1]
    array.stride, array.wide = positions.strides_[0], positions.dtype_code == INT64
    cdef IndexSlotLaunch launch = index_slot_launch(
        array, table_array(table), index_array(rows), index_array(cu_query_lens), num_sequences, block_size, out.data)
    if launch.grid.x == 0:
        return 0
    run("index_slots", launch.grid, &launch.params, place)
    return note_written(out, place)
