"""Checks of index arrays alone."""

from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops.args cimport BlockArray, Cache, Indices
from pagecore.ops.cpu.args cimport (
    AttentionArgs,
    PackedSequences,
    run_check_attention,
    run_check_copied,
    run_check_independent,
    run_check_parts,
    run_check_sequences,
    run_check_slots,
    run_check_transferred,
    sum_lengths,
)


cdef int check_attention(const AttentionArgs& args) except -1:
    run_check_attention(args)
    return 0


cdef int check_parts(const Indices& cu_parts, int64_t num_parts) except -1:
    run_check_parts(cu_parts, num_parts)
    return 0


cdef int check_slots(const Indices& slots, int64_t num_tokens, const Cache& cache) except -1:
    run_check_slots(slots, num_tokens, cache)
    return 0


cdef int check_copied(const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1:
    run_check_copied(arrays, sources, targets)
    return 0


cdef int check_transferred(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t lowest) except -1:
    run_check_transferred(sources, targets, source_ids, target_ids, lowest)
    return 0


cdef int check_independent(const Indices& sources, const Indices& targets, bint one_cache) except -1:
    run_check_independent(sources, targets, one_cache)
    return 0


cdef int check_sequences(const PackedSequences& batch) except -1:
    run_check_sequences(batch)
    return 0


cdef int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size) except -1:
    return sum_lengths(seq_lens, width, block_size)
