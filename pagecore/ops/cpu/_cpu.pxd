# Calls of the host kernels.
#
# The caller has checked ranks, shapes, dtypes, devices and contiguous last axes. The contents of index arrays (ids,
# slots, lengths) and of the plan are checked here, before anything is written.
from libc.stdint cimport int64_t

from pagecore.native.std cimport vector
from pagecore.ops.affine_codes cimport AffineCodes
from pagecore.ops.args cimport BlockArray, Cache, Indices, MergeArgs, MergeManyArgs, WriteArgs
from pagecore.ops.cpu.args cimport AttentionArgs, Codec, HostCalls, PackedSequences
from pagecore.ops.cpu.codecs.conversions cimport BlockConversion, LatentConversion
from pagecore.ops.cpu.latent.latent cimport (
    IndexScoreCall,
    IndexWriteArgs,
    LatentArgs,
    LatentCache,
    LatentRows,
    LatentWriteArgs,
    SlotsArgs,
    TopkArgs,
)
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys
from pagecore.ops.cpu.sparse.select cimport ScoreArgs, ScoreBatch, SelectArgs, SummaryArgs
from pagecore.ops.hadamard_rows cimport HadamardRows
from pagecore.ops.planning._plan cimport AttentionPlan
from pagecore.ops.sealed_plane cimport SealArgs
from pagecore.ops.state_plane cimport StatePlane


# `plan` may be None.
cdef int attention(const AttentionArgs& args, AttentionPlan plan) except -1
cdef int merge(const MergeArgs& args) except -1
cdef int merge_many(const MergeManyArgs& args) except -1
cdef int write_kv(const WriteArgs& args) except -1

# Fills the codes, or the numbers, of all rows.
cdef int quantize(const Codec& codec) except -1
cdef int dequantize(const Codec& codec) except -1

# Transforms all rows.
cdef int hadamard(const HadamardRows& rows) except -1

# Fills the codes and scales of groups, or with `restores` the numbers.
cdef int convert_affine(const AffineCodes& codes, bint restores) except -1

# Seals blocks, or with `restores` fills plain blocks; see seal.hpp.
cdef int convert_sealed_blocks(const SealArgs& args, bint restores) except -1

# The checks of its pairs alone.
cdef int check_sealed_pairs(const SealArgs& args, bint restores) except -1

# Converts slots pairs[2 * i] of a state to slots pairs[2 * i + 1] of its codes, or with `restores` back.
cdef void convert_states(
    const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads, bint restores) noexcept nogil

# Copies of blocks; see ops.hpp. Blocks below `lowest` are holes.
cdef int copy_blocks(const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1
cdef int transfer_blocks(
    const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
    const Indices& target_ids, int64_t lowest) except -1
cdef int gather_blocks(
    const vector[BlockArray]& caches, const vector[BlockArray]& packed, const PackedSequences& batch) except -1
cdef int scatter_blocks(
    const vector[BlockArray]& packed, const vector[BlockArray]& caches, const PackedSequences& batch) except -1

# The checks of index arrays that the functions above make, without the work. A call that runs on another device uses
# them to raise the same errors.
cdef int check_attention(const AttentionArgs& args) except -1
cdef int check_parts(const Indices& cu_parts, int64_t num_parts) except -1
cdef int check_slots(const Indices& slots, int64_t num_tokens, const Cache& cache) except -1
cdef int check_copied(const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except -1
cdef int check_transferred(
    const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
    const Indices& target_ids, int64_t lowest) except -1
cdef int check_independent(const Indices& sources, const Indices& targets, bint one_cache) except -1
cdef int check_sequences(const PackedSequences& batch) except -1
cdef int64_t total_tokens(const Indices& seq_lens, int64_t width, int64_t block_size) except -1

# Sparse selection; see select.hpp.
cdef int score(const ScoreArgs& args, const ScoreBatch& batch) except -1
cdef int select(const SelectArgs& args) except -1
cdef int summarise(const SummaryArgs& args) except -1

# Moves tokens between slots of all arrays, and renews the bounds of the blocks of the targets.
cdef void move_slots(
    const vector[BlockArray]& arrays, const vector[BoundedKeys]& bounds, const vector[int64_t]& sources,
    const vector[int64_t]& targets, int64_t num_threads) noexcept nogil

# The operations of latent.hpp. `plan` may be None.
cdef int latent_attention(const LatentArgs& args, AttentionPlan plan) except -1
# The checks of latent_attention alone.
cdef int check_latent(const LatentArgs& args) except -1
cdef int write_latent(const LatentWriteArgs& args) except -1
cdef int write_index(const IndexWriteArgs& args) except -1
cdef int gather_latent(
    const LatentCache& cache, float factor, const PackedSequences& batch, const LatentRows& packed) except -1
cdef int index_scores(const IndexScoreCall& call) except -1
cdef int select_topk(const TopkArgs& args) except -1
cdef int slots_of(const SlotsArgs& args) except -1

# Conversions between formats, and copies of the call's other caches; see conversions.hpp. Blocks are those from
# `lowest` on.
cdef int convert_blocks(
    const vector[BlockConversion]& caches, const vector[LatentConversion]& latents,
    const vector[BlockArray]& copied_sources, const vector[BlockArray]& copied_targets, const Indices& sources,
    const Indices& targets, int64_t lowest) except -1
cdef int convert_latent_rows(const LatentConversion& rows) except -1

# The operations for native code of another extension, which cannot link the kernels. Valid for the life of this module.
cdef const HostCalls* host_calls() noexcept

cpdef str isa()
cpdef str set_isa(object name)
cpdef tuple available_isas()
