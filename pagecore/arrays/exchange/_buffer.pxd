from cpython.buffer cimport Py_buffer

from pagecore.arrays.views.array_view cimport ArrayView


cdef class Borrowed:
    cdef Py_buffer buffer


cdef class Span:
    cdef char* begin
    cdef Py_ssize_t nbytes
    cdef bint readonly
    cdef object owner


cdef Borrowed import_buffer(object obj, ArrayView* view)
cdef Span span_of(const ArrayView& view, object owner, Py_ssize_t* offset)
