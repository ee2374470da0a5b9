"""The indexer of sparse attention on the host: writes of its keys, scores, the best positions, and their slots."""

from cpython.object cimport PyObject
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memset

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU, FLOAT32, INT32, INT64, LAST_FLOAT, DType
from pagecore.ops._checks cimport (
    any_tensor,
    check_aligned,
    check_last_axis,
    check_length,
    check_rank,
    check_result,
    check_writable,
    float_tensor,
)
from pagecore.ops._indices cimport given_indices, index_tensor
from pagecore.ops._latent_cache cimport one_head
from pagecore.ops._numbers cimport read_flag
from pagecore.ops._overlap cimport check_apart, check_own_elements
from pagecore.ops._place cimport (
    Place,
    await_arrays,
    check_place,
    find_place,
    finished,
    new_result,
    note_written,
    to_device,
)
from pagecore.ops.args cimport Cache, Indices, ScalePlane, index_array, table_array, token_array
from pagecore.ops.cpu._cpu cimport (
    index_scores as run_scores,
    select_topk as run_select,
    slots_of as run_slots,
    write_index as run_write,
)
from pagecore.ops.cpu.latent cimport IndexScoreCall, IndexWriteArgs, SlotsArgs, TopkArgs, kLatentWidthMax
from pagecore.ops.cuda._sparse cimport Selecting, select as launch_select

from operator import index

import numpy as np

from pagecore.arrays.refusals import brief
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption

cdef extern from "pagecore/arrays/dtype.hpp" nogil:
    enum:
        E4M3_CODE "static_cast<int>(pagecore::DType::F8E4M3FN)"


cdef int check_host(const Place* place, str name) except -1:
    if place.device_type != CPU:
        raise UnsupportedOption(f"{name} is on CUDA; the indexer runs on the host only: copy the arrays there")
    return 0


cdef Tensor key_plane(object array, int64_t dim, bint plain, const Place* place):
    """Return a checked plane of index keys: e4m3 codes, or plain numbers if `plain`."""
    cdef Tensor keys = any_tensor(array, "key_cache")
    check_place(keys, "key_cache", place)
    check_rank(keys, "key_cache", 3, "[num_blocks, block_size, dim]")
    if keys.shape_[1] == 0:
        raise ShapeError(f"key_cache has shape {keys.shape}; block_size must be at least 1")
    check_length(keys, "key_cache", 2, dim, "the dim of the other array")
    if keys.dtype_code != E4M3_CODE and not (plain and keys.dtype_code <= LAST_FLOAT):
        raise UnsupportedDtype(f"key_cache is {keys.dtype}; it must be float8_e4m3fn{' or a float' if plain else ''}")
    if dim > kLatentWidthMax:
        raise ShapeError(f"key_cache has shape {keys.shape}; dim must be at most {kLatentWidthMax}")
    check_last_axis(keys, "key_cache")
    check_aligned(keys, "key_cache")
    return keys


cdef Tensor scale_plane(object array, Tensor keys, const Place* place):
    cdef Tensor scales = any_tensor(array, "scale_cache")
    check_place(scales, "scale_cache", place)
    check_rank(scales, "scale_cache", 3, "[num_blocks, block_size, 1]")
    if scales.dtype_code != FLOAT32:
        raise UnsupportedDtype(f"scale_cache is {scales.dtype}; it must be float32")
    check_length(scales, "scale_cache", 0, keys.shape_[0], "the blocks of key_cache")
    check_length(scales, "scale_cache", 1, keys.shape_[1], "the block_size of key_cache")
    check_length(scales, "scale_cache", 2, 1, "one scale for each token")
    check_aligned(scales, "scale_cache")
    return scales


cdef Cache cache_of(Tensor keys) noexcept:
    cdef Cache cache
    cache.data = keys.data
    cache.type = <DType>keys.dtype_code
    cache.num_blocks, cache.block_size = keys.shape_[0], keys.shape_[1]
    cache.num_heads, cache.dim = 1, keys.shape_[2]
    cache.block_stride, cache.token_stride = keys.strides_[0], keys.strides_[1]
    return cache


