from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport BlockArray
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys
from pagecore.ops.cuda.sparse._sparse cimport DeviceMoves


# slot_moves.pxi: moves of tokens between slots of one pool.

cdef class SlotMoves:
    cdef vector[BlockArray] arrays
    cdef vector[BoundedKeys] bounds
    cdef vector[int64_t] sources, targets
    cdef int64_t num_threads
    cdef DeviceMoves on_device  # None on the host
    cdef object failure         # of the device, in run()
    cdef object held

    cdef DeviceMoves make_device_moves(self, Tensor first, size_t stream)

    # Reserves room for `count` moves. The rest cannot fail.
    cdef int reserve(self, int64_t count) except -1
    cdef void add(self, int64_t source, int64_t target) noexcept
    # Moves the tokens, in order, and renews the bounds of the targets' blocks.
    cdef void run(self) noexcept
    # Raises the error of a device that failed in run().
    cdef int finish(self) except -1
