"""latent_attention: check the arguments, call the kernel."""

from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT32, INT64
from pagecore.arrays.tensors._tensor cimport Tensor, new_tensor
from pagecore.ops.args cimport index_array, lse_array, per_head, table_array, token_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    are_on_host,
    await_arrays,
    check_last_axis,
    check_length,
    check_place,
    check_result,
    find_place,
    finished,
    finite_number,
    float_tensor,
    given_indices,
    head_numbers,
    new_result,
    note_written,
    read_flag,
    read_window,
    to_device,
    to_host,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_apart_or_same
from pagecore.ops.cpu._cpu cimport check_latent, latent_attention as run_attention
from pagecore.ops.cpu.latent.latent cimport LatentArgs
from pagecore.ops.cuda._index_checks cimport check_not_captured
from pagecore.ops.cuda.latent._latent cimport LatentOptions, LatentRows, attend_latent
from pagecore.ops.index_checks._index_checks cimport debugging
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption


def latent_attention(
    query_latent,
    query_rope,
    latent_cache,
    rope_cache,
    block_table=None,
    seq_lens=None,
    *,
    scale=None,
    rows=None,
    cu_query_lens=None,
    causal=True,
    window=None,
    sinks=None,
    indices=None,
    index_lens=None,
    format=None,
    latent_scale=None,
    out=None,
    return_lse=False,
    plan=None,
    stream=None,
):
    """Attend to a cache of latents with absorbed queries, to whole sequences or to listed slots.

    Every head attends to the same rows. The key of a token is its latent and rope numbers, its value the latent, which
    is read once. The score of a query is ``scale * (query_latent . latent + query_rope . rope)``.

    Parameters
    ----------
    query_latent, query_rope : array, [T, H, L] and [T, H, R]
        float32, float16 or bfloat16, both of one dtype. query_latent is the query without rope times the key half of
        the up-projection (``kv_b_proj``) of its head. In layers without a rotary part query_rope is None, or R is 0.
    latent_cache, rope_cache : array
        As for `write_latent`.
    block_table, seq_lens, rows, cu_query_lens, causal, window
        As for `paged_attention`. With `indices` they are not given.
    scale : float
        Factor of the scores: ``qk_head_dim ** -0.5`` of the model before absorption, times mscale squared with YaRN. It
        must be given, because it does not follow from L and R.
    sinks : numbers, [H], optional
        An additional logit in the softmax of each head, without a value; included in lse.
    indices : integers, [T, n], optional
        Slots that each query attends to; negative entries are skipped. A row must not list a slot twice. On CUDA this
        is checked under `debug` only.
    index_lens : integers, [T], optional
        Number of entries of each row of `indices` that count; all by default.
    format : str, optional
        Format of the cache, as for `write_latent`.
    latent_scale : float, optional
        Factor of the codes of "float8_e4m3fn"; 1 by default.
    out : array, [T, H, L], optional
        Array for the output, in the dtype of the queries; it is returned. It may be `query_latent` itself.
    return_lse : bool
        Return ``(out, lse)``. lse is the natural logarithm of the denominator of the softmax, float32 [T, H].
    plan : AttentionPlan, optional
        A plan of `plan_attention` with ``num_kv_heads=1`` for these lengths and options; with `indices` one for
        `index_lens` with ``causal=False``. A batch-invariant plan makes the bits of a row independent of the other
        sequences, of the chunks in which a prompt is computed, and of the number of threads. For CUDA arrays, a plan
        on that device; calls that are captured in a graph need one.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work. By default the current stream of the framework of `query_latent`.

    Returns
    -------
    array or (array, array)
        The output in the latent space, [T, H, L]; the value half of the up-projection turns it into values. A query
        that attends to nothing has output 0, and lse is the sink or -inf.

    Raises
    ------
    InvalidBlock
        A block or slot is outside the cache, or a row lists a slot twice.
    ShapeError, InvalidSequence, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        As for `paged_attention`. After every error nothing has been written.

    Notes
    -----
    Sums are float32. If the queries are bfloat16, the cache is bfloat16 or quantised, and the instruction set
    multiplies bfloat16, softmax weights are rounded to bfloat16. Quantised rows are read as bfloat16, which is exact
    unless a scale of "fp8_ds_mla" is not a power of two.

    On CUDA, matrix instructions serve 512 or 256 latent and 64 rope numbers, if the queries are float16 or bfloat16,
    every row begins at a multiple of 16 bytes, and the cache has the dtype of the queries or is quantised
    ("fp8_ds_mla" with bfloat16 queries only); they round weights to the dtype of the queries. Everything else takes a
    path of float32 multiply-adds, with up to 1,024 latent numbers and 1,280 in a row. Contents of index arrays in CUDA
    memory are checked under `debug` only.

    DeepSeek-AI, "DeepSeek-V2", 2024 (absorption), and "DeepSeek-V3.2", 2025 (sparse attention); FlashMLA, whose sparse
    kernel gives +inf as the lse of a query without keys and leaves sinks out of it.
    """
    cdef Place place
    cdef Tensor q = float_tensor(query_latent, "query_latent", 3, 1, "[num_tokens, num_heads, latent_dim]")
    find_place(&place, q, "query_latent", query_latent, stream)
    cdef Tensor q_rope = rope_part(query_rope, "query_rope", "[num_tokens, num_heads, rope_dim]", q, &place)
    if q_rope.dtype_code != q.dtype_code:
        raise UnsupportedDtype(f"query_latent is {q.dtype} and query_rope {q_rope.dtype}; both must have one dtype")
    check_length(q_rope, "query_rope", 0, q.shape_[0], "the tokens of query_latent")
    check_length(q_rope, "query_rope", 1, q.shape_[1], "the heads of query_latent")
    cdef LatentPlanes planes = latent_planes(
        latent_cache, rope_cache, format, q.shape_[2], q_rope.shape_[2], &place)
    cdef double factor = latent_factor(latent_scale, "latent_scale", planes)
    if scale is None:
        raise UnsupportedOption(
            "scale is missing; give qk_head_dim ** -0.5 of the model, times mscale squared: it does not follow from "
            "the latent")
    cdef int64_t left, right
    read_window(window, &left, &right)
    cdef LatentArgs args
    args.call.causal, args.call.window_left, args.call.window_right = read_flag(causal, "causal"), left, right
    args.call.scale = finite_number(finite_number(scale, "scale") * factor, "scale times latent_scale")
    cdef bint returns_lse = read_flag(return_lse, "return_lse")
    cdef list lists = (
        sequence_lists(&args, q, block_table, seq_lens, rows, cu_query_lens, index_lens, planes, &place)
        if indices is None
        else slot_lists(&args, q, indices, index_lens, (block_table, seq_lens, rows, cu_query_lens, window), &place))
    if plan is not None:
        check_plan(plan, q.shape_[1])
    cdef Tensor sink_numbers = None if sinks is None else head_numbers(sinks, "sinks", q.shape_[1], &place)
    cdef Tensor result = output(out, q, query_latent, &place)
    if out is not None:
        check_apart_or_same(result, "out", q, "query_latent")
        for read, name in ((q_rope, "query_rope"), (planes.latent, "latent_cache"), (planes.rope, "rope_cache"),
                           (sink_numbers, "sinks"), *lists):
            check_apart(result, "out", read, name)
    cdef Tensor lse = new_result(2, q.shape_, 0, query_latent, &place) if returns_lse else None
    if place.device_type != CPU:
        await_arrays((query_latent, query_rope, latent_cache, rope_cache, block_table, seq_lens, rows, cu_query_lens,
                      sinks, indices, index_lens, out), &place)
        attend_on_device(
            args, planes, factor, q, q_rope, lists, plan, sink_numbers, result, lse, query_latent, &place)
        note_written(result, &place)
        given = finished(result, query_latent, &place) if out is None else out
        return (given, finished(lse, query_latent, &place)) if returns_lse else given
    cdef Tensor factors = None
    cdef int64_t one = 1
    if factor != 1.0:
        factors = new_tensor(1, &one, 0, False)
        (<float*>factors.data)[0] = <float>factor
    args.call.query, args.query_rope = token_array(q), token_array(q_rope)
    args.call.key.num_heads = 1
    args.call.key.dim = planes.native.latent_dim + planes.native.rope_dim
    args.call.value = args.call.key
    args.call.value.dim = planes.native.latent_dim
    args.call.value_scale = per_head(factors)
    args.call.sinks = per_head(sink_numbers)
    args.call.out, args.call.lse = token_array(result), lse_array(lse)
    args.cache = planes.native
    run_attention(args, plan)
    given = finished(result, query_latent, &place) if out is None else out
    return (given, finished(lse, query_latent, &place)) if returns_lse else given