cdef ScalePlane scales_of(Tensor scales) noexcept:
    cdef ScalePlane plane
    if scales is not None:
        plane.data = scales.data
        plane.block_stride, plane.token_stride = scales.strides_[0], scales.strides_[1]
    return plane


cdef int64_t positive(object value, str name) except -1:
    try:
        number = index(value)
    except TypeError:
        raise ShapeError(f"{name} is {brief(value)}; expected an integer of at least 1") from None
    if not 1 <= number <= INT32_MAX:
        raise ShapeError(f"{name} is {number}; it must be 1 to {INT32_MAX}")
    return number


def write_index(key, key_cache, scale_cache, slot_mapping):
    """Write keys of the indexer as e4m3 codes with one scale a token.

    The scale of a token is the least power of two that is at least ``max(|key|, 1e-4) / 448``, as in DeepGEMM. A pool
    of planes ``(128,)`` float8_e4m3fn and ``(1,)`` float32 in the order "LBCNHD" has the pages of DeepGEMM.

    Parameters
    ----------
    key : array, [T, D]
        float32, float16 or bfloat16.
    key_cache, scale_cache : array, [num_blocks, block_size, D] and [num_blocks, block_size, 1]
        float8_e4m3fn and float32, written in place.
    slot_mapping : integers, [T'], T' <= T
        As for `write_kv`.

    Raises
    ------
    InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        As for `write_kv`. Nothing has been written.
    """
    cdef Place place
    cdef Tensor new = float_tensor(key, "key", 2, 1, "[num_tokens, dim]")
    find_place(&place, new, "key", key, None)
    check_host(&place, "key")
    cdef Tensor keys = key_plane(key_cache, new.shape_[1], False, &place)
    cdef Tensor scales = scale_plane(scale_cache, keys, &place)
    cdef Tensor slots = given_indices(slot_mapping, "slot_mapping", 1, "[at most num_tokens]", &place)
    if slots.shape_[0] > new.shape_[0]:
        raise ShapeError(f"slot_mapping has {slots.shape_[0]} slots for {new.shape_[0]} tokens; it must not have more")
    for written, name in ((keys, "key_cache"), (scales, "scale_cache")):
        check_writable(written, name)
        check_own_elements(written, name)
        check_apart(written, name, new, "key")
        check_apart(written, name, slots, "slot_mapping")
    check_apart(keys, "key_cache", scales, "scale_cache")
    cdef IndexWriteArgs args
    args.key, args.keys, args.scales = one_head(new), cache_of(keys), scales_of(scales)
    args.slots = index_array(slots)
    run_write(args)


