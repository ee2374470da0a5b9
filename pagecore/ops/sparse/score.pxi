"""Sparse selection: scores of blocks or tokens by summaries of their keys."""

from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT32
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport cache_array, index_array, table_array, token_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    are_on_host,
    await_arrays,
    check_length,
    check_place,
    find_place,
    finished,
    float_tensor,
    given_indices,
    new_result,
    note_written,
    read_choice,
    read_flag,
    read_size,
    to_device,
)
from pagecore.ops.cpu._cpu cimport score as run_score
from pagecore.ops.cpu.calls._calls cimport check_scored
from pagecore.ops.cpu.sparse.select cimport ScoreArgs, ScoreBatch
from pagecore.ops.cuda.schedule._schedule cimport check_lengths
from pagecore.ops.cuda.sparse._sparse cimport ScoreSources, score as launch_score
from pagecore.ops.index_checks._index_checks cimport debug_scores, debugging
from pagecore.ops.planning._plan cimport copy_lens

from pagecore.errors import ShapeError, UnsupportedDtype


def score_blocks(
    query, key_min, key_max, block_table, seq_lens, *, block_size, rows=None, cu_query_lens=None, causal=True,
    group="max", stream=None,
):
    """Return an upper bound of the score q.k of every block, from the bounds of its keys.

    The bound of a query head is ``sum over d of max(q[d] * key_min[d], q[d] * key_max[d])``, in which a component
    q[d] of 0 contributes 0 even if a bound is infinite. All arrays are on one device, the host or CUDA; a call on CUDA
    is one launch.

    Parameters
    ----------
    query : array, [T, Hq, D]
        float32, float16 or bfloat16. Rows from ``cu_query_lens[-1]`` on are padding.
    key_min, key_max : array, [num_blocks, Hkv, D]
        Bounds that `write_kv` keeps up; both of one float dtype. Hq must be a multiple of Hkv.
    block_table, seq_lens, rows, cu_query_lens
        The batch; see `paged_attention`.
    block_size : int
        Tokens of a block.
    causal : bool
        Score only blocks that start at or before the query's position.
    group : {"max", "mean"}
        Score of a key head: the maximum bound of its query heads, or the bound of their mean. Unlike the maximum, the
        mean can underestimate the best key of one query head.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `query`.

    Returns
    -------
    array
        float32 [T, Hkv, max_blocks], in the framework of `query`. Blocks that are not visible score -inf; so do NaN.

    Raises
    ------
    ShapeError, InvalidBlock, InvalidSequence, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        As `paged_attention`. On CUDA head_dim is at most 512.

    Notes
    -----
    Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024. SGLang uses the mean.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> low, high = np.array([[[0.0, 0.0]], [[-2.0, -1.0]]]), np.array([[[1.0, 1.25]], [[3.0, 1.0]]])
    >>> low, high = low.astype("float32"), high.astype("float32")
    >>> query = np.array([[[1, 1], [-1, 2]]], np.float32)
    >>> pagecore.score_blocks(query, low, high, [[0, 1]], [4], block_size=2)
    array([[[2.5, 4. ]]], dtype=float32)
    """
    cdef Place place
    cdef ScoreArgs args
    cdef ScoreBatch batch
    cdef Tensor q = checked_query(query, stream, &place)
    cdef Tensor low = float_tensor(key_min, "key_min", 3, 1, "[num_blocks, num_kv_heads, head_dim]")
    cdef Tensor high = float_tensor(key_max, "key_max", 3, 1, "[num_blocks, num_kv_heads, head_dim]")
    check_place(low, "key_min", &place)
    check_place(high, "key_max", &place)
    if low.dtype_code != high.dtype_code:
        raise UnsupportedDtype(f"key_min is {low.dtype} and key_max {high.dtype}; both must have one dtype")
    cdef int axis
    for axis in range(3):
        check_length(high, "key_max", axis, low.shape_[axis], "as key_min has")
    check_length(low, "key_min", 2, q.shape_[2], "the head_dim of query")
    args.low, args.high = bounds_cache(low), bounds_cache(high)
    args.mean = read_choice(group, "group", ("max", "mean")) == 1
    batch.block_size = read_size(block_size, "block_size", 1)
    batch.causal = read_flag(causal, "causal")
    cdef Tensor table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", &place)
    args.width = table.shape_[1]
    await_arrays((query, key_min, key_max, block_table, seq_lens, rows, cu_query_lens), &place)
    return scored(args, batch, q, table, seq_lens, rows, cu_query_lens, None, query, &place)


