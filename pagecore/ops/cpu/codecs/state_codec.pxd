# Declarations of state_codec.hpp, for _cpu.pyx.
from libc.stdint cimport int64_t

from pagecore.ops.state_plane cimport StatePlane


cdef extern from "pagecore/ops/cpu/codecs/state_codec.hpp" namespace "pagecore::cpu" nogil:
    void run_quantize_states "pagecore::cpu::quantize_states"(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept
    void run_dequantize_states "pagecore::cpu::dequantize_states"(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept
