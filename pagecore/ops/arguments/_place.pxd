# The device and stream of a call; see _place.pyx. `name` is that of the argument, for messages.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor


# The device of a call, which is that of its first array, and the stream that the call works on.
cdef struct Place:
    int device_type
    int device_id
    size_t stream    # CUDA handle, 0 is the default stream; 0 on the host
    void* name       # first argument, a string literal that outlives the call; borrowed, for messages


# Fills `place` for a call whose first array is `first`, which the caller passed as `example`. `stream` is the argument
# of that name: None is the current stream of the framework of `example`. UnsupportedOption for a stream on the host.
cdef int find_place(Place* place, Tensor first, str name, object example, object stream) except -1

# DeviceError if the array is not on the device of the call.
cdef int check_place(Tensor tensor, str name, const Place* place) except -1

# The same check for an array in device memory that may also be an argument of a call on the host (place is NULL).
cdef int check_reachable(Tensor tensor, str name, const Place* place) except -1

# A new C-contiguous tensor with undefined elements, as workspace of the call.
cdef Tensor new_at(int ndim, const int64_t* shape, int dtype_code, const Place* place)

# A new C-contiguous tensor for a result. `finished` returns it as an array of the framework of `example`, once the work
# that writes it is launched.
cdef Tensor new_result(int ndim, const int64_t* shape, int dtype_code, object example, const Place* place)
cdef object finished(Tensor result, object example, const Place* place)

# On CUDA: make the stream of the call wait for the work that computes `arrays`, and record that the stream writes to a
# tensor, so that a later consumer of its memory waits.
cdef int await_arrays(tuple arrays, const Place* place) except -1
cdef int note_written(Tensor tensor, const Place* place) except -1

# A C-contiguous copy of a host tensor on the device of the call, in the order of its stream; the tensor itself if it is
# there already or `place` is NULL.
cdef Tensor to_device(Tensor tensor, str name, const Place* place)

# True if all tensors are on the host. Entries may be None.
cdef bint are_on_host(tuple tensors) noexcept

# A copy on the host with the strides that the tensor has on the device; waits for the stream. A host tensor, or None,
# is returned as it is.
cdef Tensor to_host(Tensor tensor, const Place* place)
