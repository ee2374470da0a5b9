"""Attention over the host's caches, and merges of partial results."""

from libc.stdint cimport int64_t

from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport MergeArgs, MergeManyArgs
from pagecore.ops.cpu.args cimport AttentionArgs, PlanView, run_attention, run_merge, run_merge_many
from pagecore.ops.planning._plan cimport AttentionPlan


# Fills the view of a plan that a call reads, and returns its address; NULL without a plan. The plan cannot be changed
# until the call ends its reading.
cdef const PlanView* begin_reading(AttentionPlan plan, PlanView& view) noexcept:
    if plan is None:
        return NULL
    plan.num_readers += 1
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
    view.sink_tokens = plan.plan.options.sink_tokens
    view.batch_invariant = plan.plan.options.batch_invariant
    view.tree = plan.plan.options.tree
    return &view


cdef void end_reading(AttentionPlan plan) noexcept:
    if plan is not None:
        plan.num_readers -= 1


cdef int attention(const AttentionArgs& args, AttentionPlan plan) except -1:
    cdef PlanView view
    cdef int64_t num_threads = threads_of_a_call()
    cdef const PlanView* given = begin_reading(plan, view)
    try:
        with nogil:
            run_attention(args, given, num_threads)
    finally:
        end_reading(plan)
    return 0


cdef int merge(const MergeArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_merge(args, num_threads)
    return 0


cdef int merge_many(const MergeManyArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_merge_many(args, num_threads)
    return 0
