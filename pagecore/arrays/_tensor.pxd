from libc.stdint cimport int64_t

from pagecore.arrays.array_view cimport ArrayView


cdef class Tensor:
    cdef char* data            # address of element 0
    cdef int ndim
    cdef int64_t shape_[8]
    cdef int64_t strides_[8]   # bytes
    cdef int dtype_code        # index in the dtype table of dtype.hpp
    cdef int itemsize
    cdef int device_type       # DLPack: 1 = CPU, 2 = CUDA
    cdef int device_id
    cdef bint readonly
    cdef object owner          # what keeps the memory alive
    cdef object __weakref__

    cdef ArrayView view(self) noexcept


# The tensor that lies where `view` says and keeps `owner` alive; the view has passed check_layout.
cdef Tensor tensor_of(const ArrayView& view, object owner)

# A new C-contiguous host tensor with undefined or zero elements; ShapeError or NotEnoughMemory where it cannot be.
cdef Tensor new_tensor(int ndim, const int64_t* shape, int dtype_code, bint zeroed)

# Whether the elements of the last axis follow one another (true for fewer than two of them, and for 0-d).
cdef bint last_axis_contiguous(Tensor tensor) noexcept

# Whether all elements follow one another in row-major order.
cdef bint contiguous(Tensor tensor) noexcept

cdef int64_t size_of(Tensor tensor) noexcept

# A zero-copy view of any array.
cpdef Tensor as_tensor(object obj)
