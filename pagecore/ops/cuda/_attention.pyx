"""Paged attention on CUDA: the plan, the parameter struct and the launches of a call."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU, CUDA, INT64, UINT8
from pagecore.ops._formats cimport StoredCache, is_plain, native_cache
from pagecore.ops._numbers cimport chunk_of, scale_stride
from pagecore.ops._place cimport Place, new_at, new_result, to_device
from pagecore.ops._plan cimport AttentionPlan, copy_lens
from pagecore.ops._selected cimport Selected
from pagecore.ops._tree cimport TreeMask
from pagecore.ops.args cimport Cache, index_array, table_array, token_array
from pagecore.ops.cuda._device_plan cimport (
    check_planned,
    launch_plan,
    options_of,
    planned_counters,
    planned_layout,
)
from pagecore.ops.cuda._plan cimport (
    PC_DECODE,
    PC_NUM_SECTIONS,
    PC_PROMPTS,
    CudaPlan,
    CudaPlanner,
    PcPlanHead,
    layout_for,
    place_workspace,
    planned_bytes,
)
from pagecore.ops.cuda._shapes cimport KernelQuery, select_kernel
from pagecore.ops.cuda.abi_attention cimport (
    PC_PLAIN,
    PcAttentionParams,
    PcFloat,
    PcLaunchShape,
    PcStoredAttentionParams,
    device_cache,
    device_indices,
    device_stored,
    device_table,
    device_tokens,
    kFoldTokens,
    kMaxGeneralDim,
)
from pagecore.ops.plan cimport PlanBatch, PlanOptions, check_plan_batch

from pagecore.arrays.cuda import runtime
from pagecore.arrays import results
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.ops.cuda.kernels import kernel

cdef extern from "pagecore/native/rounding.hpp" namespace "pagecore" nogil:
    int64_t ceil_div(int64_t n, int64_t by)

cdef enum:
    UNKNOWN = -1

cdef CudaPlanner _planner  # for calls without a plan; guarded by the GIL


cdef int attention(
        Tensor query, StoredCache keys, StoredCache values, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, AttentionPlan plan, Tensor planned, double scale, bint causal, int64_t window_left,
        int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
        TreeMask tree, Tensor key_scale, Tensor value_scale, Selected selected, Tensor out, Tensor lse,
        bint checks_plan, object example, const Place* place) except -1:
    cdef PcAttentionParams p
    cdef PcStoredAttentionParams stored
    cdef Work work
    if query.shape_[0] == 0:
        return 0
    memset(&p, 0, sizeof(p))
    p.query, p.out = device_tokens(token_array(query)), device_tokens(token_array(out))
    fill_caches(&p, &stored, native_cache(keys), native_cache(values), is_plain(keys) and is_plain(values))
    p.table = device_table(table_array(block_table))
    p.rows = device_indices(index_array(rows))
    fill_shape(&p, query, keys, values, seq_lens)
    p.causal, p.window_left, p.window_right = causal, <int32_t>window_left, <int32_t>window_right
    p.scale, p.softcap, p.sink_tokens = <float>scale, <float>softcap, <int32_t>sink_tokens
    p.sinks, p.alibi_slopes = address_of(sinks), address_of(alibi_slopes)
    p.key_scale, p.value_scale = address_of(key_scale), address_of(value_scale)
    p.key_scale_stride, p.value_scale_stride = scale_stride(key_scale), scale_stride(value_scale)
    if mask is not None:
        p.mask, p.mask_size = address_of(mask), mask.shape_[0]
    if tree is not None:
        fill_tree(&p, tree)
    if lse is not None:
        p.lse = address_of(lse)
        p.lse_token_stride, p.lse_head_stride = lse.strides_[0] // 4, lse.strides_[1] // 4

    memset(&work, 0, sizeof(work))
    if selected is not None:
        # Items count selected keys, so a plan of positions does not serve; its options do.
        fill_selection(&p, selected)
        work.batch_invariant = plan is not None and plan.plan.options.batch_invariant
        plan = None
        planned = None
    # `kept` owns the memory that the call allocates; the allocator reuses it in the order of the stream.
    kept = schedule(&p, &work, seq_lens, cu_query_lens, plan, planned, checks_plan, example, place)
    if selected is not None and mask is not None:
        kept.append(place_mask(&p, example, place))
    cdef bint plain_scales = (row_bits(keys.plane) | row_bits(values.plane)) % 4 == 0
    return launch_all(p, stored, work, place, is_plain_memory(query, keys, values, out), plain_scales)


cdef list schedule(
        PcAttentionParams* params, Work* work, Tensor seq_lens, Tensor cu_query_lens, AttentionPlan plan,
        Tensor planned, bint checks_plan, object example, const Place* place):
    # Lengths on the host are read once: another thread may change them, and the checked lengths must be planned.
    cdef vector[int32_t] lengths, offsets
    cdef PcAttentionParams p = params[0]
    kept = []
    if plan is not None:
        check_plan(plan, p, place)
        take_plan(plan.cuda, p, work, place)
    cdef Tensor buffer = planned
    if planned is not None:
        work.layout = planned_layout(planned, p, place)
        work.buffer = address_of(planned)
        work.num_items[PC_DECODE] = work.num_items[PC_PROMPTS] = UNKNOWN
    cdef bint on_host = seq_lens.device_type == CPU and (cu_query_lens is None or cu_query_lens.device_type == CPU)
    if on_host:
        copy_lens(seq_lens, "seq_lens", lengths)
        if cu_query_lens is not None:
            copy_lens(cu_query_lens, "cu_query_lens", offsets)
        check_lengths(lengths, offsets, p)
    if plan is None and planned is None and on_host:
        buffer = plan_on_host(lengths, offsets, p, work, place)
    cdef Tensor lens = seq_lens if seq_lens.device_type == CUDA else to_device(seq_lens, "seq_lens", place)
    cdef Tensor cu = cu_query_lens
    if cu is not None and cu.device_type == CPU:
        cu = to_device(cu, "cu_query_lens", place)
    p.seq_lens, p.cu_query_lens = device_indices(index_array(lens)), device_indices(index_array(cu))
    if planned is not None and checks_plan:
        check_planned(planned, p, place)
    if plan is None:
        if buffer is None or planned is not None:
            check_lasting(example, place)
        if buffer is None:
            buffer = plan_by_kernel(p, work, example, place)
        kept = [buffer, allocate_workspace(p, work, planned_counters(planned, work.layout), example, place)]
    p.mask_starts = work.buffer + work.layout.mask_starts
    p.partial_out, p.partial_lse = work.workspace.partial_out, work.workspace.partial_lse
    p.counters, p.num_partial_rows = work.workspace.counters, work.layout.num_partial_rows
    p.fold_tokens = kFoldTokens if work.layout.batch_invariant else 0
    p.schedule.items = work.buffer + work.layout.items
    params[0] = p
    return [lens, cu, *kept]


# ---- parameters

cdef uint64_t address_of(Tensor tensor) noexcept:
    return 0 if tensor is None else <uintptr_t>tensor.data


cdef int fill_shape(PcAttentionParams* p, Tensor query, StoredCache keys, StoredCache values, Tensor lens) except -1:
    cdef Tensor key_cache = keys.codes
    cdef int64_t block_size = key_cache.shape_[1]
    cdef int64_t dim = max(query.shape_[2], values.dim)
    cdef int shift = 0
    if dim > kMaxGeneralDim:
        raise UnsupportedOption(f"head_dim is {dim}; on CUDA it is at most {kMaxGeneralDim}, for keys and for values")
    if max(query.shape_[0], lens.shape_[0], block_size) >= INT32_MAX:
        raise ShapeError(
            f"query has shape {query.shape} and key_cache {key_cache.shape}; on CUDA counts are below 2^31: split the "
            "batch")
    p.num_tokens, p.num_sequences = <int32_t>query.shape_[0], <int32_t>lens.shape_[0]
    p.num_query_heads, p.num_kv_heads = <int32_t>query.shape_[1], <int32_t>key_cache.shape_[2]
    p.head_dim, p.value_dim = <int32_t>query.shape_[2], <int32_t>values.dim
    p.num_blocks = <int32_t>min(key_cache.shape_[0], INT32_MAX)
    p.block_size = <int32_t>block_size
    while (1 << shift) < block_size:
        shift += 1
    p.block_shift = shift if (1 << shift) == block_size else -1
    p.query_type = <PcFloat>query.dtype_code
    return 0


cdef int fill_tree(PcAttentionParams* p, TreeMask tree) except -1:
    if p.alibi_slopes != 0:
        raise UnsupportedOption(
            "tree_mask and alibi_slopes are both given, which only the host serves; use one of them on CUDA"
        )
    if tree.words >= INT32_MAX // 64:
        raise ShapeError(f"tree_mask has {tree.words} words for each token; use fewer than {INT32_MAX // 64}")
    p.mask, p.mask_size = address_of(tree.bits), 64 * tree.words * tree.bits.shape_[0]
    p.tree.positions = device_indices(index_array(tree.positions))
    p.tree.words = <int32_t>tree.words
    return 0


cdef int fill_caches(
        PcAttentionParams* p, PcStoredAttentionParams* stored, const Cache& keys, const Cache& values,
        bint plain) except -1:
    """Fill the caches of `p` if both are without a format, else those of `stored`."""
    memset(stored, 0, sizeof(stored[0]))
    if plain:
        p.key, p.value = device_cache(keys), device_cache(values)
        p.key_type, p.value_type = <PcFloat><int>keys.type, <PcFloat><int>values.type
        return 0
    stored.key, stored.value = device_stored(keys), device_stored(values)
    return 0


# ---- plans

cdef int check_plan(AttentionPlan plan, const PcAttentionParams& p, const Place* place) except -1:
    """Check the causality, window, capacity and number of sequences of a plan.

    Lengths are not compared, because they may be known on the device only. In a capture the number of sequences is not
    compared either, because the graph also runs with plans of later steps.
    """
    cdef CudaPlan own = plan.cuda
    if own is None or own.device != place.device_id:
        raise DeviceError(
            f"plan is on {plan.device} and query on cuda:{place.device_id}; plan with device='cuda:{place.device_id}'"
        )
    cdef const PlanOptions* options = &plan.plan.options
    if options.causal != p.causal or options.window_left != p.window_left or (
            options.window_right != p.window_right or options.sink_tokens != p.sink_tokens):
        raise ShapeError(
            f"plan has causal={plan.causal} and {reach_of(options[0])}, the call causal={bool(p.causal)} and "
            f"{reach_of(options_of(p))}; make one for these"
        )
    if p.tree.words != 0 and p.window_left != -1 and not plan.plan.options.tree:
        raise ShapeError(
            f"the call has a tree_mask and window {(p.window_left, p.window_right)}, and the plan was made without "
            "tree; call plan_attention with tree=True"
        )
    cdef bint fits = own.address != 0
    if own.is_fixed:
        fits = p.num_sequences <= own.layout.max_sequences and p.num_tokens <= own.layout.max_tokens
    if fits and p.num_sequences != own.head.num_sequences:
        fits = own.is_fixed and runtime().is_capturing(place.stream)
    if not fits:
        raise ShapeError(
            f"the call has {p.num_sequences} sequences and {p.num_tokens} queries; plan is of {own.num_sequences} "
            f"sequences and has room for {own.max_sequences} and {own.max_tokens}; plan this batch first "
            "(plan_attention(..., out=plan))"
        )
    return 0


cdef str reach_of(const PlanOptions& options):
    """Describe the window, chunk and sink tokens of a plan or a call."""
    chunk = chunk_of(options.window_left)
    reach = f"window {(options.window_left, options.window_right)}" if chunk is None else f"chunk {chunk}"
    return f"{reach} with {options.sink_tokens} sink tokens" if options.sink_tokens > 0 else reach


cdef int take_plan(CudaPlan plan, const PcAttentionParams& p, Work* work, const Place* place) except -1:
    cdef bint capturing = runtime().is_capturing(place.stream)
    if capturing and not plan.is_fixed:
        raise DeviceError(
            f"plan has no fixed size and stream {place.stream:#x} is being captured; a later batch may replace the "
            "memory that the graph reads: capture with an AttentionPlan made with "
            f"max_sequences={p.num_sequences}, max_tokens={p.num_tokens} or more"
        )
    plan.reserve_workspace(p.value_dim, place.stream)
    work.layout = plan.layout
    work.buffer = plan.address
    work.workspace = plan.workspace
    work.has_plan = True
    # The graph of a capture runs other plans later.
    cdef int section
    for section in range(PC_NUM_SECTIONS):
        work.num_items[section] = UNKNOWN if capturing else plan.head.num_items[section]
    return 0


cdef PlanBatch batch_of(vector[int32_t]& lens, vector[int32_t]& cu) noexcept:
    """Return the batch of lengths and offsets; `cu` is empty if every sequence has one query."""
    cdef PlanBatch batch
    batch.seq_lens, batch.num_sequences = lens.data(), <int64_t>lens.size()
    batch.cu_query_lens = NULL
    if not cu.empty():
        batch.cu_query_lens = cu.data()
    return batch


cdef int check_lengths(
        vector[int32_t]& lens, vector[int32_t]& cu, const PcAttentionParams& p) except -1:
    """Check lengths on the host with the errors of a call on the host."""
    cdef int64_t i, queries, num_blocks, block_size = p.block_size, mask_size = 0
    check_plan_batch(batch_of(lens, cu))
    if not cu.empty() and cu.back() > p.num_tokens:
        raise ShapeError(
            f"cu_query_lens[{cu.size() - 1}] is {cu.back()} and query has {p.num_tokens} rows; every query must have "
            "its row, and query is [num_tokens, num_query_heads, head_dim]"
        )
    for i in range(p.num_sequences):
        num_blocks = ceil_div(<int64_t>lens[i], block_size)
        if num_blocks > p.table.width:
            raise ShapeError(
                f"seq_lens[{i}] is {lens[i]}, which is more than {p.table.width} blocks of {block_size} hold; the "
                "block table is too narrow"
            )
        queries = 1 if cu.empty() else cu[i + 1] - cu[i]
        mask_size += <int64_t>lens[i] * queries
        if p.tree.words != 0:
            check_tree_lengths(i, queries, lens[i], p.tree.words)
    if p.mask != 0 and p.tree.words == 0 and mask_size != p.mask_size:
        raise ShapeError(
            f"mask has {p.mask_size} entries and the batch needs {mask_size}; it holds [query_len, seq_len] of every "
            "sequence"
        )
    return 0


cdef int check_tree_lengths(int64_t sequence, int64_t queries, int64_t length, int64_t words) except -1:
    if queries > 64 * words:
        raise ShapeError(
            f"sequence {sequence} has {queries} new tokens and tree_mask {words} words of 64 bits for each token; give "
            f"it {ceil_div(queries, 64)}"
        )
    if queries > length:
        raise ShapeError(
            f"sequence {sequence} has {queries} new tokens and seq_lens[{sequence}] is {length}; with a tree_mask the "
            "length includes the new tokens"
        )
    return 0


cdef Tensor plan_on_host(
        vector[int32_t]& lens, vector[int32_t]& cu, const PcAttentionParams& p, Work* work,
        const Place* place):
    """Plan checked lengths on the host, and copy the plan to the device."""
    cdef PlanOptions options = planned_options(p, work)
    cdef vector[int32_t] keys
    cdef int i
    cdef PlanBatch batch = batch_of(lens, cu)
    if p.selection.entries != 0:
        keys = lens
        for i in range(p.num_sequences):
            keys[i] = <int32_t>min(<int64_t>keys[i], <int64_t>p.selection.width * p.selection.unit)
        batch.seq_lens = keys.data()
    cdef Place host
    cdef int section
    cdef int64_t num_bytes
    work.layout = layout_for(options, 0, p.num_sequences, p.num_tokens, place.device_id)
    host.device_type = CPU
    num_bytes = planned_bytes(work.layout)
    cdef Tensor planned = new_at(1, &num_bytes, UINT8, &host)
    planned.shape_[0] = _planner.plan_into(work.layout, options, batch, planned.data)
    cdef PcPlanHead* head = <PcPlanHead*>planned.data
    cdef Tensor there = to_device(planned, "seq_lens", place)
    work.buffer = address_of(there)
    # The workspace needs the partial rows of this batch only.
    work.layout.num_partial_rows = max(head.num_partial_rows[PC_DECODE], head.num_partial_rows[PC_PROMPTS])
    for section in range(PC_NUM_SECTIONS):
        work.num_items[section] = head.num_items[section]
    return there


cdef int check_lasting(object example, const Place* place) except -1:
    """Raise DeviceError for a capture whose graph would outlive the memory of the call."""
    if runtime().is_capturing(place.stream) and not results.lasts_for_graphs(example):
        raise DeviceError(
            f"stream {place.stream:#x} is being captured, and a call without a plan, with one in an array or with a "
            "selection frees its workspace when it returns, before the graph runs: pass a plan of type AttentionPlan, "
            "or for a selection capture the call with torch tensors"
        )
    return 0


cdef Tensor plan_by_kernel(const PcAttentionParams& p, Work* work, object example, const Place* place):
    """Plan lengths that are known on the device only, by a kernel."""
    cdef PcAttentionParams of_keys = p
    work.layout = layout_for(planned_options(p, work), 0, p.num_sequences, p.num_tokens, place.device_id)
    cdef int64_t num_bytes = work.layout.num_bytes
    if p.selection.entries != 0:
        # The kernel clamps lengths to the row of a table; here a row has the keys that a list can cover.
        of_keys.table.width, of_keys.block_size = p.selection.width, p.selection.unit
        of_keys.block_shift = p.selection.unit_shift
        of_keys.causal, of_keys.window_left, of_keys.window_right = 0, UNKNOWN, UNKNOWN
    cdef Tensor buffer = new_result(1, &num_bytes, UINT8, example, place)
    work.buffer = address_of(buffer)
    work.num_items[PC_DECODE] = work.num_items[PC_PROMPTS] = UNKNOWN
    launch_plan(of_keys, work.layout, work.buffer, place.stream, place.device_id)
    return buffer


cdef PlanOptions planned_options(const PcAttentionParams& p, const Work* work) noexcept:
    """Return the options of the plan that a call makes. Selected keys of a sequence are all attended to."""
    cdef PlanOptions options = options_of(p)
    options.batch_invariant = work.batch_invariant
    if p.selection.entries != 0:
        options.causal, options.window_left, options.window_right = False, UNKNOWN, UNKNOWN
    return options


cdef Tensor place_mask(PcAttentionParams* p, object example, const Place* place):
    """Find the mask entries of each sequence, which a plan of selected keys does not: by a plan of all keys."""
    cdef PcAttentionParams of_all = p[0]
    cdef Work work
    memset(&work, 0, sizeof(work))
    of_all.selection.entries = 0
    cdef Tensor buffer = plan_by_kernel(of_all, &work, example, place)
    p.mask_starts = work.buffer + work.layout.mask_starts
    return buffer


cdef int fill_selection(PcAttentionParams* p, Selected selected) except -1:
    cdef Tensor entries = selected.entries, counts = selected.counts
    cdef int64_t size = entries.itemsize, unit = selected.unit
    cdef int shift = 0
    if entries.shape_[2] >= INT32_MAX:
        raise ShapeError(
            f"{selected.name} has shape {entries.shape}; on CUDA the last axis is below 2^31: list fewer entries")
    p.selection.entries = address_of(entries)
    p.selection.sequence_stride, p.selection.head_stride = entries.strides_[0] // size, entries.strides_[1] // size
    p.selection.width, p.selection.unit = <int32_t>entries.shape_[2], <int32_t>unit
    while (1 << shift) < unit:
        shift += 1
    p.selection.unit_shift = shift if (1 << shift) == unit else -1
    p.selection.wide = entries.dtype_code == INT64
    if counts is not None:
        p.selection.counts = address_of(counts)
        p.selection.counts_sequence_stride = counts.strides_[0] // counts.itemsize
        p.selection.counts_head_stride = counts.strides_[1] // counts.itemsize
        p.selection.counts_wide = counts.dtype_code == INT64
    return 0


cdef Tensor allocate_workspace(
        const PcAttentionParams& p, Work* work, uint64_t counters, object example, const Place* place):
    """Allocate memory for partial results, with counters unless `counters` is the address of zeroed ones."""
    if work.layout.num_partial_rows == 0:
        return None
    cdef PlanOptions options = options_of(p)
    cdef int64_t rows = work.layout.num_partial_rows
    cdef int64_t num_bytes = place_workspace(&work.workspace, 0, options, work.layout, rows, p.value_dim)
    cdef int64_t counter_bytes = num_bytes - <int64_t>work.workspace.counters
    if counters != 0:
        num_bytes -= counter_bytes
    cdef Tensor memory = new_result(1, &num_bytes, UINT8, example, place)
    place_workspace(&work.workspace, address_of(memory), options, work.layout, rows, p.value_dim)
    if counters != 0:
        work.workspace.counters = counters
    else:
        runtime().fill(work.workspace.counters, 0, counter_bytes, place.stream)
    return memory


# ---- launches

cdef bint is_plain_memory(Tensor query, StoredCache keys, StoredCache values, Tensor out) noexcept:
    """Return True if every row of elements or codes begins at a multiple of 16 bytes."""
    return (row_bits(query) | row_bits(keys.codes) | row_bits(values.codes) | row_bits(out)) % 16 == 0


cdef int64_t row_bits(Tensor tensor) noexcept:
    """Return the address and strides of all axes but the last, or-ed; 0 for None."""
    if tensor is None:
        return 0
    cdef int64_t bits = <int64_t>address_of(tensor)
    cdef int i
    for i in range(tensor.ndim - 1):
        bits |= tensor.strides_[i]
    return bits


cdef int launch_all(
        PcAttentionParams& p, PcStoredAttentionParams& stored, const Work& work, const Place* place,
        bint plain_memory, bint plain_scales) except -1:
    """Launch decode and prefill, each if it may have items, and at least one of them for rows of padding.

    All kernels are loaded before the first one writes, because a load may fail. Kernels that a later capture with the
    same plan may launch are loaded too, because CUDA cannot load during a capture.
    """
    cdef KernelQuery query
    query.head_dim, query.value_dim = p.head_dim, p.value_dim
    query.query_type, query.key_type, query.value_type = p.query_type, p.key_type, p.value_type
    query.key_format, query.value_format = stored.key.format, stored.value.format
    query.aligned, query.aligned_scales = plain_memory, plain_scales
    query.full = p.softcap != 0.0 or p.alibi_slopes != 0 or p.mask != 0
    query.selected = p.selection.entries != 0
    cdef PcLaunchShape shapes[PC_NUM_SECTIONS]
    cdef list ready = []
    cdef int section
    for section in range(PC_NUM_SECTIONS):
        launches = may_have_items(p, work, section) or (section == PC_PROMPTS and ready[PC_DECODE] is None)
        loaded = None
        if launches or (work.has_plan and could_have_items(p, work, section)):
            name = select_kernel(query, section == PC_DECODE, &shapes[section])
            loaded = kernel(name, place.device_id, place.stream)
        ready.append(loaded if launches else None)
    for section in range(PC_NUM_SECTIONS):
        if ready[section] is not None:
            launch_section(p, stored, work, place, section, ready[section], shapes[section])
    return 0


cdef bint may_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept:
    cdef int64_t known = work.num_items[section]
    return known > 0 if known != UNKNOWN else could_have_items(p, work, section)


cdef bint could_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept:
    if section == PC_DECODE:
        return not work.layout.batch_invariant and work.layout.group <= 16
    return p.cu_query_lens.data != 0 or work.layout.group > 16 or work.layout.batch_invariant


cdef int launch_section(
        PcAttentionParams& p, PcStoredAttentionParams& stored, const Work& work, const Place* place, int section,
        object loaded, const PcLaunchShape& shape) except -1:
    p.schedule.first_item = work.buffer + work.layout.sections[section].first_item
    grid = (work.layout.sections[section].num_workers, p.num_kv_heads, work.layout.head_chunks)
    cdef uintptr_t params = <uintptr_t>&p
    if stored.key.format != PC_PLAIN or stored.value.format != PC_PLAIN:
        stored.attention = p
        params = <uintptr_t>&stored
    runtime().launch(loaded, grid, shape.threads, shape.shared_bytes, place.stream, params)
    return 0
