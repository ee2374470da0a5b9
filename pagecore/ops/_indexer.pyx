"""The indexer of sparse attention on the host: writes of its keys, and scores."""

from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU, FLOAT32, LAST_FLOAT, DType
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
from pagecore.ops._place cimport Place, check_place, find_place, finished, new_result
from pagecore.ops.args cimport Cache, ScalePlane, index_array, table_array, token_array
from pagecore.ops.cpu._cpu cimport index_scores as run_scores, write_index as run_write
from pagecore.ops.cpu.latent cimport IndexScoreCall, IndexWriteArgs, kLatentWidthMax

import numpy as np

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
