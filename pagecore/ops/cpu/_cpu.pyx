"""The host kernels, bound: Tensors to addresses and strides, errors to exceptions, the GIL released around the work."""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._plan cimport AttentionPlan
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.cpu.args cimport (
    AttentionArgs,
    BlockArray,
    Cache,
    Float,
    HostCalls,
    Indices,
    Lse,
    MergeArgs,
    PackedSequences,
    PerHead,
    PlanView,
    Rows,
    Table,
    WriteArgs,
    choose_isa,
    current_isa,
    list_isas,
    native_calls,
    run_attention,
    run_check_attention,
    run_check_copied,
    run_check_independent,
    run_check_sequences,
    run_check_slots,
    run_check_transferred,
    run_copy,
    run_gather,
    run_merge,
    run_scatter,
    run_transfer,
    run_write,
    sum_lengths,
)

from pagecore.arrays.refusals import brief
from pagecore.errors import UnsupportedDtype, UnsupportedOption

cdef enum:
    INT64 = 8  # in the dtype table, whose first three are those of Float


cdef int fill_rows(Rows* rows, Tensor tensor) except -1:
    rows.data = tensor.data
    rows.type = float_type(tensor)
    rows.num_tokens, rows.num_heads, rows.dim = tensor.shape_[0], tensor.shape_[1], tensor.shape_[2]
    rows.token_stride, rows.head_stride = tensor.strides_[0], tensor.strides_[1]
    return 0


cdef int fill_cache(Cache* cache, Tensor tensor) except -1:
    cache.data = tensor.data
    cache.type = float_type(tensor)
    cache.num_blocks, cache.block_size = tensor.shape_[0], tensor.shape_[1]
    cache.num_heads, cache.dim = tensor.shape_[2], tensor.shape_[3]
    cache.block_stride, cache.token_stride = tensor.strides_[0], tensor.strides_[1]
    cache.head_stride = tensor.strides_[2]
    return 0


cdef Float float_type(Tensor tensor) except *:
    if not 0 <= tensor.dtype_code <= 2:
        raise UnsupportedDtype(f"{tensor.dtype} where the host kernels serve float32, float16 and bfloat16")
    return <Float>tensor.dtype_code


cdef void fill_indices(Indices* indices, Tensor tensor) noexcept:
    if tensor is None:
        return
    indices.data = tensor.data
    indices.size = tensor.shape_[0]
    indices.stride = tensor.strides_[0]
    indices.wide = tensor.dtype_code == INT64


cdef void fill_table(Table* table, Tensor tensor) noexcept:
    table.data = tensor.data
    table.num_rows, table.width = tensor.shape_[0], tensor.shape_[1]
    table.row_stride = tensor.strides_[0]
    table.wide = tensor.dtype_code == INT64


cdef void add_array(vector[BlockArray]& arrays, Tensor tensor):
    cdef BlockArray array
    cdef int i
    array.data, array.dtype = tensor.data, tensor.dtype_code
    array.num_blocks, array.block_stride = tensor.shape_[0], tensor.strides_[0]
    array.itemsize, array.ndim = tensor.itemsize, tensor.ndim - 1
    for i in range(array.ndim):
        array.shape[i], array.strides[i] = tensor.shape_[i + 1], tensor.strides_[i + 1]
    arrays.push_back(array)


cdef int add_arrays(vector[BlockArray]& arrays, list tensors) except -1:
    for tensor in tensors:
        add_array(arrays, tensor)
    return 0


cdef int fill_per_head(PerHead* values, Tensor tensor) except -1:
    if tensor is None:
        return 0
    values.data = tensor.data
    values.type = float_type(tensor)
    values.stride = tensor.strides_[0]
    return 0


cdef void fill_lse(Lse* lse, Tensor tensor) noexcept:
    if tensor is None:
        return
    lse.data = tensor.data
    lse.num_tokens = tensor.shape_[0]
    lse.token_stride, lse.head_stride = tensor.strides_[0], tensor.strides_[1]


cdef void fill_plan(PlanView* view, AttentionPlan plan) noexcept:
    view.items = plan.plan.items()
    view.num_items = plan.plan.counts().num_items
    view.num_partial_rows = plan.plan.counts().num_partial_rows
    view.cu_query_lens = plan.plan.cu_query_lens()
    view.seq_lens = plan.plan.seq_lens()
    view.num_sequences = plan.plan.num_sequences()
    view.num_query_heads = plan.plan.options.num_query_heads
    view.num_kv_heads = plan.plan.options.num_kv_heads
    view.causal = plan.plan.options.causal
    view.window_left = plan.plan.options.window_left
    view.window_right = plan.plan.options.window_right
    view.batch_invariant = plan.plan.options.batch_invariant


