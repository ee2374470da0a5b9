"""paged_attention: check the arguments, call the kernel, return arrays of the caller's framework."""

from libc.math cimport sqrt
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT32
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    Sealed,
    Selected,
    StoredCache,
    TreeMask,
    any_tensor,
    are_on_host,
    await_arrays,
    check_length,
    check_stored,
    checked_scales,
    find_place,
    finished,
    finite_number,
    flat_mask,
    given_factor,
    given_indices,
    head_numbers,
    new_result,
    note_written,
    numbers_to_device,
    read_flag,
    read_reach,
    read_sealed,
    read_selected,
    read_sink_tokens,
    read_softcap,
    read_tree,
    scale_numbers,
    stored_cache,
    to_device,
)
from pagecore.ops.cpu.args cimport Selection
from pagecore.ops.cpu.calls._calls cimport attention as run_attention
from pagecore.ops.cuda.attention._attention cimport attention as launch_attention
from pagecore.ops.index_checks._index_checks cimport debug_attention, debugging
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.errors import ShapeError


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    *,
    rows=None,
    cu_query_lens=None,
    scale=None,
    causal=True,
    window=None,
    chunk=None,
    sink_tokens=None,
    softcap=0.0,
    sinks=None,
    alibi_slopes=None,
    mask=None,
    tree_mask=None,
    positions=None,
    blocks=None,
    block_counts=None,
    indices=None,
    index_counts=None,
    key_scale=None,
    value_scale=None,
    key_global_scale=1.0,
    value_global_scale=1.0,
    sealed=None,
    query_scale=None,
    output_scale=None,
    out=None,
    return_lse=False,
    plan=None,
    stream=None,
):
    """Attend from the newest tokens of each sequence to its keys in a paged cache.

    The queries of sequence i are its last ``query_len`` positions. Prefill and decode sequences may share a batch. The
    score of query position p and key position j is ``scale * q.k``, then ``softcap * tanh(score / softcap)``, then
    ``+ alibi_slope * (j - p)``, then masked. The output of a query without keys is 0, and its lse is the sink or -inf.

    Parameters
    ----------
    query : array, [T, Hq, D]
        float32, float16 or bfloat16, or the codes of a query in float8_e4m3fn or float8_e5m2, with `query_scale`. The
        last axis is contiguous, here and below; other strides are free. Rows from ``cu_query_lens[-1]`` on are padding:
        their output is 0 and their lse -inf.
    key_cache, value_cache : array, [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv]
        float32, float16 or bfloat16, or the codes of a format, as `write_kv` stores them; each independent of the other
        and of the dtype of `query`. The last axis of uint8 codes has half the length. Hq must be a multiple of Hkv.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Block ids. An entry is read only if a query attends to a token of the block.
    seq_lens : integers, [B]
        Keys of each sequence in the cache, including those of the new tokens.
    rows : integers, [B], optional
        Row of `block_table` for each sequence.
    cu_query_lens : integers, [B + 1], optional
        The query rows of sequence i are ``cu_query_lens[i]`` to ``cu_query_lens[i + 1] - 1``. By default each sequence
        has one query (decode).
    scale : float, optional
        1 / sqrt(D) by default.
    causal : bool
        Attend to keys j <= p only.
    window : int or (left, right), optional
        W: j > p - W, with `causal` the last W keys up to the query's own, without it later keys, too.
        (left, right): p - left <= j <= p + right; a side that is None or -1 is unbounded.
    chunk : int, optional
        Attend to the keys of the query's own chunk only, ``j // chunk == p // chunk`` (chunked local attention of Llama
        4). Exclusive with `window`.
    sink_tokens : int, optional
        Attend also to the first `sink_tokens` keys, before the window (StreamingLLM): j < sink_tokens or j > p - W.
        Keys between the two are not read. Needs a window; exclusive with `blocks` and `indices`, which list the keys
        themselves. Not to be confused with `sinks`, logits without keys.
    softcap : float
        At least 0; 0 disables it.
    sinks : numbers, [Hq], optional
        An additional logit in the softmax of each head, without a value; included in lse.
    alibi_slopes : numbers, [Hq], optional
    mask : bool, flat, optional
        ``[query_len, seq_len]`` of every sequence in order, True to attend; combined with the other masks.
    tree_mask : uint64 or int64, [T] or [T, words], optional
        The new tokens of each sequence as a tree of drafts: bit i of row t is set if token t attends to the i-th new
        token of its sequence (bit i % 64 of word i // 64); see `tree_mask`. Every token attends to itself, and to no
        later token. It replaces causality among the new tokens; the keys before them are attended as usual. Exclusive
        with `mask`, `sink_tokens`, `blocks` and `indices`, on CUDA also with `alibi_slopes`. In CUDA memory the bits
        are checked under `debug` only.
    positions : integers, [T], optional
        Position of each token of a tree. Windows, chunks and ALiBi count from it, and its k-th ancestor, counted from
        the token up, is k positions before it. By default it follows from the mask: the first new position plus the
        token's number of bits - 1, its depth. It is at least the first new position, and at most that of a chain.
    blocks : integers, [B, Hkv, n], optional
        The blocks that each key head of each sequence reads, as ascending logical numbers (block i has positions
        ``i * block_size`` to ``(i + 1) * block_size - 1``); see `select`. Other keys are neither read nor attended to.
        Masks, windows and biases use the true positions. A given plan supplies `batch_invariant` only. In CUDA memory
        lists are checked under `debug` only.
    block_counts : integers, [B, Hkv], optional
        Entries of each list of `blocks`; by default a list ends before its first negative entry.
    indices, index_counts : integers, [B, Hkv, n] and [B, Hkv], optional
        Single tokens instead of blocks, as ascending positions.
    key_scale, value_scale : float, [Hkv] or array, [num_blocks, block_size, Hkv, groups], optional
        Factors of the stored keys or values, for the layer or for each head; or the plane of the stored scales that
        `write_kv` computed. The dtypes of codes and scales determine the format, as in `write_kv`. A scale is read only
        if a query attends to its token.
    key_global_scale, value_global_scale : float
        Given factor of an "nvfp4" cache, for the layer.
    sealed : SealedBlocks, optional
        The first tokens of each sequence, in blocks of 2 or 4 bits that `seal_kv` has quantised. The first
        ``sealed.lens[i]`` of the `seq_lens` tokens are read from there; `key_cache`, `value_cache` and `block_table`
        have the others, and entries of `block_table` before them are not used. The caches have float32, float16 or
        bfloat16 numbers. All options apply to both, and count positions of the whole sequence.
    query_scale : float, or [Hkv], optional
        Factor of a float8 query, for the layer or for the query heads of each key head; 1 by default. Other queries
        have none. Numbers on the host must be normal float32 above 0 (1.18e-38 or more). Its product with `scale` and
        the numbers of `key_scale` must be finite as a float32. Numbers on CUDA, float32 there, are not checked, here
        and below.
    output_scale : float, or array of one number, optional
        Divisor of an output in float8_e4m3fn, with the limits of `query_scale`; 1 by default. The output is
        ``attention / output_scale``, rounded once to the nearest code, ties to even. Numbers beyond 448 saturate, and
        NaN stays NaN. Without `out`, a new array in float8_e4m3fn is returned.
    out : array, [T, Hq, Dv], optional
        Array for the output; it is returned. Its dtype is that of `query` or float8_e4m3fn; with a float8 query it may
        be any of float32, float16, bfloat16 and float8_e4m3fn, and a new array is bfloat16, or float16 over float16
        caches. It may be `query` itself, in the same dtype; otherwise it must not overlap any input.
    return_lse : bool
        Return ``(out, lse)``. lse is the natural logarithm of the denominator of the softmax, float32 [T, Hq].
    plan : AttentionPlan, optional
        A plan of `plan_attention` for these lengths and options; by default the call makes one. Unless it is
        batch-invariant, the last bits of the output depend on the rest of the batch, on `num_threads` and on the
        processor. On CUDA the number of sequences of the plan is compared with that of the call, its lengths are not;
        during a graph capture neither is, because the graph also runs with plans of later steps. The call before the
        capture needs a plan of its own batch. A capture requires a plan of fixed size (`max_sequences`, `max_tokens`);
        keep it alive as long as the graph is launched. The tensor returned by the operator `plan_attention` of
        `pagecore.interop.torch` is also a plan; its lengths and options are checked under `debug` only.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work; by default the current stream of the framework of `query`.

    Returns
    -------
    array or (array, array)
        New arrays in the framework of `query`, or `out`.

    Raises
    ------
    ShapeError
        Shapes, ranks or strides do not match, or a length exceeds its row of the table or the query.
    InvalidBlock, InvalidSequence
        A block or row that would be read is out of range.
    UnsupportedDtype, UnsupportedOption, DeviceError
        A dtype, option or device is not supported.
    NotEnoughMemory
        The host or the device cannot allocate the result or the workspace. After every error nothing has been written.

    Notes
    -----
    A float8 query is converted to rows of the dtype of `out` before the call, which is exact; if `out` is float8, of
    the dtype of the keys, or bfloat16 over quantised keys. The call allocates these rows, and on the host a float32
    output that is rounded to a float8 `out`. One `query_scale` is multiplied into `scale`, one for each head into
    `key_scale`.

    On the host, large calls run on up to `num_threads` threads. Sums are float32. If query, key and value are bfloat16
    and the instruction set multiplies bfloat16 (x86-64-v4-bf16, x86-64-v4-amx), softmax weights are rounded to bfloat16
    and denormal numbers count as 0. Codes times the scales of their groups count as bfloat16, which holds them exactly;
    float32 scales of tokens multiply the columns of the scores and of the weights. With `sealed`, up to 8 rows of 16
    bits are multiplied with the codes of sealed blocks, 64 tokens at a time; other rows and tokens are unpacked to
    float32.

    On CUDA the call does not wait for the device. Lengths, rows and tables on the host are copied; lengths on the host
    are checked and planned by the host, and rows and blocks are checked if none of these arrays, nor the mask, the
    lists of `blocks` and `indices`, or the table and lengths of `sealed`, is on the device. Contents of device arrays
    are not checked: lengths are cut to what the arrays hold, those of `sealed` to whole blocks, and a block outside the
    cache is read as block 0. Softmax weights are rounded to the dtype of query, key and value if all three are float16
    or all are bfloat16, both head dims are multiples of 8 up to 256, and rows begin at multiples of 16 bytes; also over
    quantised caches and sealed blocks that matrix instructions serve, and over the latter prompts round keys and values
    to that dtype. Prompts with a selection are computed in float32. Head dims are at most 512.

    Paged attention: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    2023. Trees: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
    Inference and Verification", 2024. Sink tokens: Xiao et al., "Efficient Streaming Language Models with Attention
    Sinks", 2023; `sinks` are their form in gpt-oss.
    ALiBi: Press et al., "Train Short, Test Long", 2021. Softcap: Gemma 2.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.ones((4, 16, 2, 64), np.float32)  # 4 blocks of 16 tokens, 2 kv heads
    >>> query = np.ones((1, 8, 64), np.float32)  # one sequence in decode, 8 query heads
    >>> pagecore.paged_attention(query, cache, cache, block_table=[[3, 1]], seq_lens=[20]).shape
    (1, 8, 64)
    """
    cdef Place place
    cdef Tensor q = query_tensor(query)
    find_place(&place, q, "query", query, stream)
    cdef StoredCache keys = stored_cache(key_cache, key_scale, "key", &place)
    cdef StoredCache values = stored_cache(value_cache, value_scale, "value", &place)
    cdef Tensor k = keys.codes, v = values.codes
    check_stored(keys, values)
    if keys.dim != q.shape_[2]:
        refuse_dim(q, keys)
    cdef int64_t num_heads = q.shape_[1], num_kv_heads = k.shape_[2]
    if num_heads % num_kv_heads != 0:
        hint = layout_hint(q.shape_[0] % num_kv_heads == 0) or cache_hint(num_heads % k.shape_[1] == 0)
        raise ShapeError(
            f"query has {num_heads} heads and key_cache {num_kv_heads}; the first must be a multiple of the second"
            f"{hint}"
        )

    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", &place)
    cdef Tensor table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", &place)
    cdef int64_t num_sequences = lens.shape_[0]
    cdef Tensor picked = None
    if rows is None:
        check_length(table, "block_table", 0, num_sequences, "one row for each of seq_lens, or pass rows= to pick some")
    else:
        picked = given_indices(rows, "rows", 1, "[num_sequences]", &place)
        check_length(picked, "rows", 0, num_sequences, "one for each of seq_lens")
    cdef Tensor cu = None
    if cu_query_lens is None:
        if q.shape_[0] != num_sequences:
            check_length(
                q, "query", 0, num_sequences,
                f"one query for each of seq_lens, or pass cu_query_lens={layout_hint(q.shape_[1] == num_sequences)}")
    else:
        cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", &place)
        check_length(cu, "cu_query_lens", 0, num_sequences + 1, "one more than seq_lens")

    cdef double factor = 1.0 / sqrt(<double>q.shape_[2]) if scale is None else finite_number(scale, "scale")
    cdef double cap = read_softcap(softcap)
    cdef int64_t left, right
    read_reach(window, chunk, &left, &right)
    cdef int64_t num_sinks = read_sink_tokens(sink_tokens, chunk, left)
    cdef bint is_causal = read_flag(causal, "causal"), returns_lse = read_flag(return_lse, "return_lse")
    cdef Tensor planned = None
    if plan is not None and not isinstance(plan, AttentionPlan):
        planned = planned_tensor(plan, num_sequences, &place)
    elif plan is not None:
        check_plan_heads(plan, q, num_kv_heads)
    cdef AttentionPlan kept_plan = <AttentionPlan>plan if planned is None else None
    cdef Tensor sink_numbers = None if sinks is None else head_numbers(sinks, "sinks", num_heads, &place)
    cdef Tensor slopes = None
    if alibi_slopes is not None:
        slopes = head_numbers(alibi_slopes, "alibi_slopes", num_heads, &place)
    cdef Tensor bits = None if mask is None else flat_mask(mask, &place)
    cdef TreeMask tree = read_tree(
        tree_mask, positions, mask, blocks is not None or indices is not None, q.shape_[0], &place)
    cdef Selected selected = read_selected(
        blocks, block_counts, indices, index_counts, num_sequences, num_kv_heads, keys.codes.shape_[1], &place)
    if num_sinks > 0:
        check_without_sinks(num_sinks, tree, selected)
    cdef Sealed older = read_sealed(sealed, k, v, num_sequences, table.shape_[0], &place)
    key_factor = given_factor(keys, key_scale, key_global_scale, "key")
    value_factor = given_factor(values, value_scale, value_global_scale, "value")
    cdef Tensor key_scales = checked_scales(key_factor, "key_scale", num_kv_heads, False, &place)
    cdef Tensor value_scales = scale_numbers(value_factor, "value_scale", num_kv_heads, False, &place)
    cdef double out_factor
    cdef Tensor given_out = None if out is None else any_tensor(out, "out")
    cdef int out_code = output_dtype(given_out, output_scale, q, keys, values)
    cdef Tensor query_scales = read_query_scale(query_scale, q, num_kv_heads, &factor, &place)
    cdef Tensor factors = None
    if are_on_host((key_scales, query_scales)):
        factors = score_factors(factor, key_scales, query_scales)
    key_scales = numbers_to_device(key_scales, "key_scale", &place)
    query_scales = numbers_to_device(query_scales, "query_scale", &place)
    cdef Tensor out_scale = read_output_scale(output_scale, &out_factor, &place)

    cdef int64_t shape[3]
    shape[0], shape[1], shape[2] = q.shape_[0], num_heads, values.dim
    cdef Tensor result = float_result(given_out, "out", shape, out_code, query, &place)
    if out is not None:
        check_out(
            result, q, keys, values, table, lens, picked, cu, sink_numbers, slopes, bits, key_scales, value_scales)
        check_apart(result, "out", query_scales, "query_scale")
        check_apart(result, "out", out_scale, "output_scale")
        if selected is not None:
            selected.check_apart_from(result)
        if tree is not None:
            tree.check_apart_from(result)
        if older is not None:
            older.check_apart_from(result)
    cdef Tensor lse = new_result(2, shape, FLOAT32, query, &place) if returns_lse else None
    cdef Selection selection
    if selected is not None and place.device_type == CPU:
        selected.fill(&selection)
    cdef Tensor rows_of_query, unrounded
    cdef int row_code = compute_dtype(q, keys, out_code)
    if place.device_type == CPU:
        rows_of_query = widened(q, row_code, query, &place)
        unrounded = result if out_code <= LAST_FLOAT else new_tensor(3, shape, FLOAT32, False)
        run_attention(
            rows_of_query, keys, values, table, lens, picked, cu, kept_plan, factor, is_causal, left, right, num_sinks,
            cap, sink_numbers, slopes, bits, tree, factors, value_scales, older, unrounded,
            lse, selection,
        )
        if unrounded is not result:
            narrow(unrounded, result, out_factor)
    else:
        await_arrays((query, key_cache, value_cache, block_table, seq_lens, rows, cu_query_lens, sinks, alibi_slopes,
                      mask, tree_mask, positions, blocks, block_counts, indices, index_counts, key_scale, value_scale,
                      sealed, query_scale, output_scale, out, None if planned is None else plan), &place)
        check_given_batch(
            q, k, v, table, lens, picked, cu, is_causal, left, right, num_sinks, bits, tree, selected, older)
        table = to_device(table, "block_table", &place)
        picked = None if picked is None else to_device(picked, "rows", &place)
        bits = None if bits is None else to_device(bits, "mask", &place)
        if tree is not None:
            tree.send(&place)
        checked = debugging()
        if checked:
            debug_attention(q, k, v, table, lens, picked, cu, is_causal, left, right, num_sinks, bits, tree,
                            selected, older, &place)
        if older is not None:
            older.send(k.shape_[1], &place)
        if selected is not None:
            selected.send(lens, table.shape_[1] * keys.codes.shape_[1], &place)
        rows_of_query = widened(q, row_code, query, &place)
        launch_attention(
            rows_of_query, keys, values, table, lens, picked, cu, kept_plan, planned, factor, is_causal, left, right,
            num_sinks, cap, sink_numbers, slopes, bits, tree, key_scales, value_scales, query_scales, out_factor,
            out_scale, selected, older, result, lse, checked, query, &place,
        )
        note_written(result, &place)
    given = finished(result, query, &place) if out is None else out
    return (given, finished(lse, query, &place)) if returns_lse else given
