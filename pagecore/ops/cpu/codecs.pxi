"""Numbers to stored formats and back: rows, blocks, groups, sealed blocks, states, and rotations."""

from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.args cimport BlockArray, Indices
from pagecore.ops.cpu.args cimport Codec, PlannedMoves, plan_transfer, run_dequantize, run_quantize
from pagecore.ops.cpu.codecs.affine_codes cimport run_dequantize_affine, run_quantize_affine
from pagecore.ops.cpu.codecs.conversions cimport (
    BlockConversion,
    LatentConversion,
    run_convert_blocks,
    run_convert_latent_rows,
)
from pagecore.ops.cpu.codecs.hadamard cimport run_hadamard
from pagecore.ops.cpu.codecs.seal cimport run_check_sealed_pairs, run_seal_blocks, run_unseal_blocks
from pagecore.ops.cpu.codecs.state_codec cimport run_dequantize_states, run_quantize_states


cdef int quantize(const Codec& codec) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_quantize(codec, num_threads)
    return 0


cdef int dequantize(const Codec& codec) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_dequantize(codec, num_threads)
    return 0


cdef int hadamard(const HadamardRows& rows) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_hadamard(rows, num_threads)
    return 0


cdef int convert_affine(const AffineCodes& codes, bint restores) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        if restores:
            run_dequantize_affine(codes, num_threads)
        else:
            run_quantize_affine(codes, num_threads)
    return 0


cdef int convert_sealed_blocks(const SealArgs& args, bint restores) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        if restores:
            run_unseal_blocks(args, num_threads)
        else:
            run_seal_blocks(args, num_threads)
    return 0


cdef int check_sealed_pairs(const SealArgs& args, bint restores) except -1:
    run_check_sealed_pairs(args, restores)
    return 0


cdef void convert_states(
        const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads,
        bint restores) noexcept nogil:
    if restores:
        run_dequantize_states(plane, pairs, count, num_threads)
    else:
        run_quantize_states(plane, pairs, count, num_threads)


cdef int convert_blocks(
        const vector[BlockConversion]& caches, const vector[LatentConversion]& latents,
        const vector[BlockArray]& copied_sources, const vector[BlockArray]& copied_targets, const Indices& sources,
        const Indices& targets, int64_t lowest) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    cdef PlannedMoves copies
    with nogil:
        if copied_sources.size() > 0:
            copies = plan_transfer(copied_sources, copied_targets, sources, targets, num_threads, lowest)
        run_convert_blocks(caches, latents, copies, sources, targets, num_threads, lowest)
    return 0


cdef int convert_latent_rows(const LatentConversion& rows) except -1:
    cdef int64_t num_threads = threads_of_a_call()
    with nogil:
        run_convert_latent_rows(rows, num_threads)
    return 0