cdef int attend_on_device(
        LatentArgs& args, LatentPlanes planes, double factor, Tensor q, Tensor q_rope, list lists, object plan,
        Tensor sinks, Tensor result, Tensor lse, object example, const Place* place) except -1:
    cdef LatentRows cache
    cdef LatentOptions options
    cdef Tensor table = lists[0][0], lens = lists[1][0]
    cdef Tensor picked = None if args.sparse else lists[2][0], cu = None if args.sparse else lists[3][0]
    cdef Tensor listed = lists[2][0] if args.sparse else None
    if debugging():
        check_not_captured(place)
        args.call.query = token_array(q)
        args.cache = planes.native
        held = [to_host(each, place) for each in (table, lens, picked, cu)]
        args.call.table, args.call.seq_lens = table_array(held[0]), index_array(held[1])
        args.call.rows, args.call.cu_query_lens = index_array(held[2]), index_array(held[3])
        check_latent(args)
    elif are_on_host((listed, lens) if args.sparse else (table, lens, picked, cu)):
        args.call.query = token_array(q)
        args.cache = planes.native
        args.call.table, args.call.seq_lens = table_array(listed if args.sparse else table), index_array(lens)
        check_latent(args)
    elif args.sparse and lens.device_type == CPU:
        check_list_lens(lens, table.shape_[1])
    table = to_device(table, "block_table", place)
    picked = None if picked is None else to_device(picked, "rows", place)
    cache.latent, cache.rope = planes.native.latent, planes.native.rope
    cache.block_stride, cache.token_stride = planes.native.block_stride, planes.native.token_stride
    cache.rope_block_stride = planes.native.rope_block_stride
    cache.rope_token_stride = planes.native.rope_token_stride
    cache.type, cache.format = <int>planes.native.type, <int>planes.native.format
    cache.num_blocks, cache.block_size = planes.native.num_blocks, planes.native.block_size
    cache.latent_dim, cache.rope_dim = planes.native.latent_dim, planes.native.rope_dim
    options.scale, options.value_factor = args.call.scale, factor
    options.causal, options.sparse = args.call.causal, args.sparse
    options.window_left, options.window_right = args.call.window_left, args.call.window_right
    return attend_latent(
        q, q_rope, cache, options, table, lens, picked, cu, plan, sinks, result, lse, example, place)


