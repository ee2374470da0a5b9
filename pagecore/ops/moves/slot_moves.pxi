"""Moves of tokens between slots of one pool, for compaction: planned first, then run without anything that can fail."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport cache_array, fill_block_arrays
from pagecore.ops.arguments._arguments cimport note_written
from pagecore.ops.cpu._cpu cimport isa, move_slots as run_slot_moves
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys
from pagecore.ops.cuda.sparse._sparse cimport DeviceMoves, KeySummaryPlanes
from pagecore.ops.sparse._sparse cimport bounds_cache


cdef class SlotMoves:
    """Moves of tokens between slots of the planes of one pool. No target may be the source of a later move.

    Parameters
    ----------
    planes : list of Tensor
        Planes per token, ``[num_blocks, block_size, ...]``, of all layers, on one device; empty to move nothing.
    bounds : list of (Tensor, Tensor, Tensor)
        Keys, minima and maxima of each layer whose bounds are renewed.
    stream : int
        On CUDA, the handle of the stream of the moves.
    """

    def __cinit__(self, list planes not None, list bounds not None, size_t stream=0):
        cdef BoundedKeys keys
        cdef Tensor first = planes[0] if planes else None
        isa()  # the kernels are chosen before anything changes
        self.num_threads = threads_of_a_call()
        self.held = (planes, bounds)
        fill_block_arrays(self.arrays, planes)
        for key, low, high in bounds:
            keys.key = cache_array(<Tensor>key)
            keys.low, keys.high = bounds_cache(<Tensor>low), bounds_cache(<Tensor>high)
            self.bounds.push_back(keys)
        if first is not None and first.device_type != CPU:
            self.on_device = self.make_device_moves(first, stream)

    cdef DeviceMoves make_device_moves(self, Tensor first, size_t stream):
        cdef DeviceMoves moves = DeviceMoves()
        cdef KeySummaryPlanes planes
        cdef size_t i
        moves.place.device_type, moves.place.device_id = first.device_type, first.device_id
        moves.place.stream, moves.place.name = stream, <void*>"plane"
        moves.arrays.assign(self.arrays.begin(), self.arrays.end())
        for i in range(self.bounds.size()):
            planes.stored, planes.low, planes.high = self.bounds[i].key, self.bounds[i].low, self.bounds[i].high
            moves.bounds.push_back(planes)
        return moves

    cdef int reserve(self, int64_t count) except -1:
        self.sources.reserve(<size_t>count)
        self.targets.reserve(<size_t>count)
        if self.on_device is not None:
            self.on_device.reserve(count)
        return 0

    cdef void add(self, int64_t source, int64_t target) noexcept:
        self.sources.push_back(source)
        self.targets.push_back(target)

    cdef void run(self) noexcept:
        if self.on_device is None:
            with nogil:
                run_slot_moves(self.arrays, self.bounds, self.sources, self.targets, self.num_threads)
            return
        try:
            self.on_device.run(self.sources.data(), self.targets.data(), <int64_t>self.sources.size())
            for plane in self.held[0]:
                note_written(<Tensor>plane, &self.on_device.place)
        except BaseException as error:
            self.failure = error

    cdef int finish(self) except -1:
        if self.failure is not None:
            raise self.failure
        return 0
