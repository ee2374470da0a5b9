from libc.stdint cimport int32_t
from libcpp.vector cimport vector

cdef extern from *:
    """
    // Assignment whose failed allocation becomes an exception of Python.
    template <typename T>
    void pagecore_copy_vector(T& to, const T& from) { to = from; }
    """
    void copy_vector "pagecore_copy_vector"(vector[vector[int32_t]]& to, const vector[vector[int32_t]]& source) except +


cdef class StoredBlocks:
    cdef tuple pools
    cdef vector[vector[int32_t]] blocks     # of each group; holes are 0
    cdef vector[vector[int32_t]] held       # without holes, tail first
    cdef size_t num_held                    # groups whose blocks are held

    # Room for the blocks of each group, which allocate() or share() takes.
    cdef int reserve(self, const vector[vector[int32_t]]& like) except -1
    # Takes new blocks for all of them; False, with nothing taken, where a pool has too few.
    cdef bint allocate(self) noexcept
    # Adds a reference to each of `blocks`, which somebody holds.
    cdef void share(self) noexcept
    cdef void list_held(self, size_t group) noexcept
    cdef void release(self) noexcept
