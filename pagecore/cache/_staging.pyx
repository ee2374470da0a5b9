"""What goes into a staging slot: bytes, laid out as the device finds them."""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memcpy

from pagecore.index._block_tables cimport BlockTables, ChangedEntry
from pagecore.index._step_buffers cimport StepBuffers

cdef extern from *:
    """
    #include <bit>
    #include "cuda_src/abi_moves.h"
    #include "pagecore/index/changed_entries.hpp"
    static_assert(std::endian::native == std::endian::little && sizeof(PcTableEntry) == sizeof(pagecore::ChangedEntry) &&
                  offsetof(PcTableEntry, block) == offsetof(pagecore::ChangedEntry, value),
                  "changed entries are what the kernel reads");
    """

# The number of entries stands before them, so far that they begin at a multiple of 16.
COUNT_BYTES = 16
ENTRY_BYTES = sizeof(ChangedEntry)


def image_nbytes(StepBuffers buffers not None):
    """Bytes of all arrays of a step."""
    return <Py_ssize_t>buffers.native.image_nbytes()


def image_offset(StepBuffers buffers not None, array):
    """Where in them an array of the step begins."""
    return <int64_t>array.ctypes.data - <int64_t>buffers.native.image()


def pack_image(StepBuffers buffers not None, uintptr_t target):
    """All arrays of a step."""
    memcpy(<void*>target, buffers.native.image(), buffers.native.image_nbytes())


def pack_changes(BlockTables tables not None, uintptr_t target, Py_ssize_t capacity):
    """How many table entries changed, and these; returns the number. As many as `capacity`: there may be more."""
    cdef Py_ssize_t count = tables.take_changes_raw(<ChangedEntry*>(target + 16), capacity)
    (<int32_t*>target)[0] = <int32_t>count
    return count
