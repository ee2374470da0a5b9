from libc.stdint cimport int32_t, int64_t

ctypedef const int32_t const_int32  # Cython cannot spell them inside a template
ctypedef const int64_t const_int64


cdef class Integers:
    """int32 values of a caller: copied, so that no other thread and no callback changes them once they are read."""
    cdef const int32_t* data
    cdef Py_ssize_t size
    cdef bint is_scalar      # a bare int: one value that may be repeated
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


# The values of `obj`, an int or anything that NumPy makes one-dimensional and integer; `error` is raised for one that
# does not fit int32.
cdef Integers as_integers(object obj, str what, object error)

# The same, but the values may still be the caller's memory, which others may write to at any time: for code that stays
# within bounds whatever it reads. own() copies the values from `first` on; the others must not be read any more.
cdef Integers borrowed_integers(object obj, str what, object error)
cdef int own(Integers values, Py_ssize_t first) except -1

# The same in 64 bits.
cdef Slots as_slots(object obj, str what, object error)
cdef Slots borrowed_slots(object obj, str what, object error)

# An int64 from anything with __index__; values beyond are cut to the range's ends.
cdef int64_t as_int64(object obj, str what) except? -1

# A new int32 array and the address of its first element.
cdef object new_int32(Py_ssize_t size, int32_t** data)

# The same for int64.
cdef object new_int64(Py_ssize_t size, int64_t** data)

# The address of element 0 of `array`, an ndarray that the caller keeps alive.
cdef void* address_of(object array) except? NULL

# One row id; InvalidSequence where it cannot be one.
cdef int32_t as_row(object row) except? -1

# `counts` as one value for each of n rows: a bare int stands for all.
cdef Integers as_counts(object counts, Py_ssize_t n, str what)

# Turns a bare int into n of it; leaves other values as they are.
cdef int repeat(Integers values, Py_ssize_t n) except -1
cdef int repeat_slots(Slots values, Py_ssize_t n) except -1

# "int32" or "int64", or a NumPy dtype or type of that name; anything else is refused by `error`.
cdef str as_width(object dtype, str what, object error)

# A buffer that the caller lends for writing, an ndarray or what speaks DLPack: an ndarray that shares its memory, of
# int32 (or int64 where `wide_too`).
cdef object writable(object out, int ndim, str what, bint wide_too)
