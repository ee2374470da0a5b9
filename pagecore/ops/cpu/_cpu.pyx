"""Bindings of the host kernels: Tensors become arguments, C++ errors become exceptions, work runs without the GIL."""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t
from libcpp.vector cimport vector

from pagecore.arrays.dtypes.codes cimport DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport (
    BlockArray,
    Indices,
    MergeArgs,
    WriteArgs,
    cache_array,
    fill_block_arrays,
    index_array,
    lse_array,
    pair_column,
    per_head,
    table_array,
    token_array,
)
from pagecore.ops.arguments._formats cimport StoredCache, native_cache
from pagecore.ops.arguments._tree cimport TreeMask
from pagecore.ops.cpu.args cimport (
    AttentionArgs,
    Codec,
    HostCalls,
    PackedSequences,
    PlanView,
    Selection,
    choose_isa,
    current_isa,
    list_isas,
    native_calls,
    run_attention,
    run_check_attention,
    run_check_copied,
    run_check_independent,
    run_check_sequences,
    run_check_slots,
    run_check_transferred,
    run_copy,
    run_dequantize,
    run_gather,
    run_merge,
    run_quantize,
    run_scatter,
    run_transfer,
    run_write,
    sum_lengths,
)
from pagecore.ops.cpu.codecs.conversions cimport (
    BlockConversion,
    LatentConversion,
    run_convert_blocks,
    run_convert_latent_rows,
)
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


cdef int attention(
        Tensor query, StoredCache key_cache, StoredCache value_cache, Tensor block_table, Tensor seq_lens,
        Tensor rows, Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left,
        int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
        TreeMask tree, Tensor key_scale, Tensor value_scale, Tensor out, Tensor lse,
        const Selection& selection) except -1:
    cdef AttentionArgs args
    cdef PlanView view
    cdef int64_t num_threads = threads_of_a_call()
    args.query = token_array(query)
    args.key = native_cache(key_cache)
    args.value = native_cache(value_cache)
    args.table = table_array(block_table)
    args.seq_lens = index_array(seq_lens)
    args.rows = index_array(rows)
    args.cu_query_lens = index_array(cu_query_lens)
    args.scale, args.softcap = scale, softcap
    args.causal, args.window_left, args.window_right = causal, window_left, window_right
    args.sink_tokens = sink_tokens
    args.sinks = per_head(sinks)
    args.alibi_slopes = per_head(alibi_slopes)
    args.key_scale = per_head(key_scale)
    args.value_scale = per_head(value_scale)
    set_mask(&args, mask)
    if tree is not None:
        args.tree = tree.native()
    args.out = token_array(out)
    args.lse = lse_array(lse)
    args.selection = selection
    cdef const PlanView* given = begin_reading(plan, view)
    try:
        with nogil:
            run_attention(args, given, num_threads)
    finally:
        end_reading(plan)
    return 0


cdef int write_kv(
        Tensor key, Tensor value, StoredCache key_cache, StoredCache value_cache, Tensor slot_mapping,
        Tensor key_scale, Tensor value_scale, bint four_over_six) except -1:
    cdef WriteArgs args
    args.key = token_array(key)
    args.value = token_array(value)
    args.key_cache = native_cache(key_cache)
    args.value_cache = native_cache(value_cache)
    args.four_over_six = four_over_six
    args.slots = index_array(slot_mapping)
    args.key_scale = per_head(key_scale)
    args.value_scale = per_head(value_scale)
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


cdef void convert_states(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads,
        bint restores) noexcept nogil:
    if restores:
        run_dequantize_states(plane, pairs, count, num_threads)
    else:
        run_quantize_states(plane, pairs, count, num_threads)


# ---- checks of index arrays alone

cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1:
    run_check_slots(index_array(slot_mapping), key.shape_[0], cache_array(key_cache))
    return 0


cdef int check_attended(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
        Tensor mask, TreeMask tree, const Selection& selection) except -1:
    cdef AttentionArgs args
    args.query = token_array(query)
    args.key = cache_array(key_cache)
    args.value = cache_array(value_cache)
    args.selection = selection
    args.table = table_array(block_table)
    args.seq_lens = index_array(seq_lens)
    args.rows = index_array(rows)
    args.cu_query_lens = index_array(cu_query_lens)
    set_mask(&args, mask)
    if tree is not None:
        args.tree = tree.native()
    args.causal, args.window_left, args.window_right = causal, window_left, window_right
    args.sink_tokens = sink_tokens
    run_check_attention(args)
    return 0


cdef int check_scored(
        Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
        int64_t block_size) except -1:
    cdef AttentionArgs args
    args.query = token_array(query)
    args.key.num_blocks, args.key.block_size = num_blocks, block_size
    args.value = args.key
    args.table = table_array(block_table)
    args.seq_lens, args.rows = index_array(seq_lens), index_array(rows)
    args.cu_query_lens = index_array(cu_query_lens)
    run_check_attention(args)
    return 0


cdef void set_mask(AttentionArgs* args, Tensor mask) noexcept:
    if mask is None:
        return
    args.mask = <const uint8_t*>mask.data
    args.mask_size = mask.shape_[0]


cdef int check_copied(list caches, Tensor pairs) except -1:
    cdef vector[BlockArray] arrays
    fill_block_arrays(arrays, caches)
    run_check_copied(arrays, pair_column(pairs, 0), pair_column(pairs, 1))
    return 0


