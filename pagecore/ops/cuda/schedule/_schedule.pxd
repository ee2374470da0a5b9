from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.plan._plan cimport PcPlanLayout, Workspace
from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams
from pagecore.ops.plan cimport PlanOptions
from pagecore.ops.planning._plan cimport AttentionPlan


# device_plan.pxi

# Plans made by a kernel of lengths in device memory, and plans in arrays of the caller.

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


# schedule.pxi: the plan and the workspace of an attention call on CUDA.

# The plan and the workspace of a call.
cdef struct Work:
    PcPlanLayout layout
    uint64_t buffer
    int64_t num_items[2]  # -1 if only the device knows
    bint has_plan  # the caller passed the plan, and later calls with it may be captured
    bint batch_invariant  # of the plan that the call makes
    Workspace workspace


# Takes or makes the plan of a call, and fills the lengths, the schedule and the workspace of `params`; the other fields
# must be set, and `work` zeroed but for `batch_invariant`. Returns what must live until the kernels are launched.
# Arguments are those of `attention`, see _attention.pxd.
cdef list schedule(
    PcAttentionParams* params, Work* work, Tensor seq_lens, Tensor cu_query_lens, AttentionPlan plan,
    Tensor planned, bint checks_plan, object example, const Place* place)

# Finds the mask entries of each sequence, which a plan of selected keys does not: by a plan of all keys. Returns it.
cdef Tensor place_mask(PcAttentionParams* p, object example, const Place* place)

# True if a section of the plan may have items, and if it may have some with other lengths.
cdef bint may_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept
cdef bint could_have_items(const PcAttentionParams& p, const Work& work, int section) noexcept

# ShapeError, with the words of a call on the host, for lengths and offsets that do not fit queries and a table whose
# rows have `width` blocks. `cu` is empty if every sequence has one query.
cdef int check_lengths(
    vector[int32_t]& lens, vector[int32_t]& cu, int64_t num_tokens, int64_t width, int64_t block_size) except -1
