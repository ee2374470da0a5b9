# Declarations of plan.hpp.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.native.translate cimport raise_python_error


cdef extern from "cuda_src/abi/types.h" nogil:
    cdef struct PcWorkItem:
        int32_t sequence
        int32_t query_begin
        int32_t query_count
        int32_t key_begin
        int32_t key_end
        int32_t partial
        int32_t split
        int32_t num_splits


cdef extern from "pagecore/ops/plan.hpp" namespace "pagecore" nogil:
    cdef cppclass PlanOptions:
        int64_t num_query_heads
        int64_t num_kv_heads
        cbool causal
        int64_t window_left
        int64_t window_right
        int64_t sink_tokens
        cbool batch_invariant
        cbool tree
        int64_t num_workers

    cdef cppclass PlanBatch:
        const int32_t* cu_query_lens
        const int32_t* seq_lens
        int64_t num_sequences
        int64_t query_end(int64_t i) const

    cdef cppclass PlanCounts:
        int64_t num_items
        int64_t num_partial_rows

    void check_plan_batch(const PlanBatch& batch) except +raise_python_error

    cdef cppclass Plan:
        PlanOptions options
        void replan(const PlanBatch& batch) except +raise_python_error
        int64_t num_sequences() const
        PlanCounts counts() const
        const PcWorkItem* items() const
        const int32_t* cu_query_lens() const
        const int32_t* seq_lens() const
        int64_t num_bytes() const