cdef int check_sequences(
        list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1:
    if caches:
        run_check_sequences(packed_sequences(caches, num_tokens, block_table, seq_lens, rows, 1))
    return 0


cdef int check_transferred(list sources, list targets, Tensor pairs, int64_t lowest) except -1:
    cdef vector[BlockArray] from_arrays, to_arrays
    fill_block_arrays(from_arrays, sources)
    fill_block_arrays(to_arrays, targets)
    run_check_transferred(from_arrays, to_arrays, pair_column(pairs, 0), pair_column(pairs, 1), lowest)
    return 0


cdef int check_independent(Tensor pairs, bint one_cache) except -1:
    run_check_independent(pair_column(pairs, 0), pair_column(pairs, 1), one_cache)
    return 0


cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1:
    return sum_lengths(index_array(seq_lens), width, block_size)


# ---- copies of blocks

cdef int copy_blocks(list caches, Tensor pairs) except -1:
    cdef vector[BlockArray] arrays
    fill_block_arrays(arrays, caches)
    cdef Indices sources = pair_column(pairs, 0), targets = pair_column(pairs, 1)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_copy(arrays, sources, targets, num_threads)
    return 0


cdef int transfer_blocks(list sources, list targets, Tensor pairs, int64_t lowest) except -1:
    cdef vector[BlockArray] from_arrays, to_arrays
    fill_block_arrays(from_arrays, sources)
    fill_block_arrays(to_arrays, targets)
    cdef Indices source_ids = pair_column(pairs, 0), target_ids = pair_column(pairs, 1)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_transfer(from_arrays, to_arrays, source_ids, target_ids, num_threads, lowest)
    return 0


cdef PackedSequences packed_sequences(
        list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows,
        int64_t lowest) except *:
    cdef PackedSequences batch
    cdef Tensor cache
    batch.table = table_array(block_table)
    batch.seq_lens = index_array(seq_lens)
    batch.rows = index_array(rows)
    batch.num_blocks = INT64_MAX
    for cache in caches:
        batch.block_size = cache.shape_[1]
        batch.num_blocks = min(batch.num_blocks, cache.shape_[0])
    batch.num_tokens = num_tokens
    batch.lowest = lowest
    return batch


cdef int gather_blocks(
        list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1:
    if not caches:
        return 0
    cdef int64_t num_tokens = (<Tensor>packed[0]).shape_[0], num_threads = threads_of_a_call()
    cdef PackedSequences batch = packed_sequences(caches, num_tokens, block_table, seq_lens, rows, lowest)
    cdef vector[BlockArray] blocks, tokens
    fill_block_arrays(blocks, caches)
    fill_block_arrays(tokens, packed)
    with nogil:
        run_gather(blocks, tokens, batch, num_threads)
    return 0


cdef int scatter_blocks(
        list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1:
    if not caches:
        return 0
    cdef int64_t num_tokens = (<Tensor>packed[0]).shape_[0], num_threads = threads_of_a_call()
    cdef PackedSequences batch = packed_sequences(caches, num_tokens, block_table, seq_lens, rows, lowest)
    cdef vector[BlockArray] blocks, tokens
    fill_block_arrays(blocks, caches)
    fill_block_arrays(tokens, packed)
    with nogil:
        run_scatter(tokens, blocks, batch, num_threads)
    return 0


# ---- merge

cdef int merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse) except -1:
    cdef MergeArgs args
    args.out_a = token_array(out_a)
    args.out_b = token_array(out_b)
    args.out = token_array(out)
    args.lse_a = lse_array(lse_a)
    args.lse_b = lse_array(lse_b)
    args.lse = lse_array(lse)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_merge(args, num_threads)
    return 0


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
        const vector[BlockConversion]& caches, const vector[LatentConversion]& latents, Tensor pairs,
        int64_t lowest) except -1:
    cdef Indices sources = pair_column(pairs, 0), targets = pair_column(pairs, 1)
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_convert_blocks(caches, latents, sources, targets, num_threads, lowest)
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
        const LatentCache& cache, double factor, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor out, int64_t lowest) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    cdef PackedSequences batch
    cdef LatentRows packed
    batch.table = table_array(block_table)
    batch.seq_lens = index_array(seq_lens)
    batch.rows = index_array(rows)
    batch.block_size, batch.num_blocks = cache.block_size, cache.num_blocks
    batch.num_tokens, batch.lowest = out.shape_[0], lowest
    packed.data, packed.stride, packed.type = out.data, out.strides_[0], <DType>out.dtype_code
    with nogil:
        run_gather_latent(cache, <float>factor, batch, packed, num_threads)
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
        One of `available_isas`. None selects the environment variable PAGECORE_ISA if it is set, else the widest.

    Raises
    ------
    UnsupportedOption
        The instruction set is not available on this machine or in this build. Nothing has changed.
    """
    if name is not None and (not isinstance(name, str) or not name.isascii() or not 0 < len(name) < 80):
        raise UnsupportedOption(
            f"instruction set {shown(name)} is unknown; this machine has {', '.join(available_isas())}"
        )
    choose_isa(b"" if name is None else (<str>name).encode())
    return isa()


cpdef tuple available_isas():
    """Return the names of the instruction sets that this machine and this build have, the widest first."""
    return tuple([name.decode() for name in list_isas()])