cdef int check_list_lens(Tensor lens, int64_t width) except -1:
    cdef int64_t i, length
    for i in range(lens.shape_[0]):
        at = lens.data + i * lens.strides_[0]
        length = (<int64_t*>at)[0] if lens.dtype_code == INT64 else (<int32_t*>at)[0]
        if not 0 <= length <= width:
            raise ShapeError(
                f"index_lens[{i}] is {length}; a row of indices has {width} entries: expected 0 to {width}")
    return 0


cdef list sequence_lists(
        LatentArgs* args, Tensor q, object block_table, object seq_lens, object rows, object cu_query_lens,
        object index_lens, LatentPlanes planes, const Place* place):
    """Fill the lists of a call on sequences; return the arrays that it reads, with their names."""
    if index_lens is not None:
        raise UnsupportedOption("index_lens is given without indices; leave it out")
    if block_table is None or seq_lens is None:
        missing = "block_table" if block_table is None else "seq_lens"
        raise UnsupportedOption(f"{missing} is None; give block_table and seq_lens, or indices")
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", place)
    cdef Tensor table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", place)
    cdef Tensor picked = None, cu = None
    if rows is None:
        check_length(
            table, "block_table", 0, lens.shape_[0], "one row for each of seq_lens, or pass rows= to pick some")
    else:
        picked = given_indices(rows, "rows", 1, "[num_sequences]", place)
        check_length(picked, "rows", 0, lens.shape_[0], "one for each of seq_lens")
    if cu_query_lens is None:
        check_length(
            q, "query_latent", 0, lens.shape_[0], "one query for each of seq_lens, or pass cu_query_lens=")
    else:
        cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", place)
        check_length(cu, "cu_query_lens", 0, lens.shape_[0] + 1, "one more than seq_lens")
    args.call.table = table_array(table)
    args.call.seq_lens, args.call.rows = index_array(lens), index_array(picked)
    args.call.cu_query_lens = index_array(cu)
    args.call.key.num_blocks, args.call.key.block_size = planes.native.num_blocks, planes.native.block_size
    args.call.value = args.call.key
    return [(table, "block_table"), (lens, "seq_lens"), (picked, "rows"), (cu, "cu_query_lens")]


