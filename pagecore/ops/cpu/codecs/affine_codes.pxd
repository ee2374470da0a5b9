# Declarations of affine_codes.hpp, for _cpu.pyx.
from libc.stdint cimport int64_t

from pagecore.ops.affine_codes cimport AffineCodes


cdef extern from "pagecore/ops/cpu/codecs/affine_codes.hpp" namespace "pagecore::cpu" nogil:
    void run_quantize_affine "pagecore::cpu::quantize_affine"(const AffineCodes& codes, int64_t num_threads) noexcept
    void run_dequantize_affine "pagecore::cpu::dequantize_affine"(
        const AffineCodes& codes, int64_t num_threads) noexcept
