# Paged attention and merges on the host. Arguments are what ops/attention has checked; see _cpu.pxd.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._formats cimport StoredCache
from pagecore.ops.arguments._tree cimport TreeMask
from pagecore.ops.cpu.args cimport Selection
from pagecore.ops.planning._plan cimport AttentionPlan


# Optional: rows, cu_query_lens, plan, sinks, alibi_slopes, mask, tree, key_scale, value_scale, lse. `selection` may be
# empty.
cdef int attention(
    Tensor query, StoredCache key_cache, StoredCache value_cache, Tensor block_table, Tensor seq_lens,
    Tensor rows, Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left,
    int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
    TreeMask tree, Tensor key_scale, Tensor value_scale, Tensor out, Tensor lse, const Selection& selection) except -1

# out may be out_a or out_b, lse may be lse_a or lse_b. Optional: lse.
cdef int merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse) except -1

# The checks of index arrays alone, for calls that run on another device.
cdef int check_attended(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
    Tensor mask, TreeMask tree, const Selection& selection) except -1
cdef int check_scored(
    Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
    int64_t block_size) except -1
