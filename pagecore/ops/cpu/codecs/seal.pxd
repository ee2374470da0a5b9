# The functions of seal.hpp.
from libc.stdint cimport int64_t

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.sealed_plane cimport SealArgs


cdef extern from "pagecore/ops/cpu/codecs/seal.hpp" namespace "pagecore::cpu" nogil:
    void run_convert_sealed_blocks "pagecore::cpu::convert_sealed_blocks"(
        const SealArgs& args, bint restores, int64_t num_threads) except +raise_python_error
    void run_check_sealed_pairs "pagecore::cpu::check_sealed_pairs"(
        const SealArgs& args, bint restores) except +raise_python_error
