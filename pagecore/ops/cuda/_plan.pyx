"""CudaPlan: the plan of a batch in device memory, and the memory that its kernels need beside it."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

from pagecore.ops.plan cimport PcWorkItem, PlanBatch, PlanOptions

import numpy as np

from pagecore.arrays.cuda import runtime
from pagecore.arrays.device_memory import DeviceMemory
from pagecore.arrays.pinned import PinnedRing
from pagecore.errors import DeviceError, ShapeError

cdef extern from "cuda_src/prefill_shape.h" nogil:
    cdef struct PcLaunchShape:
        pass

    PcLaunchShape pc_decode_shape(int head_dim)
    PcLaunchShape pc_prefill_shape(int head_dim, bint full)
    int pc_resident_ctas(PcLaunchShape shape, int shared_bytes_per_sm)


cdef class CudaPlan:
    """What an AttentionPlan is on a CUDA device.

    A buffer of fixed layout (cuda_src/abi_plan.h), planned on the host and copied, and a workspace for partial results.
    Both are kept from step to step. Where `is_fixed`, capacities were chosen beforehand and no address changes, so that
    a graph which was captured once serves every later plan.

    A cache keeps plans in its own staging and device memory instead: `num_bytes` says how much a plan takes, `bind`
    where it lies on the device, and `plan_into` writes it to host memory, which the cache copies there.
    """

    def __init__(self, device, max_sequences, max_tokens):
        self.device = device
        self.is_fixed = max_sequences > 0
        self.layout.max_sequences = max_sequences
        self.layout.max_tokens = max_tokens

    @property
    def num_bytes(self):
        """Bytes of the buffer, in staging and on the device; it must begin at a multiple of 16."""
        return self.layout.num_bytes

    @property
    def max_sequences(self):
        """Sequences that a plan has room for."""
        return self.layout.max_sequences

    @property
    def max_tokens(self):
        """Query rows that a plan has room for."""
        return self.layout.max_tokens

    @property
    def num_sequences(self):
        """Sequences of the last batch that the host planned."""
        return self.head.num_sequences

    @property
    def num_items(self):
        """Its work items of decode and of prompts."""
        return self.head.num_items[PC_DECODE], self.head.num_items[PC_PROMPTS]

    @property
    def num_partial_rows(self):
        """Its query rows of splits, of decode and of prompts."""
        return self.head.num_partial_rows[PC_DECODE], self.head.num_partial_rows[PC_PROMPTS]

    @property
    def num_workers(self):
        """CTAs of each key head that share decode, and prompts."""
        return self.layout.sections[PC_DECODE].num_workers, self.layout.sections[PC_PROMPTS].num_workers

    @property
    def nbytes(self):
        """Bytes held on the device and in staging."""
        own = 0 if self.memory is None else self.memory.nbytes
        own += 0 if self.workspace_memory is None else self.workspace_memory.nbytes
        return own if self.staging is None else own + self.staging.nbytes

    def bind(self, address):
        """Let the plan lie at a device address, a multiple of 16 with room for `num_bytes`, that the caller keeps."""
        if not self.is_fixed:
            raise ShapeError("a plan is bound to memory of a fixed size: give max_sequences and max_tokens to it")
        if address % 16:
            raise ShapeError(f"address is {address:#x}; a plan begins at a multiple of 16")
        self.is_bound = True
        self.address = address
        self.memory = self.staging = None

    cdef int reserve(
            self, const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens,
            size_t stream) except -1:
        cdef int64_t sequences = self.layout.max_sequences, tokens = self.layout.max_tokens
        if self.is_fixed:
            if max_sequences > sequences or max_tokens > tokens:
                raise ShapeError(
                    f"the batch has {max_sequences} sequences and {max_tokens} queries; the plan has room for "
                    f"{sequences} and {tokens}"
                )
        else:
            if max_sequences > sequences:
                sequences = max(max_sequences, 2 * sequences)
            if max_tokens > tokens:
                tokens = max(max_tokens, 2 * tokens)
        cdef PcPlanLayout layout = layout_for(options, num_workers, sequences, tokens, self.device)
        if self.is_fixed and 0 < self.layout.num_bytes < layout.num_bytes:
            raise ShapeError(
                f"the plan would take {layout.num_bytes} bytes; it was made for {self.layout.num_bytes}: plan with the "
                "options that it was made with"
            )
        if not self.is_bound and (self.memory is None or layout.num_bytes > self.memory.nbytes):
            self.allocate(layout.num_bytes, stream)
        if layout.num_partial_rows > self.layout.num_partial_rows or options.num_query_heads != (
                self.options.num_query_heads) or options.num_kv_heads != self.options.num_kv_heads:
            self.value_dim = 0  # the workspace no longer fits
        self.options = options
        self.num_workers_given = num_workers
        self.layout = layout
        return 0

    cdef int fix(
            self, const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens) except -1:
        self.is_fixed = self.is_bound = True
        self.layout.max_sequences = max_sequences
        self.layout.max_tokens = max_tokens
        return self.reserve(options, num_workers, max_sequences, max_tokens, 0)

    cdef int allocate(self, int64_t num_bytes, size_t stream) except -1:
        check_not_capturing(runtime(), stream, "a plan grows")
        # The old memory serves work of this stream until it is done; the allocator orders by the stream.
        memory = DeviceMemory(num_bytes, self.device, stream, False)
        staging = PinnedRing(runtime(), self.device)
        staging.reserve(num_bytes)
        self.memory, self.staging = memory, staging
        self.address = memory.address
        return 0

    cdef int64_t plan_into(self, const PlanBatch& batch, void* target) except -1:
        cdef int64_t num_bytes = self.planner.plan_into(self.layout, self.options, batch, target)
        self.head = (<PcPlanHead*>target)[0]
        return num_bytes

    cdef int send(self, const PlanBatch& batch, size_t stream) except -1:
        if self.is_bound:
            raise DeviceError("the plan is bound to memory of a cache, which plans it: prepare a batch of that cache")
        stage = self.staging.take()
        cdef uintptr_t staged = stage.address
        stage.send(0, self.plan_into(batch, <void*>staged), self.address, stream)
        return 0

    cdef int reserve_workspace(self, int64_t value_dim, size_t stream) except -1:
        if value_dim <= self.value_dim:
            return 0
        check_not_capturing(runtime(), stream, "the first call with a plan allocates its workspace")
        cdef int64_t num_bytes = place_workspace(
            &self.workspace, 0, self.options, self.layout, self.layout.num_partial_rows, value_dim)
        memory = DeviceMemory(num_bytes, self.device, stream, False)
        place_workspace(
            &self.workspace, memory.address, self.options, self.layout, self.layout.num_partial_rows, value_dim)
        runtime().fill(
            self.workspace.counters, 0, memory.address + num_bytes - self.workspace.counters, stream)
        self.workspace_memory = memory
        self.value_dim = value_dim
        return 0

    def items(self, section):
        """A copy of the items of the plan that was sent last, decode (0) or prompts (1), by worker: arrays of ints."""
        if self.staging is None:
            raise DeviceError("the plan was never made, or lies in memory of a cache: its items are not at hand")
        return items_in(self.staging.latest.memory, self, section)


cdef int check_not_capturing(object found, size_t stream, str what) except -1:
    if found.is_capturing(stream):
        raise DeviceError(f"{what}, and stream {stream:#x} is being captured: run the call once before the capture")
    return 0


def items_in(array, CudaPlan plan, section):
    """A section of a plan's buffer on the host, uint8: items, int32 [num_items, 8], and first_item [workers + 1]."""
    cdef PcPlanLayout* layout = &plan.layout
    if not 0 <= section < PC_NUM_SECTIONS:
        raise ShapeError(f"section is {section}; it is 0 for decode, 1 for prompts")
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
    shape.decode_ctas = shape.prompt_ctas = num_workers
    if num_workers == 0:
        properties = runtime().properties(device)
        # Those of head_dim 128 for all: their shared memory is about the same.
        shape.decode_ctas = properties.num_multiprocessors * pc_resident_ctas(
            pc_decode_shape(128), properties.shared_bytes_per_multiprocessor)
        shape.prompt_ctas = properties.num_multiprocessors * pc_resident_ctas(
            pc_prefill_shape(128, False), properties.shared_bytes_per_multiprocessor)
    return make_layout(shape)


cdef int64_t place_workspace(
        Workspace* workspace, uint64_t address, const PlanOptions& options, const PcPlanLayout& layout,
        int64_t num_rows, int64_t value_dim) noexcept:
    cdef int64_t heads = num_rows * options.num_query_heads
    workspace.partial_out = address
    workspace.partial_lse = workspace.partial_out + round_up(4 * heads * value_dim)
    workspace.counters = workspace.partial_lse + round_up(4 * heads)
    return workspace.counters + round_up(4 * num_rows * options.num_kv_heads * layout.head_chunks) - address


cdef int64_t round_up(int64_t num_bytes) noexcept:
    return (num_bytes + 255) // 256 * 256
