# The blocks or tokens that key heads select, as paged_attention takes them; see _selected.pyx.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.cpu.args cimport Selection


cdef class Selected:
    cdef Tensor entries
    cdef Tensor counts     # None: lists end before their first negative entry
    cdef int64_t unit      # tokens of an entry
    cdef bint by_block
    cdef str name          # of the argument

    cdef void fill(self, Selection* selection) noexcept
    cdef bint is_on_host(self) noexcept
    # A copy of both arrays on the host.
    cdef Selected on_host(self, const Place* place)
    # On CUDA: copies lists on the host to the device. They are checked first, against the lengths if these are on the
    # host, else against the `room` tokens of a row of the block table.
    cdef int send(self, Tensor lens, int64_t room, const Place* place) except -1
    cdef int check(self, Tensor lens, int64_t room) except -1
    # UnsupportedOption if `out` shares memory with the lists.
    cdef int check_apart_from(self, Tensor out) except -1


# Returns None if nothing is selected.
cdef Selected read_selected(
    object blocks, object block_counts, object indices, object index_counts, int64_t num_sequences,
    int64_t num_kv_heads, int64_t block_size, const Place* place)
