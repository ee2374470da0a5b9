"""Calls of the host kernels: C++ errors become exceptions, and work runs without the GIL.

This module alone links the kernels. Those in `calls` fill the arguments from Tensors.
"""

from libc.stdint cimport int64_t
from libcpp.string cimport string

from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport BlockArray, Cache, Indices, MergeArgs, MergeManyArgs, WriteArgs
from pagecore.ops.cpu.args cimport (
    AttentionArgs,
    Codec,
    HostCalls,
    PackedSequences,
    PlannedMoves,
    PlanView,
    current_isa,
    native_calls,
    plan_transfer,
    run_attention,
    run_check_attention,
    run_check_copied,
    run_check_independent,
    run_check_parts,
    run_check_sequences,
    run_check_slots,
    run_check_transferred,
    run_copy,
    run_dequantize,
    run_gather,
    run_merge,
    run_merge_many,
    run_quantize,
    run_scatter,
    run_transfer,
    run_write,
    sum_lengths,
)
from pagecore.ops.cpu.codecs.affine_codes cimport run_dequantize_affine, run_quantize_affine
from pagecore.ops.cpu.codecs.conversions cimport (
    BlockConversion,
    LatentConversion,
    run_convert_blocks,
    run_convert_latent_rows,
)
from pagecore.ops.cpu.codecs.hadamard cimport run_hadamard
from pagecore.ops.cpu.codecs.seal cimport run_check_sealed_pairs, run_seal_blocks, run_unseal_blocks
from pagecore.ops.cpu.codecs.state_codec cimport run_dequantize_states, run_quantize_states
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
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys, run_move_slots, run_renew_bounds
from pagecore.ops.cpu.sparse.select cimport (
    ScoreArgs,
    ScoreBatch,
    SelectArgs,
    SummaryArgs,
    run_score,
    run_select,
    run_summarise,
)
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.errors import UnsupportedOption, shown

cdef extern from "pagecore/ops/cpu/dispatch.hpp" namespace "pagecore::cpu" nogil:
    void choose_isa "pagecore::cpu::set_isa"(const string& name) except +raise_python_error
    vector[string] list_isas "pagecore::cpu::available_isas"() except +raise_python_error


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


cdef int check_parts(const Indices& cu_parts, int64_t num_parts) except -1:
    run_check_parts(cu_parts, num_parts)
    return 0


