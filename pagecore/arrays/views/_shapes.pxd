from libc.stdint cimport int64_t

from pagecore.arrays.views.array_view cimport ArrayView


cdef int read_integers(object numbers, int64_t* out, str what) except -1
cdef int apply_index(ArrayView* view, object index) except -1
cdef int apply_axes(ArrayView* view, object axes) except -1
cdef int apply_shape(ArrayView* view, object shape) except -1
