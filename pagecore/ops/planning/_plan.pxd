from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.cuda.plan._plan cimport CudaPlan
from pagecore.ops.plan cimport Plan


cdef class AttentionPlan:
    cdef Plan plan  # plan on the host; on CUDA only its options are used
    cdef readonly CudaPlan cuda  # None on the host
    cdef int64_t num_workers_given  # 0: num_threads at the time of planning
    cdef int num_readers  # calls that read the items now, without the GIL; the plan must not change meanwhile

    cdef int check_unread(self) except -1

    # Set whether the next batches have trees; on CUDA also of a plan that is bound to memory of a cache.
    cdef void set_tree(self, bint tree) noexcept

    # Replace the plan by one for num_sequences; cu_query_lens may be NULL (one query each). Nothing is allocated if the
    # plan has held a batch of this size. ShapeError for invalid lengths; the plan is then unchanged. On CUDA the plan
    # is copied to the device on `stream`. A plan bound to memory of a cache (see CudaPlan) raises DeviceError.
    cdef int replan(
        self, const int32_t* cu_query_lens, const int32_t* seq_lens, int num_sequences, size_t stream=*) except -1


# Copy int32 or int64 of any stride on the host to int32; ShapeError for a value that does not fit.
cdef int copy_lens(Tensor lens, str name, vector[int32_t]& out) except -1