cdef list slot_lists(
        LatentArgs* args, Tensor q, object indices, object index_lens, tuple others, const Place* place):
    """Fill the lists of a call on slots: each query is a sequence, and its slots are blocks of one token.

    The result also has `indices` as the caller gave them, on the host or on the device.
    """
    for other, name in zip(others, ("block_table", "seq_lens", "rows", "cu_query_lens", "window"), strict=True):
        if other is not None:
            raise UnsupportedOption(f"{name} is given with indices, which name the slots themselves; leave {name} out")
    cdef Tensor listed = given_indices(indices, "indices", 2, "[num_tokens, n]", place)
    cdef Tensor slots = to_device(listed, "indices", place)
    check_length(slots, "indices", 0, q.shape_[0], "one row for each query")
    cdef Tensor lens
    cdef int64_t i
    if index_lens is None:
        lens = new_tensor(1, q.shape_, INT32, False)
        for i in range(q.shape_[0]):
            (<int32_t*>lens.data)[i] = <int32_t>slots.shape_[1]
    else:
        lens = given_indices(index_lens, "index_lens", 1, "[num_tokens]", place)
        check_length(lens, "index_lens", 0, q.shape_[0], "one for each query")
    args.sparse = True
    args.call.causal = False
    args.call.table = table_array(slots)
    args.call.seq_lens = index_array(lens)
    args.call.key.block_size = 1
    return [(slots, "indices"), (lens, "index_lens"), (listed, "indices")]


cdef int check_plan(object plan, int64_t num_heads) except -1:
    if not isinstance(plan, AttentionPlan):
        raise UnsupportedOption(f"plan is a {type(plan).__name__}; it must be a plan from plan_attention, or None")
    cdef int64_t planned = (<AttentionPlan>plan).plan.options.num_query_heads
    cdef int64_t planned_kv = (<AttentionPlan>plan).plan.options.num_kv_heads
    if planned != num_heads or planned_kv != 1:
        raise ShapeError(
            f"query_latent has {num_heads} heads and the plan is for {planned} query heads and {planned_kv} key-value "
            f"heads; make a plan for num_query_heads={num_heads} and num_kv_heads=1"
        )
    return 0


cdef Tensor output(object out, Tensor query, object example, const Place* place):
    if out is None:
        return new_result(3, query.shape_, query.dtype_code, example, place)
    cdef Tensor result = any_tensor(out, "out")
    check_place(result, "out", place)
    check_result(result, "out", 3, query.shape_, query.dtype_code)
    check_last_axis(result, "out")
    return result
