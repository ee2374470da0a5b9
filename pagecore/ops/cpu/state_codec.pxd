# Declarations of state_codec.hpp, for _cpu.pyx and _state_codec.pyx.
from libc.stdint cimport int8_t, int64_t

from pagecore.arrays.codes cimport DType


cdef extern from "pagecore/ops/cpu/state_codec.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass StatePlane:
        char* state
        int8_t* codes
        char* scales
        DType type
        int64_t num_matrices
        int64_t num_values
        int64_t num_keys
        int64_t state_stride
        int64_t codes_stride
        int64_t scales_stride

    void run_quantize_states "pagecore::cpu::quantize_states"(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept
    void run_dequantize_states "pagecore::cpu::dequantize_states"(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads) noexcept
