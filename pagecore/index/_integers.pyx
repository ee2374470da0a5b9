"""Conversion of integer arguments to native arrays."""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_Clear, PyErr_ExceptionMatches, PyErr_Occurred
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int32_t, int64_t
from libc.string cimport memcpy

from operator import index

import operator

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object value, int* overflow) except? -1

cdef object ndarray = np.ndarray
cdef object empty = np.empty
cdef object int32 = np.dtype(np.int32)
cdef object int64 = np.dtype(np.int64)


@cython.freelist(16)
cdef class Integers:
    def __dealloc__(self):
        PyMem_Free(self.owned)
        if self.borrowed:
            PyBuffer_Release(&self.buffer)


@cython.freelist(16)
cdef class Slots:
    def __dealloc__(self):
        PyMem_Free(self.owned)
        if self.borrowed:
            PyBuffer_Release(&self.buffer)


cdef Integers as_integers(object obj, str what, object error):
    cdef Integers values = borrowed_integers(obj, what, error)
    own(values, 0)
    return values


cdef Integers borrowed_integers(object obj, str what, object error):
    cdef Integers values = Integers.__new__(Integers)
    cdef int64_t wide
    if PyLong_CheckExact(obj):
        wide = as_int64(obj, what)
        if wide > INT32_MAX or wide < INT32_MIN:
            raise error(f"{what} {shown(obj)} does not fit 32 bits; the limits are {INT32_MIN} and {INT32_MAX}")
        values.single = <int32_t> wide
        values.data = &values.single
        values.size = 1
        values.is_scalar = True
        return values
    cdef char width = lend(&values.buffer, obj) if type(obj) is ndarray else NEITHER
    if width == NEITHER:
        obj = wide_array(obj, what, error)
        values.is_scalar = obj.ndim == 0
        width = lend(&values.buffer, obj.reshape(-1))
    values.borrowed = True
    values.size = values.buffer.shape[0]
    values.data = <const int32_t*> values.buffer.buf
    if width == INT64:
        narrow(values, what, error)
    return values


cdef int own(Integers values, Py_ssize_t first) except -1:
    cdef int32_t* data
    if not values.borrowed:
        return 0
    data = <int32_t*> room_for(values.size, sizeof(int32_t))
    memcpy(data + first, values.data + first, (values.size - first) * sizeof(int32_t))
    keep(values, data)
    return 0


cdef Slots as_slots(object obj, str what, object error):
    cdef Slots values = borrowed_slots(obj, what, error)
    cdef int64_t* data
    if values.borrowed:
        data = <int64_t*> room_for(values.size, sizeof(int64_t))
        memcpy(data, values.data, values.size * sizeof(int64_t))
        keep_slots(values, data)
    return values


cdef Slots borrowed_slots(object obj, str what, object error):
    cdef Slots values = Slots.__new__(Slots)
    cdef int overflow = 0
    if PyLong_CheckExact(obj):
        values.single = PyLong_AsLongLongAndOverflow(obj, &overflow)
        if overflow:
            raise error(f"{what} {shown(obj)} does not fit 64 bits; the limits are {INT64_MIN} and {INT64_MAX}")
        values.data = &values.single
        values.size = 1
        values.is_scalar = True
        return values
    cdef char width = lend(&values.buffer, obj) if type(obj) is ndarray else NEITHER
    if width == NEITHER:
        obj = wide_array(obj, what, error)
        values.is_scalar = obj.ndim == 0
        width = lend(&values.buffer, obj.reshape(-1))
    values.borrowed = True
    values.size = values.buffer.shape[0]
    values.data = <const int64_t*> values.buffer.buf
    if width == INT32:
        widen(values)
    return values


cdef enum:
    NEITHER = 0
    INT32 = 4
    INT64 = 8


cdef extern from "Python.h":
    # Declared without an exception check: NumPy does not always set an exception.
    int get_buffer "PyObject_GetBuffer"(object array, Py_buffer* buffer, int flags)


