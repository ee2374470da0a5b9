"""Latent attention, writes and gathers of latents, and their indexer."""

from libc.stdint cimport int64_t

from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.cpu.args cimport PackedSequences, PlanView
from pagecore.ops.cpu.latent.latent cimport (
    IndexScoreCall,
    IndexWriteArgs,
    LatentArgs,
    LatentCache,
    LatentRows,
    LatentWriteArgs,
    SlotsArgs,
    TopkArgs,
    run_check_latent,
    run_gather_latent,
    run_index_scores,
    run_latent_attention,
    run_select_topk,
    run_slots_of,
    run_write_index,
    run_write_latent,
)
from pagecore.ops.planning._plan cimport AttentionPlan


cdef int latent_attention(const LatentArgs& args, AttentionPlan plan) except -1:
    cdef PlanView view
    cdef int64_t num_threads = threads_of_a_call()
    cdef const PlanView* given = begin_reading(plan, view)
    try:
        with nogil:
            run_latent_attention(args, given, num_threads)
    finally:
        end_reading(plan)
    return 0


cdef int check_latent(const LatentArgs& args) except -1:
    run_check_latent(args)
    return 0


cdef int write_latent(const LatentWriteArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_write_latent(args, num_threads)
    return 0


cdef int write_index(const IndexWriteArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_write_index(args, num_threads)
    return 0


cdef int gather_latent(
        const LatentCache& cache, float factor, const PackedSequences& batch,
        const LatentRows& packed) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_gather_latent(cache, factor, batch, packed, num_threads)
    return 0


cdef int index_scores(const IndexScoreCall& call) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_index_scores(call, num_threads)
    return 0


cdef int select_topk(const TopkArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_select_topk(args, num_threads)
    return 0


cdef int slots_of(const SlotsArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_slots_of(args, num_threads)
    return 0
