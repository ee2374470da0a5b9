# Plans in device memory; see cuda_plan.hpp for what they hold.
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.plan cimport PlanBatch, PlanOptions


cdef extern from "cuda_src/abi_plan.h" nogil:
    enum: PC_DECODE
    enum: PC_PROMPTS
    enum: PC_NUM_SECTIONS
    enum: PC_PLAN_THREADS
    enum: PC_PLAN_SHARED_BYTES

    cdef struct PcPlanHead:
        int32_t num_sequences
        int32_t num_items[2]
        int32_t num_partial_rows[2]

    cdef struct PcPlanSection:
        int32_t num_workers
        int32_t query_tile
        int32_t split_floor
        int32_t first_item

    cdef struct PcPlanLayout:
        PcPlanSection sections[2]
        int32_t max_sequences
        int32_t max_tokens
        int32_t group
        int32_t head_chunks
        int32_t batch_invariant
        int32_t max_items
        int32_t num_split_rows
        int32_t num_partial_rows
        int32_t mask_starts
        int64_t items
        int64_t num_bytes


cdef extern from "pagecore/ops/cuda/cuda_plan.hpp" namespace "pagecore" nogil:
    cdef cppclass CudaPlanShape:
        int64_t num_query_heads
        int64_t num_kv_heads
        cbool batch_invariant
        int64_t max_sequences
        int64_t max_tokens
        int64_t decode_ctas
        int64_t prompt_ctas

    const int64_t kMaxPlanCtas
    PcPlanLayout make_layout(const CudaPlanShape& shape) except +raise_python_error
    int64_t planned_bytes(const PcPlanLayout& layout)

    cdef cppclass CudaPlanner:
        int64_t plan_into(
            const PcPlanLayout& layout, const PlanOptions& options, const PlanBatch& batch, void* buffer
        ) except +raise_python_error


# Where partial results go while a call runs.
cdef struct Workspace:
    uint64_t partial_out
    uint64_t partial_lse
    uint64_t counters


cdef class CudaPlan:
    cdef readonly int device
    cdef readonly bint is_fixed  # capacities, heads and workers stay as they are, and with them every address
    cdef bint is_bound  # the buffer is somebody else's
    cdef PlanOptions options
    cdef PcPlanLayout layout
    cdef PcPlanHead head  # of the last plan that the host made
    cdef readonly uint64_t address  # of the plan in device memory
    cdef readonly object workspace_memory
    cdef object memory
    cdef list outgrown  # workspaces that graphs may still write to, where is_fixed
    cdef object staging  # a PinnedRing, or None
    cdef object sent  # the memory of its slot that the plan was last sent from
    cdef int64_t value_dim
    cdef Workspace workspace
    cdef CudaPlanner planner

    # The layout for a batch; what a plan of fixed size cannot hold, or other heads or workers there, raise.
    cdef PcPlanLayout layout_of(
        self, const PlanOptions& options, int64_t num_workers, int64_t num_sequences, int64_t num_tokens) except *
    cdef bint has_other_heads(self, const PlanOptions& options) noexcept
    cdef void lay_out(self, const PcPlanLayout& layout, const PlanOptions& options) noexcept

    # Capacities of a plan of a cache, which keeps it: it takes no memory of its own, and `bind` says where it lies.
    cdef int fix(
        self, const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens) except -1

    # Writes a plan of checked lengths to host memory, num_bytes at a multiple of 16; returns the bytes in use.
    cdef int64_t plan_into(self, const PlanBatch& batch, void* target) except -1

    # Plans checked lengths, growing where it may, and copies the plan to the device. Nothing has changed where it
    # raises.
    cdef int replan(
        self, const PlanOptions& options, int64_t num_workers, const PlanBatch& batch, size_t stream) except -1

    # Memory for partial results of this many numbers a head, once for all layers. Nothing has changed where it raises.
    cdef int reserve_workspace(self, int64_t value_dim, size_t stream) except -1


cdef PcPlanLayout layout_for(
    const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens, int device) except *

# Bytes of a workspace for so many partial rows, and its parts from `address` on.
cdef int64_t place_workspace(
    Workspace* workspace, uint64_t address, const PlanOptions& options, const PcPlanLayout& layout, int64_t num_rows,
    int64_t value_dim) noexcept
