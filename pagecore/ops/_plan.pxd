from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops.cuda._plan cimport CudaPlan
from pagecore.ops.plan cimport Plan


cdef class AttentionPlan:
    cdef Plan plan  # of the host; on CUDA its options only
    cdef readonly CudaPlan cuda  # None on the host
    cdef int64_t num_workers_given  # 0: as many as there are threads when it is planned
    cdef int num_readers  # calls that read the items now, without the GIL: meanwhile the plan must stay as it is

    cdef int check_unread(self) except -1

    # Plans a batch of num_sequences; cu_query_lens may be NULL (one query each). Nothing is allocated once the plan has
    # held a batch of this size. Raises ShapeError for lengths that make no sense, and then keeps what it held. On CUDA
    # the plan is copied to the device on `stream`, or where it is bound (see CudaPlan), must be planned into staging.
    cdef int replan(
        self, const int32_t* cu_query_lens, const int32_t* seq_lens, int num_sequences, size_t stream=*) except -1


# int32 or int64 of any stride on the host into plain int32; ShapeError for what does not fit.
cdef int copy_lens(Tensor lens, str name, vector[int32_t]& out) except -1
