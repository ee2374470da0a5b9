# Declarations of hadamard.hpp, for _cpu.pyx.
from libc.stdint cimport int64_t

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.hadamard_rows cimport HadamardRows


cdef extern from "pagecore/ops/cpu/codecs/hadamard.hpp" namespace "pagecore::cpu" nogil:
    void run_hadamard "pagecore::cpu::hadamard"(
        const HadamardRows& rows, int64_t num_threads) except +raise_python_error
