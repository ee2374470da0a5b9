"""The dtype table of dtype.hpp, for dtype.py."""

from pagecore.arrays.dtypes.codes cimport kDTypes, kNumDTypes


def dtype_table():
    """Return one (name, DLPack code, bits) for each dtype, in the order of their codes."""
    cdef int i
    return tuple((kDTypes[i].name.decode(), kDTypes[i].code, kDTypes[i].bits) for i in range(kNumDTypes))