cdef int write_kv(const WriteArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_write(args, num_threads)
    return 0


cdef int quantize(const Codec& codec) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_quantize(codec, num_threads)
    return 0


cdef int dequantize(const Codec& codec) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_dequantize(codec, num_threads)
    return 0


cdef int hadamard(const HadamardRows& rows) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_hadamard(rows, num_threads)
    return 0


cdef int convert_affine(const AffineCodes& codes, bint restores) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        if restores:
            run_dequantize_affine(codes, num_threads)
        else:
            run_quantize_affine(codes, num_threads)
    return 0


cdef int convert_sealed_blocks(const SealArgs& args, bint restores) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        if restores:
            run_unseal_blocks(args, num_threads)
        else:
            run_seal_blocks(args, num_threads)
    return 0


cdef int check_sealed_pairs(const SealArgs& args, bint restores) except -1:
    run_check_sealed_pairs(args, restores)
    return 0


cdef void convert_states(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads,
        bint restores) noexcept nogil:
    if restores:
        run_dequantize_states(plane, pairs, count, num_threads)
    else:
        run_quantize_states(plane, pairs, count, num_threads)


# ---- copies of blocks

cdef int copy_blocks(
        const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_copy(arrays, sources, targets, num_threads)
    return 0


cdef int transfer_blocks(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t lowest) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_transfer(sources, targets, source_ids, target_ids, num_threads, lowest)
    return 0


cdef int gather_blocks(
        const vector[BlockArray]& caches, const vector[BlockArray]& packed, const PackedSequences& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_gather(caches, packed, batch, num_threads)
    return 0


cdef int scatter_blocks(
        const vector[BlockArray]& packed, const vector[BlockArray]& caches, const PackedSequences& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_scatter(packed, caches, batch, num_threads)
    return 0


# ---- checks of index arrays alone

cdef int check_attention(const AttentionArgs& args) except -1:
    run_check_attention(args)
    return 0


cdef int check_slots(const Indices& slots, int64_t num_tokens, const Cache& cache) except -1:
    run_check_slots(slots, num_tokens, cache)
    return 0


cdef int check_copied(const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1:
    run_check_copied(arrays, sources, targets)
    return 0


cdef int check_transferred(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t lowest) except -1:
    run_check_transferred(sources, targets, source_ids, target_ids, lowest)
    return 0


cdef int check_independent(const Indices& sources, const Indices& targets, bint one_cache) except -1:
    run_check_independent(sources, targets, one_cache)
    return 0


cdef int check_sequences(const PackedSequences& batch) except -1:
    run_check_sequences(batch)
    return 0


cdef int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size) except -1:
    return sum_lengths(seq_lens, width, block_size)


# ---- sparse selection

cdef int score(const ScoreArgs& args, const ScoreBatch& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_score(args, batch, num_threads)
    return 0


cdef int select(const SelectArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_select(args, num_threads)
    return 0


cdef int summarise(const SummaryArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_summarise(args, num_threads)
    return 0


cdef void move_slots(
        const vector[BlockArray]& arrays, const vector[BoundedKeys]& bounds, const vector[int64_t]& sources,
        const vector[int64_t]& targets, int64_t num_threads) noexcept nogil:
    run_move_slots(arrays, sources.data(), targets.data(), <int64_t>sources.size(), num_threads)
    run_renew_bounds(bounds, targets.data(), <int64_t>targets.size(), num_threads)


# ---- latent attention

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


cdef int convert_blocks(
        const vector[BlockConversion]& caches, const vector[LatentConversion]& latents,
        const vector[BlockArray]& copied_sources, const vector[BlockArray]& copied_targets, const Indices& sources,
        const Indices& targets, int64_t lowest) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    cdef PlannedMoves copies
    with nogil:
        if copied_sources.size() > 0:
            copies = plan_transfer(copied_sources, copied_targets, sources, targets, num_threads, lowest)
        run_convert_blocks(caches, latents, copies, sources, targets, num_threads, lowest)
    return 0


cdef int convert_latent_rows(const LatentConversion& rows) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_convert_latent_rows(rows, num_threads)
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


cdef const HostCalls* host_calls() noexcept:
    return &native_calls()


# ---- instruction sets

cpdef str isa():
    """Return the instruction set that the host kernels use: one of `available_isas`."""
    return current_isa().decode()


cpdef str set_isa(object name):
    """Select the instruction set of the host kernels, and return it.

    Parameters
    ----------
    name : str or None
        One of `available_isas`. None selects the environment variable PAGECORE_ISA if it is set, else the one that
        takes the least time: the widest, except for x86-64-v4-bf16 on Intel's processors.

    Raises
    ------
    UnsupportedOption
        The instruction set is not available on this machine or in this build. Nothing has changed.
    """
    if name is not None and (not isinstance(name, str) or not name.isascii() or not 0 < len(name) < 80):
        raise UnsupportedOption(
            f"instruction set {shown(name)} is unknown; this machine has {', '.join(available_isas())}"
        )
    cdef bytes encoded = b"" if name is None else (<str>name).encode()
    cdef str answer = encoded.decode()  # before anything changes: memory may run out
    cdef string chosen, before
    chosen.assign(<const char*>encoded, <size_t>len(encoded))
    if name is not None:
        choose_isa(chosen)
        return answer
    before.assign(current_isa())
    choose_isa(chosen)
    try:
        return isa()
    except MemoryError:
        choose_isa(before)
        raise


cpdef tuple available_isas():
    """Return the names of the instruction sets that this machine and this build have, the widest first."""
    cdef vector[string] found = list_isas()
    cdef size_t i
    names = []
    for i in range(found.size()):
        names.append(found[i].c_str()[:found[i].size()].decode())
    return tuple(names)
