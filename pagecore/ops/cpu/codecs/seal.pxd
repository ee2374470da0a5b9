# The functions of seal.hpp.
from libc.stdint cimport int64_t

from pagecore.native.translate cimport raise_python_error
from pagecore.ops.sealed_plane cimport SealArgs


cdef extern from "pagecore/ops/cpu/codecs/seal.hpp" namespace "pagecore::cpu" nogil:
    void run_seal_blocks "pagecore::cpu::seal_blocks"(
        const SealArgs& args, int64_t num_threads) except +raise_python_error
    void run_unseal_blocks "pagecore::cpu::unseal_blocks"(
        const SealArgs& args, int64_t num_threads) except +raise_python_error
    void run_check_sealed_pairs "pagecore::cpu::check_sealed_pairs"(
        const SealArgs& args, bint restores) except +raise_python_error