cdef int attention(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left, int64_t window_right,
        double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask, Tensor key_scale, Tensor value_scale,
        Tensor out, Tensor lse) except -1:
    """Paged attention over checked Tensors; see _cpu.pxd."""
    cdef AttentionArgs args
    cdef PlanView view
    cdef PlanView* planned = NULL
    cdef int64_t num_threads = threads_of_a_call()
    fill_rows(&args.query, query)
    fill_cache(&args.key, key_cache)
    fill_cache(&args.value, value_cache)
    fill_table(&args.table, block_table)
    fill_indices(&args.seq_lens, seq_lens)
    fill_indices(&args.rows, rows)
    fill_indices(&args.cu_query_lens, cu_query_lens)
    args.scale, args.softcap = scale, softcap
    args.causal, args.window_left, args.window_right = causal, window_left, window_right
    fill_per_head(&args.sinks, sinks)
    fill_per_head(&args.alibi_slopes, alibi_slopes)
    fill_per_head(&args.key_scale, key_scale)
    fill_per_head(&args.value_scale, value_scale)
    fill_mask(&args, mask)
    fill_rows(&args.out, out)
    fill_lse(&args.lse, lse)
    if plan is None:
        with nogil:
            run_attention(args, planned, num_threads)
        return 0
    fill_plan(&view, plan)
    planned = &view
    plan.num_readers += 1
    try:
        with nogil:
            run_attention(args, planned, num_threads)
    finally:
        plan.num_readers -= 1
    return 0


cdef int write_kv(
        Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key_scale,
        Tensor value_scale) except -1:
    """Slot-mapped write of checked Tensors; see _cpu.pxd."""
    cdef WriteArgs args
    fill_rows(&args.key, key)
    fill_rows(&args.value, value)
    fill_cache(&args.key_cache, key_cache)
    fill_cache(&args.value_cache, value_cache)
    fill_indices(&args.slots, slot_mapping)
    fill_per_head(&args.key_scale, key_scale)
    fill_per_head(&args.value_scale, value_scale)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_write(args, num_threads)
    return 0


cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1:
    """Slots on the host; see _cpu.pxd."""
    cdef Indices slots
    cdef Cache cache
    fill_indices(&slots, slot_mapping)
    fill_cache(&cache, key_cache)
    run_check_slots(slots, key.shape_[0], cache)
    return 0


cdef int check_attended(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, Tensor mask) except -1:
    """Tables, lengths, rows and masks on the host; see _cpu.pxd."""
    cdef AttentionArgs args
    fill_rows(&args.query, query)
    fill_cache(&args.key, key_cache)
    fill_cache(&args.value, value_cache)
    fill_table(&args.table, block_table)
    fill_indices(&args.seq_lens, seq_lens)
    fill_indices(&args.rows, rows)
    fill_indices(&args.cu_query_lens, cu_query_lens)
    fill_mask(&args, mask)
    args.causal, args.window_left, args.window_right = causal, window_left, window_right
    run_check_attention(args)
    return 0


cdef void fill_mask(AttentionArgs* args, Tensor mask) noexcept:
    if mask is None:
        return
    args.mask = <const uint8_t*>mask.data
    args.mask_size = mask.shape_[0]


cdef int check_copied(list caches, Tensor pairs) except -1:
    """Pairs on the host; see _cpu.pxd."""
    cdef vector[BlockArray] arrays
    cdef Indices sources, targets
    add_arrays(arrays, caches)
    fill_pairs(&sources, &targets, pairs)
    run_check_copied(arrays, sources, targets)
    return 0


