from pagecore.arrays.exchange.dlpack cimport DLManagedTensor, DLManagedTensorVersioned, DLPackExchangeAPI
from pagecore.arrays.views.array_view cimport ArrayView


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
