"""The plan of an attention call on CUDA: checks of its lengths, the schedule, and the workspace."""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport CPU, CUDA, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport index_array
from pagecore.ops.arguments._arguments cimport Place, are_on_host, chunk_of, new_at, new_result, to_device
from pagecore.ops.cuda.plan._plan cimport (
    PC_DECODE,
    PC_NUM_SECTIONS,
    PC_PROMPTS,
    CudaPlan,
    CudaPlanner,
    PcPlanHead,
    PcPlanLayout,
    layout_for,
    place_workspace,
    planned_bytes,
)
from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams, device_indices, kFoldTokens
from pagecore.ops.plan cimport PlanBatch, PlanOptions, check_plan_batch
from pagecore.ops.planning._plan cimport AttentionPlan, copy_lens

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.tensors import results
from pagecore.errors import DeviceError, ShapeError

cdef extern from "pagecore/native/rounding.hpp" namespace "pagecore" nogil:
    int64_t ceil_div(int64_t n, int64_t by)

cdef enum:
    UNKNOWN = -1

cdef CudaPlanner _planner  # for calls without a plan; guarded by the GIL


cdef list schedule(
        PcAttentionParams* params, Work* work, Tensor seq_lens, Tensor cu_query_lens, AttentionPlan plan,
        Tensor planned, bint checks_plan, object example, const Place* place):
    # Lengths on the host are read once: another thread may change them, and the checked lengths must be planned.
    cdef vector[int32_t] lengths, offsets
    cdef PcAttentionParams p = params[0]
    kept = []
    if plan is not None:
        check_plan(plan, p, place)
        take_plan(plan.cuda, p, work, cu_query_lens is not None, place)
    cdef Tensor buffer = planned
    if planned is not None:
        work.layout = planned_layout(planned, p, place)
        work.buffer = <uintptr_t>planned.data
        work.num_items[PC_DECODE] = work.num_items[PC_PROMPTS] = UNKNOWN
    cdef bint on_host = are_on_host((seq_lens, cu_query_lens))
    if on_host:
        copy_lens(seq_lens, "seq_lens", lengths)
        if cu_query_lens is not None:
            copy_lens(cu_query_lens, "cu_query_lens", offsets)
        check_lengths(lengths, offsets, p.num_tokens, p.table.width, p.block_size)
        check_masks(lengths, offsets, p)
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


# ---- plans of the caller

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


cdef int take_plan(
        CudaPlan plan, const PcAttentionParams& p, Work* work, bint has_offsets, const Place* place) except -1:
    cdef bint capturing = depends_on_capture(plan, has_offsets) and runtime().is_capturing(place.stream)
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


cdef bint depends_on_capture(CudaPlan plan, bint has_offsets) noexcept:
    """Return True if a capture needs another plan, or launches of sections that have no items now."""
    cdef int section
    if not plan.is_fixed:
        return True
    for section in range(PC_NUM_SECTIONS):
        if plan.head.num_items[section] == 0 and section_may_have_items(plan.layout, section, has_offsets):
            return True
    return False


# ---- lengths on the host

cdef PlanBatch batch_of(vector[int32_t]& lens, vector[int32_t]& cu) noexcept:
    """Return the batch of lengths and offsets; `cu` is empty if every sequence has one query."""
    cdef PlanBatch batch
    batch.seq_lens, batch.num_sequences = lens.data(), <int64_t>lens.size()
    batch.cu_query_lens = NULL
    if not cu.empty():
        batch.cu_query_lens = cu.data()
    return batch


cdef int check_lengths(
        vector[int32_t]& lens, vector[int32_t]& cu, int64_t num_tokens, int64_t width,
        int64_t block_size) except -1:
    cdef size_t i
    check_plan_batch(batch_of(lens, cu))
    if not cu.empty() and cu.back() > num_tokens:
        raise ShapeError(
            f"cu_query_lens[{cu.size() - 1}] is {cu.back()} and query has {num_tokens} rows; every query must have "
            "its row, and query is [num_tokens, num_query_heads, head_dim]"
        )
    for i in range(lens.size()):
        if ceil_div(<int64_t>lens[i], block_size) > width:
            raise ShapeError(
                f"seq_lens[{i}] is {lens[i]}, which is more than {width} blocks of {block_size} hold; the block table "
                "is too narrow"
            )
    return 0


cdef int check_masks(vector[int32_t]& lens, vector[int32_t]& cu, const PcAttentionParams& p) except -1:
    """Compare the mask or the tree of a call with checked lengths."""
    cdef int64_t i, queries, mask_size = 0
    if p.mask == 0:
        return 0
    for i in range(p.num_sequences):
        queries = 1 if cu.empty() else cu[i + 1] - cu[i]
        mask_size += <int64_t>lens[i] * queries
        if p.tree.words != 0:
            check_tree_lengths(i, queries, lens[i], p.tree.words)
    if p.tree.words == 0 and mask_size != p.mask_size:
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


# ---- plans of the call

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
    work.buffer = <uintptr_t>there.data
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
    work.buffer = <uintptr_t>buffer.data
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
    cdef PcAttentionParams of_all = p[0]
    cdef Work work
    memset(&work, 0, sizeof(work))
    of_all.selection.entries = 0
    cdef Tensor buffer = plan_by_kernel(of_all, &work, example, place)
    p.mask_starts = work.buffer + work.layout.mask_starts
    return buffer


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
    place_workspace(&work.workspace, <uintptr_t>memory.data, options, work.layout, rows, p.value_dim)
    if counters != 0:
        work.workspace.counters = counters
    else:
        runtime().fill(work.workspace.counters, 0, counter_bytes, place.stream)
    return memory


# ---- items

cdef bint may_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept:
    cdef int64_t known = work.num_items[section]
    return known > 0 if known != UNKNOWN else could_have_items(p, work, section)


cdef bint could_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept:
    return section_may_have_items(work.layout, section, p.cu_query_lens.data != 0)


cdef bint section_may_have_items(const PcPlanLayout& layout, int section, bint has_offsets) noexcept:
    """Return True if some batch has items in a section; without offsets every sequence has one query."""
    if section == PC_DECODE:
        return not layout.batch_invariant and layout.group <= 16
    return has_offsets or layout.group > 16 or layout.batch_invariant
