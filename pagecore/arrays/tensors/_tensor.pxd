from libc.stdint cimport int64_t

from pagecore.arrays.views.array_view cimport ArrayView


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
    cdef object owner          # keeps the memory alive
    cdef object __weakref__

    cdef ArrayView view(self) noexcept


# A tensor over `view`, which has passed check_layout; it keeps `owner` alive.
cdef Tensor tensor_of(const ArrayView& view, object owner)

# A new C-contiguous host tensor with undefined or zero elements; may raise ShapeError or NotEnoughMemory.
cdef Tensor new_tensor(int ndim, const int64_t* shape, int dtype_code, bint zeroed)

# True if the elements of the last axis are adjacent, which holds for fewer than 2 of them and for 0-d tensors.
cdef bint last_axis_contiguous(Tensor tensor) noexcept

# True if all elements are adjacent in row-major order.
cdef bint contiguous(Tensor tensor) noexcept

cdef int64_t size_of(Tensor tensor) noexcept

# A zero-copy view of any array.
cpdef Tensor as_tensor(object obj)
