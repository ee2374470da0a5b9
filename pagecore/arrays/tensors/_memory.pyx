"""Host allocations, each owned by an object that every view keeps alive."""

cimport cython

from pagecore.native.translate cimport raise_python_error


cdef extern from *:
    """
    #include "pagecore/arrays/tensors/host_memory.hpp"
    namespace pagecore {
    inline void allocate_into(HostMemory& memory, size_t size_bytes, bool zeroed) {
      memory = HostMemory(size_bytes, zeroed);
    }
    }
    """
    void allocate_into "pagecore::allocate_into"(
        HostMemory& memory, size_t size_bytes, bint zeroed) except +raise_python_error


@cython.final
cdef class Allocation:
    """Host memory that is freed with the last tensor over it; made by empty() and zeros()."""

    @property
    def nbytes(self):
        """Bytes held, rounded up to the granularity of the allocation."""
        return self.memory.size_bytes()


cdef Allocation allocate(size_t size_bytes, bint zeroed):
    """Allocate at least `size_bytes` of host memory; raise NotEnoughMemory if the system cannot."""
    cdef Allocation allocation = Allocation.__new__(Allocation)
    allocate_into(allocation.memory, size_bytes, zeroed)
    return allocation
