cdef extern from "pagecore/arrays/tensors/host_memory.hpp" namespace "pagecore" nogil:
    cdef cppclass HostMemory:
        HostMemory()
        char* data()
        size_t size_bytes()


cdef class Allocation:
    cdef HostMemory memory
    cdef object __weakref__


cdef Allocation allocate(size_t size_bytes, bint zeroed)
