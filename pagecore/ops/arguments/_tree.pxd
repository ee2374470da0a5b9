# Trees of new tokens: their bits and positions as Tensors; see _tree.pyx.
from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.cpu.args cimport Tree


cdef extern from "pagecore/ops/tree.hpp" namespace "pagecore" nogil:
    int64_t first_wrong_parent(const int64_t* parents, int64_t count)
    void write_tree(const int64_t* parents, int64_t count, int64_t words, uint64_t* rows, int32_t* depths)
    void write_chain(int64_t count, int64_t words, uint64_t* rows)


cdef class TreeMask:
    cdef Tensor bits       # int64 [T] or [T, words], contiguous
    cdef Tensor positions  # int32 or int64 [T], or None
    cdef int64_t words

    cdef int check_apart_from(self, Tensor out) except -1
    cdef bint is_on_host(self) noexcept
    # Copies the arrays to the device of the call.
    cdef int send(self, const Place* place) except -1
    # A copy of both arrays on the host.
    cdef TreeMask on_host(self, const Place* place)
    cdef Tree native(self) noexcept


# The arguments tree_mask and positions where the caller has them; None without a tree.
cdef TreeMask read_tree(
    object tree_mask, object positions, object mask, bint is_selected, int64_t num_tokens, const Place* place)
