"""Plans of lengths in device memory, made by a kernel in memory of the call or in an array shared by many calls."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport CUDA, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport index_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_length,
    check_place,
    check_result,
    check_writable,
    find_place,
    index_tensor,
    new_at,
    note_written,
    read_reach,
    read_sink_tokens,
    to_host,
)
from pagecore.ops.cuda.plan._plan cimport (
    PC_DECODE,
    PC_NUM_SECTIONS,
    PC_PLAN_SHARED_BYTES,
    PC_PLAN_THREADS,
    PC_PROMPTS,
    CudaPlanShape,
    PcPlanHead,
    PcPlanLayout,
    kMaxPlanCtas,
    layout_for,
    make_layout,
)
from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams, PcPlanParams, device_indices
from pagecore.ops.plan cimport PcWorkItem, PlanOptions
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.arrays import cuda
from pagecore.errors import DeviceError, ShapeError
from pagecore.ops.cuda.compilation.kernels import launch

cdef enum:
    ALIGNMENT = 16  # of a plan and of its parts
    NUM_PARTS = 8  # of a layout; each may begin up to ALIGNMENT - 1 bytes later

# By head counts: bytes of an empty plan, bytes for each sequence, bytes for each prefill tile, queries of a tile.
cdef dict _rooms = {}


cdef PlanOptions options_of(const PcAttentionParams& p) noexcept:
    cdef PlanOptions options
    options.num_query_heads, options.num_kv_heads = p.num_query_heads, p.num_kv_heads
    options.causal, options.window_left, options.window_right = p.causal, p.window_left, p.window_right
    options.sink_tokens = p.sink_tokens
    options.tree = p.tree.words != 0
    return options


cdef int launch_plan(
        const PcAttentionParams& p, const PcPlanLayout& layout, uint64_t buffer, size_t stream, int device) except -1:
    cdef PcPlanParams params
    params.attention, params.layout, params.buffer = p, layout, buffer
    launch("plan", (1, 1, 1), PC_PLAN_THREADS, PC_PLAN_SHARED_BYTES, stream, <uintptr_t>&params, device)
    return 0


# ---- plans in arrays of the caller

cdef tuple room_of(int64_t num_query_heads, int64_t num_kv_heads, bint has_sinks):
    """Return the sizes of a plan by head counts; sizes are linear in sequences, tiles and, with sinks, tokens.

    They hold for any device, because the layouts are for kMaxPlanCtas CTAs.
    """
    cdef CudaPlanShape shape
    cdef int64_t empty, sequence, tile, queries
    room = _rooms.get((num_query_heads, num_kv_heads, has_sinks))
    if room is not None:
        return room
    if num_kv_heads < 1 or num_query_heads < num_kv_heads or num_query_heads % num_kv_heads:
        raise ShapeError(
            f"num_query_heads is {num_query_heads} and num_kv_heads {num_kv_heads}; the first must be a multiple of "
            "the second, and both at least 1"
        )
    shape.num_query_heads, shape.num_kv_heads = num_query_heads, num_kv_heads
    shape.decode_ctas = shape.prompt_ctas = kMaxPlanCtas
    shape.has_sinks = has_sinks
    cdef PcPlanLayout layout = make_layout(shape)
    empty, queries = layout.num_bytes, layout.sections[PC_PROMPTS].query_tile
    cdef int64_t counters = counter_bytes(layout, num_kv_heads)
    # Counts are multiples of ALIGNMENT, so that no part is padded.
    shape.max_sequences = ALIGNMENT
    sequence = (make_layout(shape).num_bytes - empty) // ALIGNMENT
    shape.max_sequences, shape.max_tokens = 0, ALIGNMENT * queries
    tile = (make_layout(shape).num_bytes - empty) // ALIGNMENT
    # With sinks, each token has two partial rows, each with counters.
    cdef int64_t token = 8 * num_kv_heads * layout.head_chunks if has_sinks else 0
    room = _rooms[num_query_heads, num_kv_heads, has_sinks] = (
        empty + counters + NUM_PARTS * ALIGNMENT, sequence, tile, queries, token)
    return room


cdef int64_t counter_bytes(const PcPlanLayout& layout, int64_t num_kv_heads) noexcept:
    return 4 * <int64_t>layout.num_partial_rows * num_kv_heads * layout.head_chunks


def plan_shape(num_sequences, num_tokens, num_query_heads, num_kv_heads, has_sinks=False):
    """Return the shape of a plan in an array of uint8, ``[num_sequences + 1, bytes]``.

    The shape is the same on every device. Counts may be symbolic, for tracers. The first axis distinguishes plans for
    different numbers of sequences.
    """
    empty, sequence, tile, queries, token = room_of(num_query_heads, num_kv_heads, has_sinks)
    num_bytes = empty + sequence * num_sequences + tile * (num_tokens // queries) + token * num_tokens
    rows = num_sequences + 1
    return rows, (num_bytes // rows + ALIGNMENT) // ALIGNMENT * ALIGNMENT


def plan_lengths(out, seq_lens, cu_query_lens, num_tokens, *, num_query_heads, num_kv_heads, causal=True, window=None,
                 chunk=None, sink_tokens=None, tree=False, stream=None):
    """Plan lengths in device memory by a kernel, and write the plan to an array that calls accept as `plan`.

    Counters follow the plan in the array; with them the workers of a call find the last worker of a tile. Each call
    resets them to 0, so they are filled once for each plan. Calls with one plan must be ordered by one stream.

    Parameters
    ----------
    out : uint8, `plan_shape`, C-contiguous, at a multiple of 16 bytes
        Array for the plan.
    seq_lens : integers, [B]
        On the CUDA device of `out`.
    cu_query_lens : integers, [B + 1], or None
        None is one query for each sequence.
    num_tokens : int
        Rows of `query` in the calls.
    num_query_heads, num_kv_heads, causal, window, chunk, sink_tokens, tree
        Those of the calls.
    stream : int or a stream, optional
        By default the current stream of the framework of `seq_lens`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other or are not on one CUDA device. Nothing has been written.
    """
    cdef PcAttentionParams p
    cdef Place place
    cdef Tensor target, cu = None, lens = any_tensor(seq_lens, "seq_lens")
    cdef int64_t left, right
    cdef int64_t expected[2]
    find_place(&place, lens, "seq_lens", seq_lens, stream)
    if place.device_type != CUDA:
        raise DeviceError("seq_lens is on the host; it must be on a CUDA device: use plan_attention for host lengths")
    lens = index_tensor(lens, "seq_lens", 1, "[num_sequences]", &place)
    if cu_query_lens is not None:
        cu = index_tensor(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", &place)
        check_length(cu, "cu_query_lens", 0, lens.shape_[0] + 1, "one more than seq_lens")
    elif num_tokens != lens.shape_[0]:
        raise ShapeError(f"num_tokens is {num_tokens} and seq_lens has {lens.shape_[0]} entries, which without "
                         "cu_query_lens are one query each; pass cu_query_lens, or leave num_tokens out")
    if not 0 <= num_tokens < INT32_MAX:
        raise ShapeError(f"num_tokens is {num_tokens}; it must be 0 to {INT32_MAX - 1}")
    read_reach(window, chunk, &left, &right)
    cdef int64_t num_sinks = read_sink_tokens(sink_tokens, chunk, left)
    expected[0], expected[1] = plan_shape(lens.shape_[0], num_tokens, num_query_heads, num_kv_heads, num_sinks > 0)
    target = any_tensor(out, "out")
    check_place(target, "out", &place)
    check_result(target, "out", 2, expected, UINT8)
    check_writable(target, "out")
    set_lengths(&p, lens, cu, num_tokens)
    p.num_query_heads, p.num_kv_heads = num_query_heads, num_kv_heads
    p.causal, p.window_left, p.window_right = bool(causal), <int32_t>left, <int32_t>right
    p.sink_tokens = <int32_t>num_sinks
    p.tree.words = bool(tree)  # the plan depends on the presence of a tree only
    cdef PcPlanLayout layout = planned_layout(target, p, &place)
    await_arrays((seq_lens, cu_query_lens), &place)
    launch_plan(p, layout, <uintptr_t>target.data, place.stream, place.device_id)
    cuda.runtime().fill(
        planned_counters(target, layout), 0, counter_bytes(layout, num_kv_heads), place.stream)
    note_written(target, &place)


cdef int set_lengths(PcAttentionParams* p, Tensor seq_lens, Tensor cu_query_lens, int64_t num_tokens) except -1:
    """Set the lengths of a plan. The table is unbounded, so that it does not limit lengths."""
    memset(p, 0, sizeof(p[0]))
    p.seq_lens = device_indices(index_array(seq_lens))
    p.cu_query_lens = device_indices(index_array(cu_query_lens))
    p.num_sequences, p.num_tokens = <int32_t>seq_lens.shape_[0], <int32_t>num_tokens
    p.table.num_rows, p.table.width, p.block_size = INT32_MAX, INT32_MAX, 1
    return 0


cdef PcPlanLayout planned_layout(Tensor planned, const PcAttentionParams& p, const Place* place) except *:
    expected = plan_shape(p.num_sequences, p.num_tokens, p.num_query_heads, p.num_kv_heads, p.sink_tokens > 0)
    if planned.shape != expected or planned.strides_[0] != expected[1] or planned.strides_[1] != 1:
        raise ShapeError(
            f"plan has shape {planned.shape} and the call {p.num_sequences} sequences, {p.num_tokens} queries and "
            f"{p.num_query_heads}/{p.num_kv_heads} heads, whose plan has {expected}, contiguous; plan this batch"
        )
    if <uintptr_t>planned.data % ALIGNMENT:
        raise ShapeError(f"plan is at {<uintptr_t>planned.data:#x}; it must begin at a multiple of {ALIGNMENT} bytes")
    return layout_for(options_of(p), 0, p.num_sequences, p.num_tokens, place.device_id)


cdef uint64_t planned_counters(Tensor planned, const PcPlanLayout& layout) noexcept:
    return 0 if planned is None else <uintptr_t>planned.data + <uint64_t>layout.num_bytes


cdef int check_planned(Tensor planned, const PcAttentionParams& p, const Place* place) except -1:
    cdef PcPlanLayout layout = planned_layout(planned, p, place)
    cdef int64_t num_bytes = layout.num_bytes
    cdef Tensor fresh = new_at(1, &num_bytes, UINT8, place)
    launch_plan(p, layout, <uintptr_t>fresh.data, place.stream, place.device_id)
    cdef Tensor ours = to_host(fresh, place), given = to_host(planned, place)
    cdef const PcPlanHead* head = <const PcPlanHead*>ours.data
    cdef int64_t items = head.num_items[PC_DECODE] + head.num_items[PC_PROMPTS]
    parts = [(0, sizeof(PcPlanHead)), (layout.mask_starts, 8 * p.num_sequences)]
    parts.append((layout.items, sizeof(PcWorkItem) * items))
    for section in range(PC_NUM_SECTIONS):
        parts.append((layout.sections[<int>section].first_item, 4 * (layout.sections[<int>section].num_workers + 1)))
    for begin, size in parts:
        if bytes_of(ours, begin, size) != bytes_of(given, begin, size):
            raise ShapeError(
                "plan was made for other lengths, another window or another causality than the call has; plan this "
                "batch with the options of the call"
            )
    return 0


cdef bytes bytes_of(Tensor tensor, int64_t begin, int64_t size):
    return (<const char*>tensor.data)[begin:begin + size]


def plan_on_device(AttentionPlan plan, Tensor seq_lens, Tensor cu_query_lens, num_tokens):
    """Plan lengths in device memory with the options and the layout of `plan`; return the buffer, uint8."""
    cdef PcAttentionParams p
    cdef Place place
    cdef PcPlanLayout layout = plan.cuda.layout
    set_lengths(&p, seq_lens, cu_query_lens, num_tokens)
    p.causal = plan.plan.options.causal
    p.window_left = <int32_t>plan.plan.options.window_left
    p.window_right = <int32_t>plan.plan.options.window_right
    p.sink_tokens = <int32_t>plan.plan.options.sink_tokens
    p.tree.words = plan.plan.options.tree
    place.device_type, place.device_id, place.stream = CUDA, plan.cuda.device, 0
    cdef int64_t num_bytes = layout.num_bytes
    cdef Tensor buffer = new_at(1, &num_bytes, UINT8, &place)
    launch_plan(p, layout, <uintptr_t>buffer.data, 0, plan.cuda.device)
    return buffer
