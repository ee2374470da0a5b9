# Paged attention on CUDA: plans, parameters, launches. Arguments are what pagecore/ops/_attention.pyx has checked.
from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._checks cimport Place
from pagecore.ops._plan cimport AttentionPlan


# As the function of this name in ops/cpu/_cpu.pxd. seq_lens and cu_query_lens may still be on the host, everything else
# is where the call runs. `planned`, instead of `plan`, is a plan in an array of the caller, uint8 on the device; see
# plan_lengths. Without either the call plans its batch. What it needs is allocated by the framework of `example`, but
# for the workspace of `plan`.
cdef int attention(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, AttentionPlan plan, Tensor planned, double scale, bint causal, int64_t window_left,
    int64_t window_right, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask, Tensor key_scale,
    Tensor value_scale, Tensor out, Tensor lse, object example, const Place* place) except -1