def index_scores(
    query,
    weights,
    key_cache,
    scale_cache,
    block_table,
    seq_lens,
    *,
    rows=None,
    cu_query_lens=None,
    causal=True,
    out=None,
):
    """Score the keys of each sequence for its queries: ``sum over heads of weight * relu(query . key) * key scale``.

    Parameters
    ----------
    query : array, [T, H, D]
        float32, float16 or bfloat16.
    weights : array, [T, H]
        float32, float16 or bfloat16.
    key_cache : array, [num_blocks, block_size, D]
        float8_e4m3fn, or plain float32, float16 or bfloat16.
    scale_cache : array, [num_blocks, block_size, 1], or None
        float32; None for scales of 1.
    block_table, seq_lens, rows, cu_query_lens, causal
        As for `paged_attention`.
    out : array, [T, n], optional
        float32, contiguous, with n at least the longest sequence; it is returned.

    Returns
    -------
    array, [T, n]
        float32; n is the longest sequence by default. Column j is position j; positions that a query does not see have
        -inf.

    Raises
    ------
    InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid ids, lengths or arrays. Nothing has been written.

    Notes
    -----
    The lightning indexer of DeepSeek-AI, "DeepSeek-V3.2", 2025.
    """
    cdef Place place
    cdef Tensor q = float_tensor(query, "query", 3, 1, "[num_tokens, num_heads, dim]")
    find_place(&place, q, "query", query, None)
    check_host(&place, "query")
    cdef Tensor keys = key_plane(key_cache, q.shape_[2], True, &place)
    cdef Tensor scales = None if scale_cache is None else scale_plane(scale_cache, keys, &place)
    cdef Tensor given = float_tensor(weights, "weights", 2, 1, "[num_tokens, num_heads]")
    check_place(given, "weights", &place)
    check_length(given, "weights", 0, q.shape_[0], "the tokens of query")
    check_length(given, "weights", 1, q.shape_[1], "the heads of query")
    factors = np.ascontiguousarray(given.numpy(), np.float32)
    cdef Tensor numbers = any_tensor(factors, "weights")
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", &place)
    cdef Tensor table = index_tensor(block_table, "block_table", 2, "[num_sequences, max_blocks]", &place)
    cdef Tensor picked = None, cu = None
    if rows is not None:
        picked = index_tensor(rows, "rows", 1, "[num_sequences]", &place)
    else:
        check_length(table, "block_table", 0, lens.shape_[0], "one row for each of seq_lens, or pass rows=")
    if cu_query_lens is not None:
        cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", &place)
    else:
        check_length(q, "query", 0, lens.shape_[0], "one query for each of seq_lens, or pass cu_query_lens=")
    cdef IndexScoreCall call
    cdef int64_t shape[2]
    call.seq_lens, call.rows, call.cu_query_lens = index_array(lens), index_array(picked), index_array(cu)
    call.causal = read_flag(causal, "causal")
    shape[0] = q.shape_[0]
    cdef Tensor result
    if out is None:
        longest = lens.numpy().max(initial=0)
        if not 0 <= longest <= table.shape_[1] * keys.shape_[1]:
            raise ShapeError(
                f"seq_lens holds {longest}; the block table holds {table.shape_[1] * keys.shape_[1]} tokens a row")
        shape[1] = longest
        result = new_result(2, shape, FLOAT32, query, &place)
    else:
        result = any_tensor(out, "out")
        check_place(result, "out", &place)
        check_rank(result, "out", 2, "[num_tokens, n]")
        shape[1] = result.shape_[1]
        check_result(result, "out", 2, shape, FLOAT32)
        check_last_axis(result, "out")
        for read, name in ((q, "query"), (numbers, "weights"), (keys, "key_cache"), (scales, "scale_cache"),
                           (lens, "seq_lens"), (table, "block_table"), (picked, "rows"), (cu, "cu_query_lens")):
            check_apart(result, "out", read, name)
    call.args.query, call.args.weights = token_array(q), <const float*>numbers.data
    call.args.keys, call.args.scales, call.args.table = cache_of(keys), scales_of(scales), table_array(table)
    call.args.out, call.args.out_stride = <float*>result.data, result.strides_[0] // 4
    call.args.width = shape[1]
    run_scores(call)
    return finished(result, query, &place) if out is None else out


def select_topk(scores, k, lens=None, *, stream=None):
    """Select the positions of the k greatest scores of each row, best first; equal scores by ascending position.

    Parameters
    ----------
    scores : array, [T, n]
        float32, on the host or CUDA.
    k : int
        On CUDA at most 4096.
    lens : integers, [T], optional
        Number of leading scores of each row that count; n by default. In CUDA memory they are clamped to 0 .. n.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `scores`.

    Returns
    -------
    array, [T, k]
        int32 positions; -1 where a row has fewer than k scores above -inf. NaN is never selected. A new array in the
        framework of `scores`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid arrays or lengths.
    """
    cdef Place place
    cdef Tensor given = float_tensor(scores, "scores", 2, 2, "[num_tokens, n]")
    find_place(&place, given, "scores", scores, stream)
    if given.dtype_code != FLOAT32:
        raise UnsupportedDtype(f"scores is {given.dtype}; it must be float32, as returned by index_scores")
    if given.shape_[1] > INT32_MAX:
        raise ShapeError(f"scores has shape {given.shape}; positions must fit int32")
    cdef Tensor counts = None
    if lens is not None:
        counts = given_indices(lens, "lens", 1, "[num_tokens]", &place)
        check_length(counts, "lens", 0, given.shape_[0], "one for each row of scores")
    cdef int64_t shape[2]
    shape[0], shape[1] = given.shape_[0], positive(k, "k")
    cdef Tensor result = new_result(2, shape, INT32, scores, &place)
    cdef TopkArgs args
    args.scores, args.score_stride = <const float*>given.data, given.strides_[0] // 4
    args.num_rows, args.width, args.k = shape[0], given.shape_[1], shape[1]
    args.lens = index_array(counts)
    args.out = <int32_t*>result.data
    if place.device_type == CPU:
        run_select(args)
    else:
        await_arrays((scores, lens), &place)
        topk_on_device(args, counts, &place)
        note_written(result, &place)
    return finished(result, scores, &place)