def score_tokens(
    query, label, channels, block_table, seq_lens, *, rows=None, cu_query_lens=None, reduce="max_abs", max_len=None,
    stream=None,
):
    """Return the score of every earlier token from its label, a few channels of its key.

    All arrays are on one device, the host or CUDA; a call on CUDA is one launch.

    Parameters
    ----------
    query : array, [T, Hq, D]
        float32, float16 or bfloat16. Rows from ``cu_query_lens[-1]`` on are padding.
    label : array, [num_blocks, block_size, Hkv, S]
        Labels that `write_kv` keeps up, of a float dtype. Hq must be a multiple of Hkv.
    channels : integers, [Hkv, S]
        Channels of the keys that the labels hold. For CUDA arrays an int32 array on the device, whose contents are not
        checked but clamped, or a list or host array, which is copied.
    block_table, seq_lens, rows, cu_query_lens
        The batch; see `paged_attention`.
    reduce : {"max_abs", "mean"}
        Label of the queries of a key head: for each channel the number with the largest magnitude (the first of
        equals), or the mean.
    max_len : int, optional
        Last extent of the scores; not less than a length that is on the host. By default the longest sequence or, if
        the lengths are on a CUDA device, the tokens that a row of `block_table` holds.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `query`.

    Returns
    -------
    array
        float32 [T, Hkv, max_len], in the framework of `query`. The query's own token and later ones score -inf: attend
        to them as `recent` tokens of `select`.

    Raises
    ------
    ShapeError, InvalidBlock, InvalidSequence, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        As `paged_attention`; ShapeError also for a channel outside of the head_dim. On CUDA a head has at most 512
        channels.

    Notes
    -----
    Yang et al., "Post-Training Sparse Attention with Double Sparsity", 2024.
    """
    cdef Place place
    cdef ScoreArgs args
    cdef ScoreBatch batch
    cdef vector[int32_t] listed
    cdef Tensor q = checked_query(query, stream, &place)
    cdef Tensor labels = float_tensor(label, "label", 4, 1, "[num_blocks, block_size, num_kv_heads, num_channels]")
    check_place(labels, "label", &place)
    cdef Tensor picked = listed_channels(channels, labels.shape_[2], q.shape_[2], listed, &place)
    check_length(labels, "label", 3, picked.shape_[1], "the channels of a head")
    args.high = cache_array(labels)
    args.channels = listed.data()
    args.mean = read_choice(reduce, "reduce", ("max_abs", "mean")) == 1
    batch.block_size = labels.shape_[1]
    batch.causal = True
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", &place)
    cdef Tensor table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", &place)
    cdef int64_t room = table.shape_[1] * batch.block_size
    cdef int64_t longest = room if lens.device_type != CPU else max(0, int(lens.numpy().max(initial=0)))
    args.width = longest if max_len is None else read_size(max_len, "max_len", 0)
    if longest > room:
        raise ShapeError(
            f"seq_lens holds {longest}; a row of block_table has {table.shape_[1]} blocks of {batch.block_size} tokens"
            ": pass the table of all blocks")
    if args.width < longest and lens.device_type == CPU:
        raise ShapeError(f"max_len is {args.width} and seq_lens holds {longest}; expected at least the longest")
    await_arrays((query, label, channels, block_table, seq_lens, rows, cu_query_lens), &place)
    return scored(args, batch, q, table, lens, rows, cu_query_lens, picked, query, &place)


