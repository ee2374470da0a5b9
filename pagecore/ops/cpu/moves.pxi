"""Writes of keys and values, copies, transfers and gathers of blocks, and moves of slots."""

from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport BlockArray, Indices, WriteArgs
from pagecore.ops.cpu.args cimport PackedSequences, run_copy, run_gather, run_scatter, run_transfer, run_write
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys, run_move_slots, run_renew_bounds


cdef int write_kv(const WriteArgs& args) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_write(args, num_threads)
    return 0


cdef int copy_blocks(
        const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_copy(arrays, sources, targets, num_threads)
    return 0


cdef int transfer_blocks(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t lowest) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_transfer(sources, targets, source_ids, target_ids, num_threads, lowest)
    return 0


cdef int gather_blocks(
        const vector[BlockArray]& caches, const vector[BlockArray]& packed, const PackedSequences& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_gather(caches, packed, batch, num_threads)
    return 0


cdef int scatter_blocks(
        const vector[BlockArray]& packed, const vector[BlockArray]& caches, const PackedSequences& batch) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_scatter(packed, caches, batch, num_threads)
    return 0


cdef void move_slots(
        const vector[BlockArray]& arrays, const vector[BoundedKeys]& bounds, const vector[int64_t]& sources,
        const vector[int64_t]& targets, int64_t num_threads) noexcept nogil:
    run_move_slots(arrays, sources.data(), targets.data(), <int64_t>sources.size(), num_threads)
    run_renew_bounds(bounds, targets.data(), <int64_t>targets.size(), num_threads)
