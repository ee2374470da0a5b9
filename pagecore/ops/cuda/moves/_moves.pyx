"""Bindings of the data-moving kernels: Tensors become parameter structs, and launches go to the stream of the call."""

from libc.stdint cimport int32_t, int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CPU, DType
from pagecore.arrays.tensors._tensor cimport Tensor, size_of
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport (
    BlockArray,
    Cache,
    Indices,
    MergeArgs,
    MergeManyArgs,
    Table,
    WriteArgs,
    fill_block_arrays,
    index_array,
    lse_array,
    merge_many_args,
    pair_column,
    table_array,
    token_array,
)
from pagecore.ops.arguments._arguments cimport Place, note_written, scale_stride
from pagecore.ops.cuda.launch cimport PC_MOVE_SHARED_BYTES, Grid, kThreads

from pagecore.arrays import cuda
from pagecore.arrays.tensors import streams
from pagecore.ops.cuda.compilation import kernels

cdef extern from "cuda_src/abi/moves.h" nogil:
    cdef struct PcTableParams:
        uintptr_t entries
        uintptr_t count
        uintptr_t table
        int64_t size
        int32_t capacity
        int32_t pad

    cdef struct PcWriteParams:
        pass

    cdef struct PcPairParams:
        pass

    cdef struct PcSequenceParams:
        pass

cdef extern from "cuda_src/abi/merge.h" nogil:
    cdef struct PcMaskedMergeParams:
        pass

    cdef struct PcMergeManyParams:
        pass

cdef extern from "pagecore/native/rounding.hpp" namespace "pagecore" nogil:
    int64_t ceil_div(int64_t n, int64_t by)

cdef extern from "pagecore/ops/cuda/moves/write_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass Divisors:
        const char* data
        float for_all
        int32_t stride

    cdef cppclass WriteLaunch:
        PcWriteParams params
        DType type_from "from"
        DType type_to "to"
        Grid grid

    vector[WriteLaunch] write_launches(
        const WriteArgs& args, const Divisors& of_keys, const Divisors& of_values,
        int64_t num_multiprocessors) except +raise_python_error

cdef extern from "pagecore/ops/cuda/moves/code_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass PcCodeParams:
        pass

    cdef cppclass CodeLaunch:
        PcCodeParams params
        DType type_from "from"
        Grid grid

    vector[CodeLaunch] code_launches(
        const WriteArgs& args, const Divisors& of_keys, const Divisors& of_values,
        bint is_4over6) except +raise_python_error

cdef extern from "pagecore/ops/cuda/pair_runs.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass BlockPairs:
        int32_t lowest

    BlockPairs host_pairs(const Indices& sources, const Indices& targets, bint one_cache) except +raise_python_error
    BlockPairs device_pairs(const Indices& sources, const Indices& targets, bint independent)

cdef extern from "pagecore/ops/cuda/moves/move_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass MoveTypes:
        int32_t type_from "from"
        int32_t type_to "to"

    cdef cppclass PairLaunch:
        PcPairParams params
        MoveTypes types
        Grid grid

    cdef cppclass SequenceLaunch:
        PcSequenceParams params
        MoveTypes types
        Grid grid

    cdef cppclass SequenceBatch:
        Table table
        Indices seq_lens
        Indices rows
        int64_t num_tokens
        int64_t longest
        bint gathers
        int32_t lowest

    vector[PairLaunch] pair_launches(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const BlockPairs& pairs,
        bint one_cache, int64_t num_multiprocessors) except +raise_python_error
    vector[SequenceLaunch] sequence_launches(
        const vector[BlockArray]& caches, const vector[BlockArray]& packed,
        const SequenceBatch& batch) except +raise_python_error

cdef extern from "pagecore/ops/cuda/moves/merge_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass MergeLaunch:
        PcMaskedMergeParams params
        Grid grid

    cdef cppclass MergeManyLaunch:
        PcMergeManyParams params
        Grid grid

    vector[MergeLaunch] merge_launches(const MergeArgs& args) except +raise_python_error
    vector[MergeManyLaunch] merge_many_launches(const MergeManyArgs& args) except +raise_python_error

