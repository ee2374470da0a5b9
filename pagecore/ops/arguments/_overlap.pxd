# cython: cdivision=True
# Checks that arrays share no memory; see _overlap.pyx. Arrays on different devices share none, and neither does None. A
# check takes nanoseconds if the byte ranges are disjoint.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor


# The bytes from the first to the last element of an array; an empty range without elements.
cdef struct ByteRange:
    int64_t low
    int64_t end


cdef inline ByteRange range_of(Tensor tensor) noexcept:
    cdef ByteRange found
    cdef int64_t low = 0, high = tensor.itemsize, reach
    cdef int i
    found.low = found.end = 0
    if tensor is None:
        return found
    for i in range(tensor.ndim):
        if tensor.shape_[i] == 0:
            return found
        reach = (tensor.shape_[i] - 1) * tensor.strides_[i]
        if reach < 0:
            low += reach
        else:
            high += reach
    found.low, found.end = <int64_t>tensor.data + low, <int64_t>tensor.data + high
    return found


cdef inline bint ranges_meet(ByteRange a, ByteRange b) noexcept:
    return a.low < b.end and b.low < a.end


# abs() would create Python objects.
cdef inline int64_t magnitude(int64_t value) noexcept:
    return -value if value < 0 else value


# True if, of any two axes, the stride of one spans all of the other, which holds for nearly every array: then no two
# elements overlap. The order of the axes is tried first.
cdef inline bint are_nested(Tensor tensor) noexcept:
    cdef int64_t span = tensor.itemsize
    cdef int i
    for i in range(tensor.ndim - 1, -1, -1):
        if tensor.shape_[i] > 1:
            if tensor.strides_[i] < span:
                return are_nested_in_any_order(tensor)
            span = tensor.strides_[i] * tensor.shape_[i]
    return True


cdef inline bint are_nested_in_any_order(Tensor tensor) noexcept:
    cdef int64_t stride, other
    cdef int i, j
    for i in range(tensor.ndim):
        if tensor.shape_[i] < 2:
            continue
        stride = magnitude(tensor.strides_[i])
        if stride < tensor.itemsize:
            return False
        for j in range(i):
            other = magnitude(tensor.strides_[j])
            if tensor.shape_[j] > 1 and other < stride * tensor.shape_[i] and stride < other * tensor.shape_[j]:
                return False
    return True


# True if two arrays occupy disjoint ranges modulo the stride of the first axis of `a`, as planes of one pool do.
cdef inline bint are_interleaved(Tensor a, Tensor b) noexcept:
    cdef int64_t period = magnitude(a.strides_[0])
    cdef int64_t offset
    if a.ndim == 0 or a.shape_[0] < 2 or period == 0:
        return False
    offset = (range_of(b).low - range_of(a).low) % period
    if offset < 0:
        offset += period
    return span_within(a, period) <= offset and offset + span_within(b, period) <= period


cdef inline int64_t span_within(Tensor tensor, int64_t period) noexcept:
    cdef int64_t span = tensor.itemsize, stride
    cdef int i
    for i in range(tensor.ndim):
        stride = magnitude(tensor.strides_[i])
        if stride < period and stride != 0 or stride % period != 0:
            span += (tensor.shape_[i] - 1) * stride
    return span


# ShapeError if two elements of a written array share bytes.
cdef int check_own_elements(Tensor tensor, str name) except -1

# UnsupportedOption if a written array shares bytes with another one.
cdef int check_apart(Tensor written, str name, Tensor other, str other_name) except -1

# check_apart() that accepts the same array: one address, shape and strides.
cdef int check_apart_or_same(Tensor written, str name, Tensor other, str other_name) except -1

# check_apart() for lists: each array of `written` against the others of `written` and those of `read`.
cdef int check_all_apart(list written, str name, list read, str other_name, bint many) except -1

# True if a byte belongs to both arrays. Memory is not read, so arrays may be on a device.
cpdef bint shares_memory(Tensor a, Tensor b) except -1

# True if a byte belongs to two elements of the array.
cpdef bint overlaps_elements(Tensor tensor) except -1
