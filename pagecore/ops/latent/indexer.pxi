"""The indexer of sparse attention: writes of its keys, and scores."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT32, LAST_FLOAT, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache, ScalePlane, index_array, table_array, token_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    are_on_host,
    await_arrays,
    check_aligned,
    check_last_axis,
    check_length,
    check_place,
    check_rank,
    check_result,
    check_writable,
    find_place,
    finished,
    float_tensor,
    given_indices,
    new_result,
    read_flag,
    to_device,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_own_elements
from pagecore.ops.cpu._cpu cimport index_scores as run_scores, write_index as run_write_index
from pagecore.ops.cpu.calls._calls cimport check_scored, check_slots
from pagecore.ops.cpu.latent.latent cimport IndexScoreCall, IndexWriteArgs, kLatentWidthMax
from pagecore.ops.cuda.latent._latent cimport score_keys, write_keys
from pagecore.ops.index_checks._index_checks cimport debug_scores, debug_slots, debugging

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption


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


def write_index(key, key_cache, scale_cache, slot_mapping, *, stream=None):
    """Write keys of the indexer as e4m3 codes with one scale a token.

    All arrays are on one device, the host or CUDA. A call on CUDA is one launch; it neither allocates nor waits unless
    slot_mapping is on the host.

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
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `key`.

    Raises
    ------
    InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        As for `write_kv`. Nothing has been written.
    """
    cdef Place place
    cdef Tensor new = float_tensor(key, "key", 2, 1, "[num_tokens, dim]")
    find_place(&place, new, "key", key, stream)
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
    if place.device_type != CPU:
        await_arrays((key, key_cache, scale_cache, slot_mapping), &place)
        if slots.device_type == CPU:
            check_slots(slots, new, columns_of(keys, 0, keys.shape_[2]))
        elif debugging():
            debug_slots(slots, new, columns_of(keys, 0, keys.shape_[2]), &place)
        slots = to_device(slots, "slot_mapping", &place)
        write_keys(one_head(new), cache_of(keys), scales_of(scales), slots, [keys, scales], &place)
        return
    cdef IndexWriteArgs args
    args.key, args.keys, args.scales = one_head(new), cache_of(keys), scales_of(scales)
    args.slots = index_array(slots)
    run_write_index(args)


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
    stream=None,
):
    """Score the keys of each sequence for its queries: ``sum over heads of weight * relu(query . key) * key scale``.

    All arrays are on one device, the host or CUDA; for CUDA arrays, lists and host arrays of integers are copied to the
    device. A call on CUDA with `out` and device integers is one launch, and does not wait.

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
        float32, contiguous, with n at least the longest sequence; it is returned. Required for lengths in CUDA memory,
        whose keys from n on have no score.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work, as for `write_index`; by default that of `query`.

    Returns
    -------
    array, [T, n]
        float32; n is the longest sequence by default. Column j is position j; positions that a query does not see have
        -inf.

    Raises
    ------
    InvalidBlock, InvalidSequence, ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid ids, lengths or arrays. Nothing has been written. Integers in CUDA memory are checked under `debug`
        only; otherwise invalid blocks are read as block 0, and tokens of invalid rows see no keys.

    Notes
    -----
    Sums are float32. CUDA multiplies keys of 128 e4m3 codes by matrix instructions, for up to 64 heads of float16 or
    bfloat16; a head's query is scaled by a power of two and held in float16, which rounds numbers below 2**-28 of its
    largest.

    The lightning indexer of DeepSeek-AI, "DeepSeek-V3.2", 2025.
    """
    cdef Place place
    cdef Tensor q = float_tensor(query, "query", 3, 1, "[num_tokens, num_heads, dim]")
    find_place(&place, q, "query", query, stream)
    cdef Tensor keys = key_plane(key_cache, q.shape_[2], True, &place)
    cdef Tensor scales = None if scale_cache is None else scale_plane(scale_cache, keys, &place)
    cdef Tensor given = float_tensor(weights, "weights", 2, 1, "[num_tokens, num_heads]")
    check_place(given, "weights", &place)
    check_length(given, "weights", 0, q.shape_[0], "the tokens of query")
    check_length(given, "weights", 1, q.shape_[1], "the heads of query")
    cdef ScoredSequences batch = scored_sequences(block_table, seq_lens, rows, cu_query_lens, q, &place)
    cdef bint is_causal = read_flag(causal, "causal")
    cdef Tensor result = score_array(out, batch, q, keys, query, &place)
    if out is not None:
        for read, name in ((q, "query"), (given, "weights"), (keys, "key_cache"), (scales, "scale_cache"),
                           (batch.lens, "seq_lens"), (batch.table, "block_table"), (batch.rows, "rows"),
                           (batch.cu, "cu_query_lens")):
            check_apart(result, "out", read, name)
    if place.device_type == CPU:
        score_on_host(q, given, keys, scales, batch, is_causal, result)
    else:
        await_arrays((query, weights, key_cache, scale_cache, block_table, seq_lens, rows, cu_query_lens), &place)
        score_on_device(q, given, keys, scales, batch, is_causal, result, &place)
    return finished(result, query, &place) if out is None else out


cdef class ScoredSequences:
    """The index arguments of a call, on the host or on the device. Optional: rows, cu."""

    cdef Tensor table
    cdef Tensor lens
    cdef Tensor rows
    cdef Tensor cu


cdef ScoredSequences scored_sequences(
        object block_table, object seq_lens, object rows, object cu_query_lens, Tensor query, const Place* place):
    cdef ScoredSequences batch = ScoredSequences.__new__(ScoredSequences)
    batch.lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", place)
    cdef int64_t count = batch.lens.shape_[0]
    batch.table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", place)
    if rows is not None:
        batch.rows = given_indices(rows, "rows", 1, "[num_sequences]", place)
        check_length(batch.rows, "rows", 0, count, "one for each of seq_lens")
    else:
        check_length(batch.table, "block_table", 0, count, "one row for each of seq_lens, or pass rows=")
    if cu_query_lens is not None:
        batch.cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", place)
        check_length(batch.cu, "cu_query_lens", 0, count + 1, "one more than seq_lens")
    else:
        check_length(query, "query", 0, count, "one query for each of seq_lens, or pass cu_query_lens=")
    return batch


cdef Tensor score_array(
        object out, ScoredSequences batch, Tensor query, Tensor keys, object example, const Place* place):
    """Return the array of the result: a new one, or `out`, checked."""
    cdef int64_t shape[2]
    cdef int64_t room = batch.table.shape_[1] * keys.shape_[1], longest = 0
    shape[0] = query.shape_[0]
    if batch.lens.device_type == CPU:
        longest = batch.lens.numpy().max(initial=0)
        if not 0 <= longest <= room:
            raise ShapeError(f"seq_lens holds {longest}; the block table holds {room} tokens a row")
    elif out is None:
        raise UnsupportedOption(
            f"seq_lens is on {batch.lens.device}; the host cannot read the longest without waiting for the device: "
            "pass out=, or seq_lens on the host")
    if out is None:
        shape[1] = longest
        return new_result(2, shape, FLOAT32, example, place)
    cdef Tensor result = any_tensor(out, "out")
    check_place(result, "out", place)
    check_rank(result, "out", 2, "[num_tokens, n]")
    shape[1] = result.shape_[1]
    check_result(result, "out", 2, shape, FLOAT32)
    check_last_axis(result, "out")
    if longest > shape[1]:
        raise ShapeError(f"seq_lens holds {longest} and out has {shape[1]} columns; it needs one for each key")
    return result


cdef int score_on_host(
        Tensor query, Tensor weights, Tensor keys, Tensor scales, ScoredSequences batch, bint causal,
        Tensor out) except -1:
    factors = np.ascontiguousarray(weights.numpy(), np.float32)
    cdef Tensor numbers = any_tensor(factors, "weights")
    cdef IndexScoreCall call
    call.seq_lens, call.rows, call.cu_query_lens = (
        index_array(batch.lens), index_array(batch.rows), index_array(batch.cu))
    call.causal = causal
    call.args.query, call.args.weights = token_array(query), <const float*>numbers.data
    call.args.keys, call.args.scales = cache_of(keys), scales_of(scales)
    call.args.table = table_array(batch.table)
    call.args.out, call.args.out_stride = <float*>out.data, out.strides_[0] // 4
    call.args.width = out.shape_[1]
    return run_scores(call)


cdef int score_on_device(
        Tensor query, Tensor weights, Tensor keys, Tensor scales, ScoredSequences batch, bint causal, Tensor out,
        const Place* place) except -1:
    cdef int64_t num_blocks = keys.shape_[0], block_size = keys.shape_[1]
    cdef bint on_host = are_on_host((batch.table, batch.lens, batch.rows, batch.cu))
    if on_host:
        check_scored(query, batch.table, batch.lens, batch.rows, batch.cu, num_blocks, block_size)
    cdef Tensor table = to_device(batch.table, "block_table", place), lens = to_device(batch.lens, "seq_lens", place)
    cdef Tensor rows = None if batch.rows is None else to_device(batch.rows, "rows", place)
    cdef Tensor cu = None if batch.cu is None else to_device(batch.cu, "cu_query_lens", place)
    if debugging() and not on_host:
        debug_scores(query, table, lens, rows, cu, num_blocks, block_size, place)
    return score_keys(
        query, one_head(weights), cache_of(keys), scales_of(scales), table, lens, rows, cu, causal, out, place)