cdef enum:
    TABLE_BLOCKS = 64  # size of a grid that serves every count

# By DType.
cdef tuple TYPES = ("float", "pc_half", "pc_bfloat16")
cdef tuple WRITES = tuple(tuple(f"write_kv<{a},{b}>" for b in TYPES) for a in TYPES)
cdef tuple CODE_WRITES = tuple(f"write_codes<{a}>" for a in TYPES)
cdef tuple MERGES = tuple(f"merge_parts<{a}>" for a in TYPES)
cdef tuple MERGES_OF_MANY = tuple(f"merge_many<{a}>" for a in TYPES)
# The last of each, at index -1 (kBytes), moves bytes.
cdef tuple MOVED = (*TYPES, "pc_uint8")
cdef tuple PAIR_MOVES = tuple(tuple(f"move_pairs<{a},{b}>" for b in MOVED) for a in MOVED)
cdef tuple SEQUENCE_MOVES = tuple(tuple(f"move_sequences<{a},{b}>" for b in MOVED) for a in MOVED)


cdef object loaded(str name, const Place* place):
    """Return a loaded kernel. A call loads all of its kernels before the first one writes, because a load may fail."""
    return kernels.kernel(name, place.device_id, place.stream)


cdef int launch(object kernel, const Grid& grid, int shared_bytes, const void* params, const Place* place) except -1:
    cuda.runtime().launch(
        kernel, (grid.x, grid.y, grid.z), kThreads, shared_bytes, place.stream, <uintptr_t>params)
    return 0


cdef int64_t multiprocessors(const Place* place) except -1:
    return cuda.runtime().properties(place.device_id).num_multiprocessors


cdef Divisors divisors_of(Tensor for_each, float for_all) noexcept:
    cdef Divisors divisors
    if for_each is not None:
        divisors.data = for_each.data
        divisors.stride = scale_stride(for_each)
    divisors.for_all = for_all
    return divisors


cdef int write_kv(
        Tensor key, Tensor value, const Cache& keys, const Cache& values, Tensor slot_mapping, Tensor key_divisors,
        float key_divisor, Tensor value_divisors, float value_divisor, bint is_4over6, list written,
        const Place* place) except -1:
    cdef WriteArgs args
    cdef Divisors of_keys = divisors_of(key_divisors, key_divisor)
    cdef Divisors of_values = divisors_of(value_divisors, value_divisor)
    cdef size_t i
    args.key = token_array(key)
    args.value = token_array(value)
    args.key_cache = keys
    args.value_cache = values
    args.slots = index_array(slot_mapping)
    cdef vector[WriteLaunch] launches = write_launches(args, of_keys, of_values, multiprocessors(place))
    cdef vector[CodeLaunch] of_codes = code_launches(args, of_keys, of_values, is_4over6)
    cdef list ready = []
    for i in range(launches.size()):
        ready.append(loaded(WRITES[<int>launches[i].type_from][<int>launches[i].type_to], place))
    for i in range(of_codes.size()):
        ready.append(loaded(CODE_WRITES[<int>of_codes[i].type_from], place))
    for i in range(launches.size()):
        launch(ready[i], launches[i].grid, 0, &launches[i].params, place)
    for i in range(of_codes.size()):
        launch(ready[launches.size() + i], of_codes[i].grid, 0, &of_codes[i].params, place)
    return note_all(written, place)


cdef int note_all(list tensors, const Place* place) except -1:
    for tensor in tensors:
        if tensor is not None:
            note_written(tensor, place)
    return 0


cdef int copy_blocks(list caches, Tensor pairs, bint independent, const Place* place) except -1:
    return move_pairs(caches, caches, pairs, True, independent, 0, place)


cdef int transfer_blocks(
        list sources, list targets, Tensor pairs, bint independent, int64_t lowest, const Place* place) except -1:
    return move_pairs(sources, targets, pairs, False, independent, lowest, place)


