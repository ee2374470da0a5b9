# Declarations of slot_moves.hpp, for _cpu.pyx and slot_moves.pxi.
from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops.args cimport BlockArray, Cache


cdef extern from "pagecore/ops/cpu/moves/slot_moves.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass BoundedKeys:
        Cache key
        Cache low
        Cache high

    void run_move_slots "pagecore::cpu::move_slots"(
        const vector[BlockArray]& arrays, const int64_t* sources, const int64_t* targets, int64_t count,
        int64_t num_threads) noexcept
    void run_renew_bounds "pagecore::cpu::renew_bounds"(
        const vector[BoundedKeys]& planes, const int64_t* slots, int64_t count, int64_t num_threads) noexcept
