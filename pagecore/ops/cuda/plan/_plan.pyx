"""CudaPlan: the plan of a batch in device memory, and the workspace of its kernels."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.string cimport memcmp

from pagecore.ops.plan cimport PcWorkItem, PlanBatch, PlanOptions

import numpy as np

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.cuda.device_memory import DeviceMemory
from pagecore.arrays.cuda.pinned import PinnedRing
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption

cdef extern from "pagecore/native/rounding.hpp" namespace "pagecore" nogil:
    int64_t round_up(int64_t n, int64_t unit)

cdef enum:
    ALIGNMENT = 256  # of the parts of a workspace, in bytes

cdef extern from "cuda_src/shapes/prefill.h" nogil:
    cdef struct PcLaunchShape:
        pass

    PcLaunchShape pc_decode_shape(int head_dim)
    PcLaunchShape pc_prefill_shape(int head_dim, bint full)
    int pc_resident_ctas(PcLaunchShape shape, int shared_bytes_per_sm)


cdef extern from "cuda_src/shapes/latent.h" nogil:
    int max_latent_tiles "pc_max_latent_tiles"(int num_heads)


cdef class CudaPlan:
    """The part of an AttentionPlan that is specific to CUDA.

    It holds a buffer of fixed layout (cuda_src/abi/plan.h), planned on the host and copied, and a workspace for partial
    results. Both are kept from step to step. With `is_fixed`, capacities are chosen by the constructor, and neither the
    layout nor an address changes, so a captured graph is valid for every later plan. If a call with wider values
    replaces the workspace, the former one is kept too, because earlier graphs write to it.

    A cache keeps plans in its own staging and device memory instead. `num_bytes` is the size of a plan, `bind` sets its
    address on the device, and `plan_into` writes it to host memory, which the cache copies to the device.
    """

    def __init__(self, device, max_sequences, max_tokens):
        self.device = device
        self.is_fixed = max_sequences > 0
        self.outgrown = []
        self.layout.max_sequences = max_sequences
        self.layout.max_tokens = max_tokens

    @property
    def num_bytes(self):
        """Bytes of the buffer, in staging and on the device; it begins at a multiple of 16."""
        return planned_bytes(self.layout)

    @property
    def max_sequences(self):
        """Capacity in sequences."""
        return self.layout.max_sequences

    @property
    def max_tokens(self):
        """Capacity in query rows."""
        return self.layout.max_tokens

    @property
    def num_sequences(self):
        """Number of sequences in the last batch that the host planned."""
        return self.head.num_sequences

    @property
    def num_items(self):
        """Numbers of work items of decode and of prefill in that batch."""
        return self.head.num_items[PC_DECODE], self.head.num_items[PC_PROMPTS]

    @property
    def num_partial_rows(self):
        """Numbers of partial rows of decode and of prefill in that batch."""
        return self.head.num_partial_rows[PC_DECODE], self.head.num_partial_rows[PC_PROMPTS]

    @property
    def num_workers(self):
        """CTAs for each key-value head that share decode and prefill."""
        return self.layout.sections[PC_DECODE].num_workers, self.layout.sections[PC_PROMPTS].num_workers

    @property
    def nbytes(self):
        """Bytes held on the device and in staging."""
        own = 0 if self.memory is None else self.memory.nbytes
        own += 0 if self.workspace_memory is None else self.workspace_memory.nbytes
        own += sum(memory.nbytes for memory in self.outgrown)
        return own if self.staging is None else own + self.staging.nbytes

    def bind(self, address):
        """Set the device address of the plan: a multiple of 16, with `num_bytes` that the caller owns."""
        if not self.is_fixed:
            raise ShapeError("a plan that is bound to memory needs a fixed size: pass max_sequences and max_tokens")
        if address % 16:
            raise ShapeError(f"address is {address:#x}; it must be a multiple of 16")
        self.is_bound = True
        self.address = address
        self.memory = self.staging = self.sent = None

    cdef PcPlanLayout layout_of(
            self, const PlanOptions& options, int64_t num_workers, int64_t num_sequences, int64_t num_tokens) except *:
        """Return the layout for a batch; a plan that grows at least doubles its capacities."""
        cdef int64_t sequences = self.layout.max_sequences, tokens = self.layout.max_tokens
        if self.is_fixed and (num_sequences > sequences or num_tokens > tokens):
            raise ShapeError(
                f"the batch has {num_sequences} sequences and {num_tokens} queries; the plan has room for {sequences} "
                f"and {tokens}; make one with larger max_sequences and max_tokens"
            )
        if num_sequences > sequences:
            sequences = max(num_sequences, 2 * sequences)
        if num_tokens > tokens:
            tokens = max(num_tokens, 2 * tokens)
        cdef PcPlanLayout layout = layout_for(options, num_workers, sequences, tokens, self.device)
        if self.is_fixed and self.layout.num_bytes > 0 and (
                self.has_other_heads(options) or memcmp(&layout, &self.layout, sizeof(layout)) != 0):
            raise ShapeError(
                f"these options need a plan of {described(options, layout)}, and graphs may use the present one of "
                f"{described(self.options, self.layout)}: plan with its options, or make another plan"
            )
        return layout

    cdef bint has_other_heads(self, const PlanOptions& options) noexcept:
        return options.num_query_heads != self.options.num_query_heads or (
            options.num_kv_heads != self.options.num_kv_heads)

    cdef void lay_out(self, const PcPlanLayout& layout, const PlanOptions& options) noexcept:
        if layout.num_partial_rows > self.layout.num_partial_rows or self.has_other_heads(options):
            self.value_dim = 0  # the workspace no longer fits
        self.options = options
        self.layout = layout

    cdef int fix(
            self, const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens) except -1:
        self.lay_out(layout_for(options, num_workers, max_sequences, max_tokens, self.device), options)
        self.is_fixed = self.is_bound = True
        return 0

    cdef int64_t plan_into(self, const PlanBatch& batch, void* target) except -1:
        cdef int64_t num_bytes = self.planner.plan_into(self.layout, self.options, batch, target)
        self.head = (<PcPlanHead*>target)[0]
        return num_bytes

    cdef int replan(
            self, const PlanOptions& options, int64_t num_workers, const PlanBatch& batch, size_t stream) except -1:
        if self.is_bound:
            raise DeviceError("the plan is bound to memory of a cache, which plans it: prepare a batch of that cache")
        # A graph would copy staging memory after later plans have overwritten it.
        check_not_capturing(stream, "a plan is copied from host memory", "plan before the capture")
        cdef int64_t num_tokens = batch.query_end(batch.num_sequences - 1) if batch.num_sequences > 0 else 0
        cdef PcPlanLayout layout = self.layout_of(options, num_workers, batch.num_sequences, num_tokens)
        memory, staging = self.memory, self.staging
        cdef int64_t num_bytes = planned_bytes(layout)
        if memory is None or num_bytes > memory.nbytes:
            memory = DeviceMemory(num_bytes, self.device, stream, False)
            staging = PinnedRing(runtime(), self.device)
            staging.reserve(num_bytes)
        slot = staging.take()
        cdef uintptr_t staged = slot.address
        slot.send(0, self.planner.plan_into(layout, options, batch, <void*>staged), memory.address, stream)
        self.lay_out(layout, options)
        self.head = (<PcPlanHead*>staged)[0]
        # Work of this stream may still use the former memory; the allocator reuses it in the order of the stream.
        self.memory, self.staging, self.sent = memory, staging, slot.memory
        self.address = memory.address
        return 0

    cdef int reserve_workspace(self, int64_t value_dim, size_t stream) except -1:
        cdef Workspace workspace
        if value_dim <= self.value_dim:
            return 0
        check_not_capturing(
            stream, "the first call with a plan allocates its workspace", "run the call once before the capture")
        cdef int64_t rows = self.layout.num_partial_rows
        cdef int64_t num_bytes = place_workspace(&workspace, 0, self.options, self.layout, rows, value_dim)
        memory = DeviceMemory(num_bytes, self.device, stream, False)
        place_workspace(&workspace, memory.address, self.options, self.layout, rows, value_dim)
        runtime().fill(workspace.counters, 0, memory.address + num_bytes - workspace.counters, stream)
        if self.is_fixed and self.workspace_memory is not None:
            self.outgrown.append(self.workspace_memory)
        self.workspace, self.workspace_memory, self.value_dim = workspace, memory, value_dim
        return 0

    def items(self, section):
        """Return a copy of the items of the last plan sent, decode (0) or prefill (1); see `items_in`."""
        if self.sent is None:
            raise DeviceError(
                "the items of a plan that was never made, or is in memory of a cache, cannot be read; plan it with "
                "plan_attention"
            )
        return items_in(self.sent, self, section)


cdef int check_not_capturing(size_t stream, str what, str remedy) except -1:
    if runtime().is_capturing(stream):
        raise DeviceError(f"{what}, and stream {stream:#x} is being captured: {remedy}")
    return 0


cdef str described(const PlanOptions& options, const PcPlanLayout& layout):
    return (f"{options.num_query_heads}/{options.num_kv_heads} heads, "
            f"{layout.sections[PC_DECODE].num_workers} and {layout.sections[PC_PROMPTS].num_workers} workers, "
            f"batch_invariant={bool(options.batch_invariant)}")


def items_in(array, CudaPlan plan, section):
    """Return a section of a plan in a uint8 host buffer: items, int32 [num_items, 8], and first_item [workers + 1]."""
    cdef PcPlanLayout* layout = &plan.layout
    if not 0 <= section < PC_NUM_SECTIONS:
        raise ShapeError(f"section is {section}; it must be 0 for decode or 1 for prefill")
    cdef int64_t begin = layout.sections[<int>section].first_item
    cdef int64_t count = layout.sections[<int>section].num_workers + 1
    first = np.frombuffer(array, np.int32, count, begin)
    items = np.frombuffer(array, np.int32, first[-1] * (sizeof(PcWorkItem) // 4), layout.items).reshape(-1, 8)
    return items[first[0]:].copy(), first - first[0]


cdef PcPlanLayout layout_for(
        const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens,
        int device) except *:
    cdef CudaPlanShape shape
    shape.num_query_heads = options.num_query_heads
    shape.num_kv_heads = options.num_kv_heads
    shape.batch_invariant = options.batch_invariant
    shape.max_sequences = max_sequences
    shape.max_tokens = max_tokens
    shape.has_sinks = options.sink_tokens > 0
    if shape.has_sinks and options.batch_invariant:
        if options.window_right < 0 and not options.causal:
            raise UnsupportedOption(
                "a batch-invariant plan on CUDA with sink_tokens needs causal=True or a window with a right side, "
                "because its partial rows count the keys of a window"
            )
        shape.window_keys = options.window_left + 1 + max(<int64_t>options.window_right, 0)
    shape.decode_ctas = shape.prompt_ctas = num_workers
    if num_workers == 0:
        properties = runtime().properties(device)
        # All dims use the CTAs of head_dim 128, because kernels of other dims take about as much shared memory.
        shape.decode_ctas = min(kMaxPlanCtas, properties.num_multiprocessors * pc_resident_ctas(
            pc_decode_shape(128), properties.shared_bytes_per_multiprocessor))
        shape.prompt_ctas = min(kMaxPlanCtas, properties.num_multiprocessors * pc_resident_ctas(
            pc_prefill_shape(128, False), properties.shared_bytes_per_multiprocessor))
    return make_layout(shape)


cdef int64_t place_workspace(
        Workspace* workspace, uint64_t address, const PlanOptions& options, const PcPlanLayout& layout,
        int64_t num_rows, int64_t value_dim) noexcept:
    cdef int64_t heads = num_rows * options.num_query_heads
    workspace.partial_out = address
    workspace.partial_lse = workspace.partial_out + round_up(4 * heads * value_dim, ALIGNMENT)
    workspace.counters = workspace.partial_lse + round_up(4 * heads, ALIGNMENT)
    # Latent attention, which has one key head, divides the rows of an item among more CTAs than paged attention.
    cdef int64_t tiles = max(layout.head_chunks, max_latent_tiles(layout.group) if options.num_kv_heads == 1 else 1)
    return workspace.counters + round_up(4 * num_rows * options.num_kv_heads * tiles, ALIGNMENT) - address
