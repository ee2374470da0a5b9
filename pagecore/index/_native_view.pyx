"""NumPy views of native memory."""

from cpython.buffer cimport PyBUF_WRITABLE

from pagecore.index._sealed cimport seal

import numpy as np


cdef class NativeMemory:
    """Buffer-protocol exporter of memory of a native structure."""
    cdef object owner
    cdef void* data
    cdef int ndim
    cdef bint is_wide
    cdef bint is_readonly
    cdef Py_ssize_t[2] shape
    cdef Py_ssize_t[2] strides

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self.is_readonly and flags & PyBUF_WRITABLE == PyBUF_WRITABLE:
            raise BufferError("this memory belongs to a native structure and is read-only; copy it")
        buffer.obj = self
        buffer.buf = self.data
        buffer.itemsize = 8 if self.is_wide else 4
        buffer.format = (b"l" if sizeof(long) == 8 else b"q") if self.is_wide else b"i"
        buffer.ndim = self.ndim
        buffer.shape = self.shape
        buffer.strides = self.strides
        buffer.suboffsets = NULL
        buffer.len = self.shape[0] * self.strides[0]
        buffer.readonly = self.is_readonly
        buffer.internal = NULL


seal(NativeMemory)


cdef object view_of(object owner, void* data, int ndim, Py_ssize_t* shape, bint is_wide, bint is_readonly):
    cdef NativeMemory memory = NativeMemory.__new__(NativeMemory)
    cdef Py_ssize_t stride = 8 if is_wide else 4
    memory.owner = owner
    memory.data = data
    memory.ndim = ndim
    memory.is_wide = is_wide
    memory.is_readonly = is_readonly
    cdef int axis
    for axis in range(ndim - 1, -1, -1):
        memory.shape[axis] = shape[axis]
        memory.strides[axis] = stride
        stride *= shape[axis]
    array = np.asarray(memory)
    if array.dtype.hasobject:  # out of memory: NumPy has wrapped the object instead of viewing it
        raise MemoryError()
    return array
