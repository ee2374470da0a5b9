from libc.stdint cimport int32_t

from pagecore.native.std cimport vector

cdef extern from *:
    """
    // Assignment whose failed allocation becomes a Python exception.
    template <typename T>
    void pagecore_copy_vector(T& to, const T& from) { to = from; }
    """
    void copy_vector "pagecore_copy_vector"(vector[vector[int32_t]]& to, const vector[vector[int32_t]]& source) except +


cdef class StoredBlocks:
    cdef tuple pools
    cdef vector[vector[int32_t]] blocks     # of each group; holes are 0. With states, last: running slot, checkpoint
    cdef vector[vector[int32_t]] held       # without holes, tail first
    cdef size_t num_held                    # number of groups whose blocks are held
    cdef int32_t checkpoint_length          # tokens of the checkpoint in the list of states; 0 for none

    # Lists blocks, or their number, for share() or allocate(), and allocates the memory that these need.
    cdef int reserve(self, const vector[vector[int32_t]]& like) except -1
    # Replaces each listed block by a new one; returns False, with nothing taken, if a pool has too few.
    cdef bint allocate(self) noexcept
    # Adds a reference to each of `blocks`, which another holder keeps alive meanwhile.
    cdef void share(self) noexcept
    # Releases the last `count` blocks of a group whose blocks are held and that has no holes.
    cdef void drop_last(self, size_t group, size_t count) noexcept
    cdef void list_held(self, size_t group) noexcept
    cdef void release(self) noexcept
