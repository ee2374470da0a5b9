from libc.stdint cimport int64_t

from pagecore.native.std cimport vector


cdef extern from "pagecore/arrays/views/overlap.hpp" namespace "pagecore" nogil:
    cdef struct Layout:
        const char* data
        int64_t item
        int ndim
        const int64_t* shape
        const int64_t* strides

    bint overlap(const Layout& a, const Layout& b) except +
    bint overlaps_itself(const Layout& layout) except +

    cdef struct SharedPair:
        int64_t first
        int64_t second

    SharedPair find_shared(const vector[Layout]& layouts, size_t num_written) except +
