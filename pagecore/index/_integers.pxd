from libc.stdint cimport int32_t, int64_t

ctypedef const int32_t const_int32  # Cython cannot spell them inside a template
ctypedef const int64_t const_int64


cdef class Integers:
    """int32 values of a caller, copied so that no other thread or callback changes them after they are checked."""
    cdef const int32_t* data
    cdef Py_ssize_t size
    cdef bint is_scalar      # made from an int, which may apply to several rows
    cdef int32_t single
    cdef void* owned         # the copy, or NULL
    cdef Py_buffer buffer    # of the caller's memory, while it is borrowed
    cdef bint borrowed


cdef class Slots:
    """int64 values of a caller, copied."""
    cdef const int64_t* data
    cdef Py_ssize_t size
    cdef bint is_scalar
    cdef int64_t single
    cdef void* owned
    cdef Py_buffer buffer
    cdef bint borrowed


# The values of `obj`, an int or anything that NumPy converts to a one-dimensional integer array; raises `error` for a
# value that does not fit int32. `what` names a value in messages.
cdef Integers as_integers(object obj, str what, object error)

# as_integers() without the copy: the values may be the caller's memory, which other threads may write at any time. The
# code that reads them must stay within bounds for any value. own() copies the values from `first` on; values before
# `first` must not be read afterwards.
cdef Integers borrowed_integers(object obj, str what, object error)
cdef int own(Integers values, Py_ssize_t first) except -1

# 64-bit versions of as_integers() and borrowed_integers().
cdef Slots as_slots(object obj, str what, object error)
cdef Slots borrowed_slots(object obj, str what, object error)

# An int64 from anything with __index__, clamped to the range of int64.
cdef int64_t as_int64(object obj, str what) except? -1

# A new int32 array and the address of its first element.
cdef object new_int32(Py_ssize_t size, int32_t** data)

# A new int64 array and the address of its first element.
cdef object new_int64(Py_ssize_t size, int64_t** data)

# The address of element 0 of `array`, an ndarray; the caller keeps it alive.
cdef void* address_of(object array) except? NULL

# A row id; raises InvalidSequence for a value that cannot be a row id.
cdef int32_t as_row(object row) except? -1

# `counts` as one value for each of n rows; an int applies to all rows. ShapeError for another number of values.
cdef Integers as_counts(object counts, Py_ssize_t n, str what, str of=*)

# Repeats the value of an int n times; leaves other values unchanged.
cdef int repeat(Integers values, Py_ssize_t n) except -1
cdef int repeat_slots(Slots values, Py_ssize_t n) except -1

# "int32" or "int64" from a string, or from a NumPy dtype or type of that name; raises `error` otherwise.
cdef str as_width(object dtype, str what, object error)

# A writable ndarray that shares the memory of `out`, an ndarray or a DLPack exporter; int32, or int64 if `wide_too`.
cdef object writable(object out, int ndim, str what, bint wide_too)
