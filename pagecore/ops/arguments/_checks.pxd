# Checks of arrays; see _checks.pyx. `name` is that of the argument, for messages.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor, size_of


# A view of any array on the host or CUDA.
cdef inline Tensor any_tensor(object array, str name):
    return <Tensor>array if type(array) is Tensor else foreign_tensor(array, name)

# The same of an array that is not a Tensor. Errors of as_tensor are raised with the name.
cdef Tensor foreign_tensor(object array, str name)

# float32, float16 or bfloat16 of any rank and layout.
cpdef Tensor float_array(object array, str name)

# Any dtype that a cache stores: those of float_array(), and codes in float8_e4m3fn, float8_e5m2, int8 and uint8.
cdef Tensor stored_array(object array, str name)

# float_array() of `ndim` axes, aligned, with a contiguous last axis. Axes from `first_full` on must not be empty;
# `axes` describes all axes in messages.
cdef Tensor float_tensor(object array, str name, int ndim, int first_full, str axes)

# True if every element starts at a multiple of its size.
cdef inline bint is_aligned(Tensor tensor) noexcept:
    cdef int64_t bits = <int64_t>tensor.data
    cdef int i
    for i in range(tensor.ndim):
        bits |= tensor.strides_[i]
    return not bits & (tensor.itemsize - 1)


# The conditions are inline, because a call makes two dozen checks. The functions of the errors raise ShapeError.
cdef inline int check_aligned(Tensor tensor, str name) except -1:
    return 0 if is_aligned(tensor) else refuse_alignment(tensor, name)


cdef inline int check_rank(Tensor tensor, str name, int ndim, str axes) except -1:
    return 0 if tensor.ndim == ndim else refuse_rank(tensor, name, ndim, axes)


cdef inline int check_last_axis(Tensor tensor, str name) except -1:
    cdef int last = tensor.ndim - 1
    if last < 0 or tensor.shape_[last] <= 1 or tensor.strides_[last] == tensor.itemsize or size_of(tensor) == 0:
        return 0
    return refuse_last_axis(tensor, name)


cdef inline int check_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1:
    return 0 if tensor.shape_[axis] == expected else refuse_length(tensor, name, axis, expected, reason)


cdef int refuse_alignment(Tensor tensor, str name) except -1
cdef int refuse_rank(Tensor tensor, str name, int ndim, str axes) except -1
cdef int refuse_last_axis(Tensor tensor, str name) except -1
cdef int refuse_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1

# Checks an array that the caller passes for a result: this shape and dtype, writable, aligned, no element twice.
cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1
cdef int check_writable(Tensor tensor, str name) except -1
