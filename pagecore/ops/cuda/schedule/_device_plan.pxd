# Plans made by a kernel of lengths in device memory, and plans in arrays of the caller.
from libc.stdint cimport uint64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.cuda.plan._plan cimport PcPlanLayout
from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams
from pagecore.ops.plan cimport PlanOptions


cdef PlanOptions options_of(const PcAttentionParams& p) noexcept

# Plans the lengths of `p` to a buffer of the layout, in the order of the stream.
cdef int launch_plan(
    const PcAttentionParams& p, const PcPlanLayout& layout, uint64_t buffer, size_t stream, int device) except -1

# The layout of a plan in an array of the caller; ShapeError if the array does not have the shape for this call.
cdef PcPlanLayout planned_layout(Tensor planned, const PcAttentionParams& p, const Place* place) except *

# The address of the counters that follow such a plan, which are 0 before and after a launch; 0 without a plan.
cdef uint64_t planned_counters(Tensor planned, const PcPlanLayout& layout) noexcept

# ShapeError unless the plan is that of the lengths and options of the call. Waits for the stream.
cdef int check_planned(Tensor planned, const PcAttentionParams& p, const Place* place) except -1
