# Bindings of the host kernels.
#
# The caller has checked ranks, shapes, dtypes, devices and contiguous last axes. The contents of index arrays (ids,
# slots, lengths) and of the plan are checked here, before anything is written. Optional Tensors may be None.
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport BlockArray
from pagecore.ops.arguments._formats cimport StoredCache
from pagecore.ops.arguments._tree cimport TreeMask
from pagecore.ops.cpu.args cimport Codec, HostCalls, Selection
from pagecore.ops.cpu.codecs.conversions cimport BlockConversion, LatentConversion
from pagecore.ops.cpu.latent.latent cimport (
    IndexScoreCall,
    IndexWriteArgs,
    LatentArgs,
    LatentCache,
    LatentWriteArgs,
    SlotsArgs,
    TopkArgs,
)
from pagecore.ops.cpu.moves.slot_moves cimport BoundedKeys
from pagecore.ops.cpu.sparse.select cimport ScoreArgs, ScoreBatch, SelectArgs, SummaryArgs
from pagecore.ops.planning._plan cimport AttentionPlan
from pagecore.ops.state_plane cimport StatePlane


# Optional: rows, cu_query_lens, plan, sinks, alibi_slopes, mask, tree, key_scale, value_scale, lse. `selection` may be
# empty.
cdef int attention(
    Tensor query, StoredCache key_cache, StoredCache value_cache, Tensor block_table, Tensor seq_lens,
    Tensor rows, Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left,
    int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
    TreeMask tree, Tensor key_scale, Tensor value_scale, Tensor out, Tensor lse, const Selection& selection) except -1

# Optional: key_scale, value_scale, the given factors. `four_over_six`: how scales of nvfp4 are computed.
cdef int write_kv(
    Tensor key, Tensor value, StoredCache key_cache, StoredCache value_cache, Tensor slot_mapping, Tensor key_scale,
    Tensor value_scale, bint four_over_six) except -1

# Fills the codes, or the numbers, of all rows.
cdef int quantize(const Codec& codec) except -1
cdef int dequantize(const Codec& codec) except -1

# Converts slots pairs[2 * i] of a state to slots pairs[2 * i + 1] of its codes, or with `restores` back.
cdef void convert_states(
    const StatePlane& plane, const int64_t* pairs, int64_t count, int64_t num_threads, bint restores) noexcept nogil

# The first axis of each cache counts blocks. `pairs` is [n, 2] of (source, target), copied in order.
cdef int copy_blocks(list caches, Tensor pairs) except -1

# Copies block pairs[i, 0] of each source to block pairs[i, 1] of the target with the same list index, which has the
# same axes after the first.
cdef int transfer_blocks(list sources, list targets, Tensor pairs, int64_t lowest) except -1

# Packed arrays are [num_tokens, ...], one for each cache, with the cache's axes after the second. All caches have one
# block_size. If the dtypes of a cache and its packed array differ, both are floats. No cache may overlap a packed
# array. Optional: rows.
# Blocks below `lowest` are holes.
cdef int gather_blocks(
    list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1
cdef int scatter_blocks(
    list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1

# out may be out_a or out_b, lse may be lse_a or lse_b. Optional: lse.
cdef int merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse) except -1

# Sparse selection; see select.hpp.
cdef int score(const ScoreArgs& args, const ScoreBatch& batch) except -1
cdef int select(const SelectArgs& args) except -1
cdef int summarise(const SummaryArgs& args) except -1

# Moves tokens between slots of all arrays, and renews the bounds of the blocks of the targets.
cdef void move_slots(
    const vector[BlockArray]& arrays, const vector[BoundedKeys]& bounds, const vector[int64_t]& sources,
    const vector[int64_t]& targets, int64_t num_threads) noexcept nogil

# The operations of latent.hpp. Optional: plan, rows.
cdef int latent_attention(const LatentArgs& args, AttentionPlan plan) except -1
# The checks of latent_attention alone.
cdef int check_latent(const LatentArgs& args) except -1
cdef int write_latent(const LatentWriteArgs& args) except -1
cdef int write_index(const IndexWriteArgs& args) except -1

# Conversions between formats; see conversions.hpp. `pairs` is [n, 2] of (source, target), blocks from `lowest` on.
cdef int convert_blocks(
    const vector[BlockConversion]& caches, const vector[LatentConversion]& latents, Tensor pairs,
    int64_t lowest) except -1
cdef int convert_latent_rows(const LatentConversion& rows) except -1
cdef int gather_latent(
    const LatentCache& cache, double factor, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor out,
    int64_t lowest) except -1
cdef int index_scores(const IndexScoreCall& call) except -1
cdef int select_topk(const TopkArgs& args) except -1
cdef int slots_of(const SlotsArgs& args) except -1

# The checks of index arrays on the host that the functions above make, without the work. A call that runs on another
# device uses them to raise the same errors.
cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1
cdef int check_attended(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
    Tensor mask, TreeMask tree, const Selection& selection) except -1
cdef int check_scored(
    Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
    int64_t block_size) except -1
cdef int check_copied(list caches, Tensor pairs) except -1
cdef int check_sequences(
    list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1
cdef int check_transferred(list sources, list targets, Tensor pairs, int64_t lowest) except -1

# Raises UnsupportedOption if a pair reads or writes what another pair writes. `one_cache`: sources and targets are
# blocks of the same caches.
cdef int check_independent(Tensor pairs, bint one_cache) except -1

# The sum of the lengths; ShapeError if `width` blocks do not hold one of them.
cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1

# The operations for native code of another extension, which cannot link the kernels. Valid for the life of this module.
cdef const HostCalls* host_calls() noexcept

cpdef str isa()
cpdef str set_isa(object name)
cpdef tuple available_isas()