cdef int check_sequences(
        list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1:
    """Tables, lengths and rows on the host; see _cpu.pxd."""
    cdef PackedSequences batch
    if caches:
        fill_sequences(&batch, caches, num_tokens, block_table, seq_lens, rows)
        run_check_sequences(batch)
    return 0


cdef int check_transferred(list sources, list targets, Tensor pairs) except -1:
    """Pairs on the host; see _cpu.pxd."""
    cdef vector[BlockArray] from_arrays, to_arrays
    cdef Indices source_ids, target_ids
    add_arrays(from_arrays, sources)
    add_arrays(to_arrays, targets)
    fill_pairs(&source_ids, &target_ids, pairs)
    run_check_transferred(from_arrays, to_arrays, source_ids, target_ids)
    return 0


cdef int check_independent(Tensor pairs, bint one_cache) except -1:
    """Pairs on the host; see _cpu.pxd."""
    cdef Indices sources, targets
    fill_pairs(&sources, &targets, pairs)
    run_check_independent(sources, targets, one_cache)
    return 0


cdef void fill_pairs(Indices* sources, Indices* targets, Tensor pairs) noexcept:
    """The two columns."""
    fill_indices(sources, pairs)
    targets[0] = sources[0]
    targets.data += pairs.strides_[1]


cdef int copy_blocks(list caches, Tensor pairs) except -1:
    """Block copies in caches of any dtype; see _cpu.pxd."""
    cdef vector[BlockArray] arrays
    cdef Indices sources, targets
    add_arrays(arrays, caches)
    fill_pairs(&sources, &targets, pairs)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_copy(arrays, sources, targets, num_threads)
    return 0


cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1:
    """Tokens of all sequences; see _cpu.pxd."""
    cdef Indices lens
    fill_indices(&lens, seq_lens)
    return sum_lengths(lens, width, block_size)


cdef int fill_sequences(
        PackedSequences* batch, list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens,
        Tensor rows) except -1:
    cdef Tensor cache
    fill_table(&batch.table, block_table)
    fill_indices(&batch.seq_lens, seq_lens)
    fill_indices(&batch.rows, rows)
    batch.num_blocks = INT64_MAX
    for cache in caches:
        batch.block_size = cache.shape_[1]
        batch.num_blocks = min(batch.num_blocks, cache.shape_[0])
    batch.num_tokens = num_tokens
    return 0


cdef int gather_blocks(list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows) except -1:
    """Sequences out of blocks; see _cpu.pxd."""
    if not caches:
        return 0
    cdef PackedSequences batch
    cdef vector[BlockArray] blocks, tokens
    fill_sequences(&batch, caches, (<Tensor>packed[0]).shape_[0], block_table, seq_lens, rows)
    add_arrays(blocks, caches)
    add_arrays(tokens, packed)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_gather(blocks, tokens, batch, num_threads)
    return 0


cdef int scatter_blocks(list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows) except -1:
    """Sequences into blocks; see _cpu.pxd."""
    if not caches:
        return 0
    cdef PackedSequences batch
    cdef vector[BlockArray] blocks, tokens
    fill_sequences(&batch, caches, (<Tensor>packed[0]).shape_[0], block_table, seq_lens, rows)
    add_arrays(blocks, caches)
    add_arrays(tokens, packed)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_scatter(tokens, blocks, batch, num_threads)
    return 0


cdef int transfer_blocks(list sources, list targets, Tensor pairs) except -1:
    """Blocks of caches into others; see _cpu.pxd."""
    cdef vector[BlockArray] from_arrays, to_arrays
    cdef Indices source_ids, target_ids
    add_arrays(from_arrays, sources)
    add_arrays(to_arrays, targets)
    fill_pairs(&source_ids, &target_ids, pairs)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_transfer(from_arrays, to_arrays, source_ids, target_ids, num_threads)
    return 0


cdef int merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse) except -1:
    """Join two parts of attention; see _cpu.pxd."""
    cdef MergeArgs args
    fill_rows(&args.out_a, out_a)
    fill_rows(&args.out_b, out_b)
    fill_rows(&args.out, out)
    fill_lse(&args.lse_a, lse_a)
    fill_lse(&args.lse_b, lse_b)
    fill_lse(&args.lse, lse)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_merge(args, num_threads)
    return 0


cdef const HostCalls* host_calls() noexcept:
    """The operations as native functions; see _cpu.pxd."""
    return &native_calls()


cpdef str isa():
    """The instruction set that the host kernels use: one of `available_isas`."""
    return current_isa().decode()


cpdef str set_isa(object name):
    """Choose the instruction set of the host kernels, and return it.

    Parameters
    ----------
    name : str or None
        One of `available_isas`; None is what the environment variable PAGECORE_ISA says, else the widest.

    Raises
    ------
    UnsupportedOption
        A name that this machine or build has not; nothing has changed.
    """
    if name is not None and (not isinstance(name, str) or not name or not name.isascii()):
        raise UnsupportedOption(
            f"instruction set {brief(name)} is unknown; this machine has {', '.join(available_isas())}"
        )
    choose_isa(b"" if name is None else (<str>name).encode())
    return isa()


cpdef tuple available_isas():
    """Names of the instruction sets that this machine and build have, the widest first."""
    return tuple([name.decode() for name in list_isas()])
