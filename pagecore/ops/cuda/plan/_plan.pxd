# Plans in device memory; see cuda_plan.hpp for their content.
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp cimport bool as cbool

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.plan cimport PlanBatch, PlanOptions


cdef extern from "cuda_src/abi/plan.h" nogil:
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


cdef extern from "pagecore/ops/cuda/plan/plan_layout.hpp" namespace "pagecore" nogil:
    cdef cppclass CudaPlanShape:
        int64_t num_query_heads
        int64_t num_kv_heads
        cbool batch_invariant
        int64_t max_sequences
        int64_t max_tokens
        int64_t decode_ctas
        int64_t prompt_ctas
        cbool has_sinks
        int64_t window_keys

    const int64_t kMaxPlanCtas
    PcPlanLayout make_layout(const CudaPlanShape& shape) except +raise_python_error
    int64_t planned_bytes(const PcPlanLayout& layout)


cdef extern from "pagecore/ops/cuda/plan/cuda_plan.hpp" namespace "pagecore" nogil:
    cdef cppclass CudaPlanner:
        int64_t plan_into(
            const PcPlanLayout& layout, const PlanOptions& options, const PlanBatch& batch, void* buffer
        ) except +raise_python_error


# Addresses of the partial results of a call.
cdef struct Workspace:
    uint64_t partial_out
    uint64_t partial_lse
    uint64_t counters


cdef class CudaPlan:
    cdef readonly int device
    cdef readonly bint is_fixed  # capacities, heads, workers and therefore addresses never change
    cdef bint is_bound  # the buffer belongs to a cache
    cdef PlanOptions options
    cdef PcPlanLayout layout
    cdef PcPlanHead head  # head of the last plan that the host made
    cdef readonly uint64_t address  # address of the plan in device memory
    cdef readonly object workspace_memory
    cdef object memory
    cdef list outgrown  # with is_fixed: former workspaces that graphs may still write to
    cdef object staging  # a PinnedRing, or None
    cdef object sent  # memory of the staging slot that the plan was last sent from
    cdef int64_t value_dim
    cdef Workspace workspace
    cdef CudaPlanner planner

    # The layout for a batch. A plan of fixed size raises ShapeError for a batch beyond its capacities, other heads or
    # other workers.
    cdef PcPlanLayout layout_of(
        self, const PlanOptions& options, int64_t num_workers, int64_t num_sequences, int64_t num_tokens) except *
    cdef bint has_other_heads(self, const PlanOptions& options) noexcept
    cdef void lay_out(self, const PcPlanLayout& layout, const PlanOptions& options) noexcept

    # Fix the capacities of a plan of a cache. The plan allocates no memory; `bind` sets its address.
    cdef int fix(
        self, const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens) except -1

    # Write a plan of checked lengths to host memory, num_bytes at a multiple of 16; return the bytes in use.
    cdef int64_t plan_into(self, const PlanBatch& batch, void* target) except -1

    # Plan checked lengths, grow if the size is not fixed, and copy the plan to the device. After an error nothing has
    # changed.
    cdef int replan(
        self, const PlanOptions& options, int64_t num_workers, const PlanBatch& batch, size_t stream) except -1

    # Reserve memory for partial results of value_dim numbers for each head, once for all layers. After an error nothing
    # has changed.
    cdef int reserve_workspace(self, int64_t value_dim, size_t stream) except -1


cdef PcPlanLayout layout_for(
    const PlanOptions& options, int64_t num_workers, int64_t max_sequences, int64_t max_tokens, int device) except *

# Fill `workspace` with the addresses of its parts for num_rows partial rows, from `address` on; return its bytes.
cdef int64_t place_workspace(
    Workspace* workspace, uint64_t address, const PlanOptions& options, const PcPlanLayout& layout, int64_t num_rows,
    int64_t value_dim) noexcept
