from libc.stdint cimport int64_t

from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/arrays/views/array_view.hpp" namespace "pagecore" nogil:
    const int kMaxDims

    cdef struct ArrayView:
        char* data
        int ndim
        int64_t* shape
        int64_t* strides
        int dtype
        int device_type
        int device_id
        bint readonly

    cdef struct Extent:
        int64_t low
        int64_t high

    int item_bytes(const ArrayView& view)
    int64_t element_count(int ndim, const int64_t* shape)
    int64_t checked_element_count(int ndim, const int64_t* shape, int item) except +raise_python_error
    Extent checked_extent(const ArrayView& view) except +raise_python_error
    void check_layout(const ArrayView& view) except +raise_python_error
    void set_contiguous_strides(ArrayView& view)
    bint is_contiguous(const ArrayView& view)
    bint try_reshape(ArrayView& view, int ndim, const int64_t* shape)