cdef int topk_on_device(const TopkArgs& args, Tensor lens, const Place* place) except -1:
    """Launch a selection of the best; lengths that are on the host are checked."""
    cdef Selecting call
    cdef Indices lengths
    cdef int64_t i
    if lens is not None:
        lengths = index_array(lens)
        if lens.device_type == CPU:
            for i in range(lens.shape_[0]):
                if not 0 <= lengths.at(i) <= args.width:
                    raise ShapeError(f"lens[{i}] is {lengths.at(i)}; expected 0 to {args.width}, the scores of a row")
            lens = to_device(lens, "lens", place)
            lengths = index_array(lens)
    memset(&call, 0, sizeof(call))
    call.scores, call.score_stride = <const char*>args.scores, args.score_stride
    call.num_rows, call.width, call.length, call.rows_per_length = args.num_rows, args.width, args.width, 1
    call.budget = call.capacity = args.k
    call.positions, call.ranked = <char*>args.out, True
    return launch_select(call, lengths, place)


def slots_of(positions, block_table, block_size, *, rows=None, cu_query_lens=None):
    """Return the slots of positions of sequences: ``block_table[row, p // block_size] * block_size + p % block_size``.

    Parameters
    ----------
    positions : integers, [T, n]
        A negative position has slot -1.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
    block_size : int
    rows, cu_query_lens
        As for `paged_attention`: by default each sequence has one row of positions.

    Returns
    -------
    array, [T, n]
        int32, for `indices` of `latent_attention`, in the framework of `positions`.

    Raises
    ------
    ShapeError
        A position is past its row of the table, or the shapes do not match.
    InvalidBlock, InvalidSequence
        A block is negative or its slots do not fit int32, or a row is outside the table.
    UnsupportedDtype, DeviceError, NotEnoughMemory
        Arrays are not supported.
    """
    cdef Place place
    cdef int64_t tokens = positive(block_size, "block_size")
    place.device_type, place.device_id, place.stream = CPU, 0, 0
    place.name = <PyObject*>"positions"
    cdef Tensor wanted = given_indices(positions, "positions", 2, "[num_tokens, n]", NULL)
    if wanted.dtype_code == INT64:
        values = wanted.numpy()
        if values.size and values.max() > INT32_MAX:
            raise ShapeError(f"positions holds {values.max()}; positions must fit int32")
    narrow = np.ascontiguousarray(np.maximum(wanted.numpy(), -1), np.int32)
    cdef Tensor numbers = any_tensor(narrow, "positions")
    cdef Tensor table = index_tensor(block_table, "block_table", 2, "[num_sequences, max_blocks]", NULL)
    cdef Tensor picked = None, cu = None
    cdef int64_t num_sequences = table.shape_[0]
    if rows is not None:
        picked = index_tensor(rows, "rows", 1, "[num_sequences]", NULL)
        num_sequences = picked.shape_[0]
    if cu_query_lens is not None:
        cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", NULL)
        check_length(cu, "cu_query_lens", 0, num_sequences + 1, "one more than the sequences")
    else:
        check_length(numbers, "positions", 0, num_sequences, "one row for each sequence, or pass cu_query_lens=")
    cdef Tensor result = new_result(2, numbers.shape_, INT32, positions, &place)
    cdef SlotsArgs args
    args.positions, args.out = <const int32_t*>numbers.data, <int32_t*>result.data
    args.num_tokens, args.width = numbers.shape_[0], numbers.shape_[1]
    args.table, args.rows, args.cu_query_lens = table_array(table), index_array(picked), index_array(cu)
    args.num_sequences, args.block_size = num_sequences, tokens
    run_slots(args)
    return finished(result, positions, &place)
