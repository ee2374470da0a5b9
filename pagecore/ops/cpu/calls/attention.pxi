"""Paged attention and merges on the host: Tensors become arguments of the kernels."""

from libc.stdint cimport int64_t, uint8_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport (
    MergeArgs,
    cache_array,
    index_array,
    lse_array,
    merge_many_args,
    per_head,
    table_array,
    token_array,
)
from pagecore.ops.arguments._arguments cimport Sealed, StoredCache, TreeMask, native_cache
from pagecore.ops.cpu._cpu cimport (
    attention as run_attention,
    check_attention,
    check_parts as run_check_parts,
    merge as run_merge,
    merge_many as run_merge_many,
)
from pagecore.ops.cpu.args cimport AttentionArgs, Selection
from pagecore.ops.planning._plan cimport AttentionPlan


cdef int attention(
        Tensor query, StoredCache key_cache, StoredCache value_cache, Tensor block_table, Tensor seq_lens,
        Tensor rows, Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left,
        int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
        TreeMask tree, Tensor key_scale, Tensor value_scale, Sealed sealed, Tensor out, Tensor lse,
        const Selection& selection) except -1:
    cdef AttentionArgs args
    if sealed is not None:
        args.sealed = sealed.blocks
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
    return run_attention(args, plan)


cdef int check_attended(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
        Tensor mask, TreeMask tree, Sealed sealed, const Selection& selection) except -1:
    cdef AttentionArgs args
    if sealed is not None:
        args.sealed = sealed.blocks
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
    return check_attention(args)


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
    return check_attention(args)


cdef void set_mask(AttentionArgs* args, Tensor mask) noexcept:
    if mask is None:
        return
    args.mask = <const uint8_t*>mask.data
    args.mask_size = mask.shape_[0]


cdef int merge(
        Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor mask, Tensor out, Tensor lse) except -1:
    cdef MergeArgs args
    args.out_a = token_array(out_a)
    args.out_b = token_array(out_b)
    args.out = token_array(out)
    args.lse_a = lse_array(lse_a)
    args.lse_b = lse_array(lse_b)
    args.lse = lse_array(lse)
    if mask is not None:
        args.mask, args.mask_stride = mask.data, mask.strides_[0]
    return run_merge(args)


cdef int merge_many(Tensor parts, Tensor lses, Tensor cu_parts, Tensor out, Tensor lse) except -1:
    return run_merge_many(merge_many_args(parts, lses, cu_parts, out, lse))


cdef int check_parts(Tensor cu_parts, int64_t num_parts) except -1:
    return run_check_parts(index_array(cu_parts), num_parts)
