# The structs and functions of conversions.hpp.
from libc.stdint cimport int64_t
from libcpp cimport bool as cbool

from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport Cache, Indices
from pagecore.ops.cpu.args cimport PlannedMoves
from pagecore.ops.cpu.latent.latent cimport LatentCache


cdef extern from "pagecore/ops/cpu/codecs/conversions.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass BlockConversion:
        Cache source
        Cache target
        const float* source_factors
        const float* target_factors
        cbool copies

    cdef cppclass LatentConversion:
        LatentCache source
        LatentCache target
        float source_factor
        float target_factor

    void run_convert_blocks "pagecore::cpu::convert_blocks"(
        const vector[BlockConversion]& caches, const vector[LatentConversion]& latents, const PlannedMoves& copies,
        const Indices& source_ids, const Indices& target_ids, int64_t num_threads,
        int64_t lowest) except +raise_python_error
    void run_convert_latent_rows "pagecore::cpu::convert_latent_rows"(
        const LatentConversion& rows, int64_t num_threads) except +raise_python_error
