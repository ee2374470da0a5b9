# Plans that the device makes of lengths that only it knows, and plans in arrays of the caller.
from libc.stdint cimport uint64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._place cimport Place
from pagecore.ops.cuda._plan cimport PcPlanLayout
from pagecore.ops.cuda.abi_attention cimport PcAttentionParams
from pagecore.ops.plan cimport PlanOptions


cdef PlanOptions options_of(const PcAttentionParams& p) noexcept

# Plans the lengths of `p` into a buffer of the layout, in the order of the stream.
cdef int launch_plan(
    const PcAttentionParams& p, const PcPlanLayout& layout, uint64_t buffer, size_t stream, int device) except -1

# The layout of a plan in an array of the caller; ShapeError where the array is not that of a plan of this call.
cdef PcPlanLayout planned_layout(Tensor planned, const PcAttentionParams& p, const Place* place) except *

# The address of the counters behind such a plan, which are 0 before and after a launch; 0 without a plan.
cdef uint64_t planned_counters(Tensor planned, const PcPlanLayout& layout) noexcept

# Under `debug`: ShapeError where the plan is not the one that the lengths and options of the call give.
cdef int check_planned(Tensor planned, const PcAttentionParams& p, const Place* place) except -1