cdef object scored(
        ScoreArgs& args, ScoreBatch& batch, Tensor query, Tensor table, object seq_lens, object rows,
        object cu_query_lens, Tensor channels, object example, const Place* place):
    """Check the batch, score, and return the scores in the framework of `example`. `channels`: on the device."""
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", place)
    cdef int64_t num_sequences = lens.shape_[0]
    cdef Tensor picked = None, cu = None
    if query.shape_[1] % args.high.num_heads != 0:
        raise ShapeError(
            f"query has {query.shape_[1]} heads and the summaries of keys {args.high.num_heads}; the first must be a "
            "multiple of the second"
        )
    if rows is None:
        check_length(table, "block_table", 0, num_sequences, "one row for each of seq_lens, or pass rows= to pick some")
    else:
        picked = given_indices(rows, "rows", 1, "[num_sequences]", place)
        check_length(picked, "rows", 0, num_sequences, "one for each of seq_lens")
    if cu_query_lens is None:
        check_length(query, "query", 0, num_sequences, "one query for each of seq_lens, or pass cu_query_lens=")
    else:
        cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", place)
        check_length(cu, "cu_query_lens", 0, num_sequences + 1, "one more than seq_lens")
    cdef int64_t shape[3]
    shape[0], shape[1], shape[2] = query.shape_[0], args.high.num_heads, args.width
    cdef Tensor scores = new_result(3, shape, FLOAT32, example, place)
    args.query = token_array(query)
    args.table = table_array(table)
    args.scores = <float*>scores.data
    batch.seq_lens = index_array(lens)
    batch.rows = index_array(picked)
    batch.cu_query_lens = index_array(cu)
    if place.device_type == CPU:
        run_score(args, batch)
    else:
        score_on_device(args, batch, query, table, lens, picked, cu, channels, place)
        note_written(scores, place)
    return finished(scores, example, place)


cdef int score_on_device(
        ScoreArgs& args, ScoreBatch& batch, Tensor query, Tensor table, Tensor lens, Tensor rows, Tensor cu,
        Tensor channels, const Place* place) except -1:
    """Check what is on the host, copy it to the device, and launch."""
    cdef ScoreSources sources
    if are_on_host((table, lens, rows, cu)):
        check_scored(query, table, lens, rows, cu, args.high.num_blocks, batch.block_size)
    else:
        check_host_lengths(lens, cu, query.shape_[0], table.shape_[1], batch.block_size)
    table = to_device(table, "block_table", place)
    lens, cu = to_device(lens, "seq_lens", place), None if cu is None else to_device(cu, "cu_query_lens", place)
    rows = None if rows is None else to_device(rows, "rows", place)
    if debugging():
        debug_scores(query, table, lens, rows, cu, args.high.num_blocks, batch.block_size, place)
    sources.query, sources.low, sources.high = args.query, args.low, args.high
    sources.table, sources.rows = table_array(table), index_array(rows)
    sources.seq_lens, sources.cu_query_lens = index_array(lens), index_array(cu)
    sources.channels = NULL
    if channels is not None:
        sources.channels = channels.data
    sources.block_size, sources.width = batch.block_size, args.width
    return launch_score(sources, <char*>args.scores, batch.causal, args.mean, place)


cdef int check_host_lengths(Tensor lens, Tensor cu, int64_t num_tokens, int64_t width, int64_t block_size) except -1:
    """Check lengths that are on the host, with the errors of a call on the host."""
    cdef vector[int32_t] lengths, offsets
    if not are_on_host((lens, cu)):
        return 0
    copy_lens(lens, "seq_lens", lengths)
    if cu is not None:
        copy_lens(cu, "cu_query_lens", offsets)
    return check_lengths(lengths, offsets, num_tokens, width, block_size)


cdef Tensor checked_query(object query, object stream, Place* place):
    cdef Tensor q = float_tensor(query, "query", 3, 1, "[num_tokens, num_query_heads, head_dim]")
    find_place(place, q, "query", query, stream)
    return q
