"""Moves of tokens between slots of one pool, for compaction: planned first, then run without anything that can fail."""

from libc.stdint cimport int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._summaries cimport bounds_cache
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport cache_array, fill_block_arrays
from pagecore.ops.cpu._cpu cimport isa, move_slots
from pagecore.ops.cpu.slot_moves cimport BoundedKeys


cdef class SlotMoves:
    """Moves of tokens between slots of the planes of one pool.

    Parameters
    ----------
    planes : list of Tensor
        Planes per token on the host, ``[num_blocks, block_size, ...]``, of all layers.
    bounds : list of (Tensor, Tensor, Tensor)
        Keys, minima and maxima of each layer whose bounds are renewed.
    """

    def __cinit__(self, list planes not None, list bounds not None):
        cdef BoundedKeys keys
        isa()  # the kernels are chosen before anything changes
        self.num_threads = threads_of_a_call()
        self.held = (planes, bounds)
        fill_block_arrays(self.arrays, planes)
        for key, low, high in bounds:
            keys.key = cache_array(<Tensor>key)
            keys.low, keys.high = bounds_cache(<Tensor>low), bounds_cache(<Tensor>high)
            self.bounds.push_back(keys)

    cdef int reserve(self, int64_t count) except -1:
        self.sources.reserve(<size_t>count)
        self.targets.reserve(<size_t>count)
        return 0

    cdef void add(self, int64_t source, int64_t target) noexcept:
        self.sources.push_back(source)
        self.targets.push_back(target)

    cdef void run(self) noexcept:
        with nogil:
            move_slots(self.arrays, self.bounds, self.sources, self.targets, self.num_threads)