cdef int move_pairs(
        list sources, list targets, Tensor pairs, bint one_cache, bint independent, int64_t lowest,
        const Place* place) except -1:
    cdef vector[BlockArray] from_arrays, to_arrays
    fill_block_arrays(from_arrays, sources)
    fill_block_arrays(to_arrays, targets)
    cdef Indices source_ids = pair_column(pairs, 0), target_ids = pair_column(pairs, 1)
    cdef BlockPairs ids
    cdef size_t i
    if pairs.device_type == CPU:
        ids = host_pairs(source_ids, target_ids, one_cache)
    else:
        ids = device_pairs(source_ids, target_ids, independent)
    ids.lowest = <int32_t>lowest
    cdef vector[PairLaunch] launches = pair_launches(from_arrays, to_arrays, ids, one_cache, multiprocessors(place))
    cdef list ready = []
    for i in range(launches.size()):
        ready.append(loaded(PAIR_MOVES[launches[i].types.type_from][launches[i].types.type_to], place))
    for i in range(launches.size()):
        launch(ready[i], launches[i].grid, 0, &launches[i].params, place)
    return note_all(targets, place)


cdef int gather_blocks(
        list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
        int64_t lowest, const Place* place) except -1:
    move_sequences(caches, packed, block_table, seq_lens, rows, longest, True, lowest, place)
    return note_all(packed, place)


cdef int scatter_blocks(
        list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
        int64_t lowest, const Place* place) except -1:
    move_sequences(caches, packed, block_table, seq_lens, rows, longest, False, lowest, place)
    return note_all(caches, place)


cdef int move_sequences(
        list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest, bint gathers,
        int64_t lowest, const Place* place) except -1:
    cdef SequenceBatch batch
    cdef size_t i
    if not caches:
        return 0
    cdef vector[BlockArray] blocks, tokens
    fill_block_arrays(blocks, caches)
    fill_block_arrays(tokens, packed)
    batch.table = table_array(block_table)
    batch.seq_lens = index_array(seq_lens)
    batch.rows = index_array(rows)
    batch.num_tokens = (<Tensor>packed[0]).shape_[0]
    batch.longest = longest
    batch.gathers = gathers
    batch.lowest = <int32_t>lowest
    cdef vector[SequenceLaunch] launches = sequence_launches(blocks, tokens, batch)
    cdef list ready = []
    for i in range(launches.size()):
        ready.append(loaded(SEQUENCE_MOVES[launches[i].types.type_from][launches[i].types.type_to], place))
    for i in range(launches.size()):
        launch(ready[i], launches[i].grid, PC_MOVE_SHARED_BYTES, &launches[i].params, place)
    return 0


cdef int merge(
        Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor mask, Tensor out, Tensor lse,
        const Place* place) except -1:
    cdef MergeArgs args
    cdef size_t i
    args.out_a = token_array(out_a)
    args.out_b = token_array(out_b)
    args.out = token_array(out)
    args.lse_a = lse_array(lse_a)
    args.lse_b = lse_array(lse_b)
    args.lse = lse_array(lse)
    if mask is not None:
        args.mask, args.mask_stride = mask.data, mask.strides_[0]
    cdef vector[MergeLaunch] launches = merge_launches(args)
    kernel = loaded(MERGES[out.dtype_code], place)
    for i in range(launches.size()):
        launch(kernel, launches[i].grid, 0, &launches[i].params, place)
    return note_all([out, lse], place)


cdef int merge_many(
        Tensor parts, Tensor lses, Tensor cu_parts, Tensor out, Tensor lse, const Place* place) except -1:
    cdef vector[MergeManyLaunch] launches = merge_many_launches(merge_many_args(parts, lses, cu_parts, out, lse))
    cdef size_t i
    kernel = loaded(MERGES_OF_MANY[out.dtype_code], place)
    for i in range(launches.size()):
        launch(kernel, launches[i].grid, 0, &launches[i].params, place)
    return note_all([out, lse], place)


cpdef int scatter_entries(
        uintptr_t entries, uintptr_t count, int capacity, Tensor table, uintptr_t stream) except -1:
    """Write changed entries to a block table on the device; see _moves.pxd."""
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
