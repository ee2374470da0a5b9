# Paged attention on CUDA: parameters and launches. Arguments are what ops/attention/_attention.pyx has checked.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._formats cimport StoredCache
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.arguments._selected cimport Selected
from pagecore.ops.arguments._tree cimport TreeMask
from pagecore.ops.planning._plan cimport AttentionPlan


# Launches paged attention. seq_lens and cu_query_lens may be on the host; all other Tensors are on the device of the
# call. key_scale and value_scale are given factors, one for each head. rows, cu_query_lens, sinks, alibi_slopes,
# mask, tree, key_scale, value_scale and lse may be None.
#
# `selected` is None, or has lists on the device; such a call plans its own batch, batch-invariant if `plan` is.
#
# `planned` is a plan in an array of the caller, uint8 on the device (see plan_lengths); it excludes `plan`. With
# `checks_plan` it is compared with the lengths and options of the call, which waits for the device. Without either plan
# the call plans its batch. The framework of `example` allocates the workspace, unless `plan` has one.
cdef int attention(
    Tensor query, StoredCache keys, StoredCache values, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, AttentionPlan plan, Tensor planned, double scale, bint causal, int64_t window_left,
    int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
    TreeMask tree, Tensor key_scale, Tensor value_scale, Selected selected, Tensor out, Tensor lse, bint checks_plan,
    object example, const Place* place) except -1