cdef char lend(Py_buffer* buffer, object array) except -1:
    """Return INT32 or INT64 for an aligned, C-contiguous, 1-d array of that type; the buffer must then be released."""
    if get_buffer(array, buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0:
        if PyErr_Occurred() == NULL:  # out of memory: NumPy sets no exception
            raise MemoryError()
        if PyErr_ExceptionMatches(ValueError) or PyErr_ExceptionMatches(BufferError):
            PyErr_Clear()
            return NEITHER
        return -1
    cdef char letter = buffer.format[0]
    if buffer.ndim == 1 and buffer.format[1] == 0 and letter in (b"i", b"l", b"q"):
        return INT32 if buffer.itemsize == 4 else INT64
    PyBuffer_Release(buffer)
    return NEITHER


cdef void* room_for(Py_ssize_t size, size_t item_size) except NULL:
    cdef void* memory = PyMem_Malloc(size * item_size)
    if memory == NULL:
        raise MemoryError()
    return memory


cdef void keep(Integers values, int32_t* data) noexcept:
    """Replace the memory of the values by `data`, which they own from now on."""
    PyMem_Free(values.owned)
    values.owned = data
    values.data = data
    if values.borrowed:
        values.borrowed = False
        PyBuffer_Release(&values.buffer)


cdef int narrow(Integers values, str what, object error) except -1:
    """Copy borrowed int64 values, reading each once, into owned int32 memory; raise `error` if one does not fit."""
    cdef const int64_t* wide = <const int64_t*> values.buffer.buf
    cdef int32_t* data = <int32_t*> room_for(values.size, sizeof(int32_t))
    cdef Py_ssize_t i
    cdef int64_t value
    cdef int64_t least = 0
    cdef int64_t most = 0
    for i in range(values.size):
        value = wide[i]
        least = min(least, value)
        most = max(most, value)
        data[i] = <int32_t> value
    keep(values, data)
    for value in (most, least):
        if value > INT32_MAX or value < INT32_MIN:
            raise error(f"{what} {value} does not fit 32 bits; the limits are {INT32_MIN} and {INT32_MAX}")
    return 0


cdef int widen(Slots values) except -1:
    """Copy borrowed int32 values, reading each once, into owned int64 memory."""
    cdef const int32_t* lent = <const int32_t*> values.buffer.buf
    cdef int64_t* data = <int64_t*> room_for(values.size, sizeof(int64_t))
    cdef Py_ssize_t i
    for i in range(values.size):
        data[i] = lent[i]
    keep_slots(values, data)
    return 0


cdef void keep_slots(Slots values, int64_t* data) noexcept:
    PyMem_Free(values.owned)
    values.owned = data
    values.data = data
    if values.borrowed:
        values.borrowed = False
        PyBuffer_Release(&values.buffer)


def int32_array(obj, what, error):
    """Return a new int32 array, 0-d or 1-d, of any integers."""
    return integer_array(obj, what, error, 32)


def integer_array(obj, what, error, bits):
    """Return a new array of 32-bit or 64-bit integers, 0-d or 1-d, of any integers."""
    dtype = int32 if bits == 32 else int64
    array = read_array(obj, what)
    if not np.can_cast(array.dtype, dtype):
        array = array.copy()  # another thread may write to the caller's memory: check the values that are used
        check_fit(array, what, error, bits)
    return array.astype(dtype, order="C")


cdef object wide_array(object obj, str what, object error):
    """Return a contiguous, aligned int64 array, 0-d or 1-d, of any integers; it may share the caller's memory."""
    array = read_array(obj, what)
    if not np.can_cast(array.dtype, int64):
        array = array.copy()
        check_fit(array, what, error, 64)
    return array.astype(int64, order="C", copy=not array.flags.aligned)


cdef object read_array(object obj, str what):
    """Return an array of integers, 0-d or 1-d; an object array for ints that fit no dtype."""
    try:
        array = np.asarray(obj)
    except ValueError as ragged:
        raise ShapeError(f"{what}s must be one int or one list of ints: {ragged}") from ragged
    except MemoryError:
        raise
    except Exception as foreign:  # a tensor of a dtype that NumPy lacks, or one that requires grad; __array__ fails
        raise UnsupportedDtype(f"{what}s cannot be read by NumPy: {foreign}; give integers") from foreign
    if array.ndim > 1:
        raise ShapeError(f"{what}s have shape {array.shape}; give one dimension")
    if array.size == 0:
        return np.zeros(0, int32)
    is_int_list = array.dtype.kind == "O" and all(isinstance(value, int) for value in array.flat)
    if array.dtype.kind not in "iu" and not is_int_list:
        raise UnsupportedDtype(f"{what}s have dtype {array.dtype}; give integers")
    return array


cdef int check_fit(object array, str what, object error, object bits) except -1:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for extreme in (array.max(), array.min()):
        value = operator.index(extreme)
        if not least <= value <= most:
            raise error(f"{what} {shown(value)} does not fit {bits} bits; the limits are {least} and {most}")
    return 0


cdef int64_t as_int64(object obj, str what) except? -1:
    cdef int overflow = 0
    cdef long long value
    if not PyLong_CheckExact(obj):
        try:
            obj = None if isinstance(obj, bool) else index(obj)
        except MemoryError:
            raise
        except Exception as error:  # __index__ of a foreign object may raise anything
            raise UnsupportedDtype(f"{what} is {type(obj).__name__}; give an int") from error
        if obj is None:
            raise UnsupportedDtype(f"{what} is bool; give an int")
    value = PyLong_AsLongLongAndOverflow(obj, &overflow)
    if overflow:
        return INT64_MAX if overflow > 0 else INT64_MIN
    return value


cdef object new_int32(Py_ssize_t size, int32_t** data):
    array = empty(size, int32)
    data[0] = <int32_t*> address_of(array)
    return array


cdef object new_int64(Py_ssize_t size, int64_t** data):
    array = empty(size, int64)
    data[0] = <int64_t*> address_of(array)
    return array


cdef void* address_of(object array) except? NULL:
    cdef Py_buffer buffer
    PyObject_GetBuffer(array, &buffer, PyBUF_ANY_CONTIGUOUS)
    cdef void* address = buffer.buf
    PyBuffer_Release(&buffer)
    return address


cdef int32_t as_row(object row) except? -1:
    cdef int64_t value = as_int64(row, "row")
    if value < 0 or value > INT32_MAX:
        raise InvalidSequence(f"row {row} is not in use; use a row that was returned by this object and not freed")
    return <int32_t> value


cdef Integers as_counts(object counts, Py_ssize_t n, str what, str of="row"):
    cdef Integers values = as_integers(counts, what, ShapeError)
    repeat(values, n)
    if values.size != n:
        raise ShapeError(f"{values.size} {what}s are given for {n} {of}s; give one for each, or one for all")
    return values


cdef int repeat(Integers values, Py_ssize_t n) except -1:
    cdef int32_t* data
    cdef Py_ssize_t i
    if values.is_scalar and n != 1:
        values.single = values.data[0]
        data = <int32_t*> room_for(n, sizeof(int32_t))
        for i in range(n):
            data[i] = values.single
        keep(values, data)
        values.size = n
    return 0


cdef int repeat_slots(Slots values, Py_ssize_t n) except -1:
    cdef int64_t* data
    cdef Py_ssize_t i
    if values.is_scalar and n != 1:
        values.single = values.data[0]
        data = <int64_t*> room_for(n, sizeof(int64_t))
        for i in range(n):
            data[i] = values.single
        keep_slots(values, data)
        values.size = n
    return 0


cdef str shown(object number):
    """Return an int as text, even if it has more digits than Python prints."""
    try:
        return str(number)
    except ValueError:
        return f"of {number.bit_length()} bits"


cdef str as_width(object dtype, str what, object error):
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except Exception:  # a foreign object may raise anything
        name = None
    if name not in ("int32", "int64"):
        raise error(f"{what} is {dtype[:80] if isinstance(dtype, str) else type(dtype).__name__}; use int64 or int32")
    return str(name)


cdef object writable(object out, int ndim, str what, bint wide_too):
    try:
        array = out if isinstance(out, ndarray) or not hasattr(out, "__dlpack__") else np.from_dlpack(out)
        array = np.asarray(array, copy=False)
    except MemoryError:
        raise
    except Exception as error:  # methods of a foreign object may raise anything
        raise ShapeError(f"{what} cannot be written in place: {error}; give a NumPy array") from error
    if array.dtype != int32 and not (wide_too and array.dtype == int64):
        raise UnsupportedDtype(f"{what} has dtype {array.dtype}; give int32{' or int64' if wide_too else ''}")
    if array.ndim != ndim:
        raise ShapeError(f"{what} has shape {array.shape}; give {ndim} dimension{'s' if ndim > 1 else ''}")
    if array.shape[ndim - 1] > 1 and array.strides[ndim - 1] != array.itemsize:
        raise ShapeError(f"{what} has strides {array.strides}; its last axis must be contiguous")
    if not array.flags.writeable:
        raise ShapeError(f"{what} is read-only; give an array that can be written")
    if not array.flags.aligned:
        raise ShapeError(f"{what} is not aligned to its item size; give an aligned array")
    return array
