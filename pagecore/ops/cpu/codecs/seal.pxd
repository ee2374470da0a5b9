# The struct and the function of seal.hpp.
from libc.stdint cimport int64_t

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport Cache, Indices
from pagecore.ops.cpu.args cimport SealedPlane


cdef extern from "pagecore/ops/cpu/codecs/seal.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass SealArgs:
        Cache key
        Cache value
        SealedPlane sealed_key
        SealedPlane sealed_value
        int64_t num_sealed
        Indices sources
        Indices targets
        int64_t lowest

    void run_seal_blocks "pagecore::cpu::seal_blocks"(
        const SealArgs& args, int64_t num_threads) except +raise_python_error
