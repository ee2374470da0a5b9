from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint64_t

from pagecore.arrays.exchange.dlpack cimport DLManagedTensor, DLManagedTensorVersioned, DLPackExchangeAPI
from pagecore.arrays.views.array_view cimport ArrayView


# buffer.pxi

cdef class Borrowed:
    cdef Py_buffer buffer


cdef class Span:
    cdef char* begin
    cdef Py_ssize_t nbytes
    cdef bint readonly
    cdef object owner


cdef Borrowed import_buffer(object obj, ArrayView* view)
cdef Span span_of(const ArrayView& view, object owner, Py_ssize_t* offset)


# export.pxi

cdef DLManagedTensorVersioned* export_versioned(
    const ArrayView& view, object owner, uint64_t flags, int minor) except NULL
cdef object export_capsule(const ArrayView& view, object owner, object max_version, bint copied)


# import.pxi

cdef class Imported:
    cdef DLManagedTensorVersioned* versioned
    cdef DLManagedTensor* unversioned
    cdef readonly object producer  # for CUDA memory: orders the streams of a later export


cdef class Exchange:
    cdef DLPackExchangeAPI* api
    cdef bint torch


# Each fills `view` and returns the owner of the memory.
cdef Imported import_capsule(object capsule, ArrayView* view)
cdef object import_producer(object obj, ArrayView* view)
cdef object import_exchange(object obj, Exchange exchange, ArrayView* view)

# The C exchange functions of a type, or None.
cdef Exchange exchange_of(type producer)
