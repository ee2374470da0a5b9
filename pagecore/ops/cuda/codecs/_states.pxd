# Conversions of recurrent states on CUDA. The caller has checked planes and pairs: see state_launch.hpp.
from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.state_plane cimport StatePlane

cdef int convert_states(
    const vector[StatePlane]& planes, const int64_t* pairs, int64_t count, bint restores, const Place* place) except -1
