from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Sealed, StoredCache, TreeMask
from pagecore.ops.cpu.args cimport Selection
from pagecore.ops.cpu.latent.latent cimport LatentCache
from pagecore.ops.planning._plan cimport AttentionPlan


# attention.pxi

# Paged attention and merges on the host. Arguments are what ops/attention has checked; see _cpu.pxd.

# Optional: rows, cu_query_lens, plan, sinks, alibi_slopes, mask, tree, key_scale, value_scale, sealed, lse. `selection`
# may be empty.
cdef int attention(
    Tensor query, StoredCache key_cache, StoredCache value_cache, Tensor block_table, Tensor seq_lens,
    Tensor rows, Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left,
    int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
    TreeMask tree, Tensor key_scale, Tensor value_scale, Sealed sealed, Tensor out, Tensor lse,
    const Selection& selection) except -1

# out may be out_a or out_b, lse may be lse_a or lse_b. Optional: mask, lse.
cdef int merge(
    Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor mask, Tensor out, Tensor lse) except -1

# Optional: cu_parts.
cdef int merge_many(Tensor parts, Tensor lses, Tensor cu_parts, Tensor out, Tensor lse) except -1

# The checks of index arrays alone, for calls that run on another device. Optional: rows, cu_query_lens, mask, tree,
# sealed.
cdef int check_attended(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
    Tensor mask, TreeMask tree, Sealed sealed, const Selection& selection) except -1
cdef int check_parts(Tensor cu_parts, int64_t num_parts) except -1
cdef int check_scored(
    Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
    int64_t block_size) except -1


# latent_rows.pxi

# Rows of latent caches on the host. Arguments are what ops/latent/latent_rows.pxi has checked; see _cpu.pxd.

# Optional: rows.
cdef int gather_latent(
    const LatentCache& cache, double factor, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor out,
    int64_t lowest) except -1


# moves.pxi

# Writes, copies and gathers on the host. Arguments are what ops/moves has checked; see _cpu.pxd.

# Optional: key_scale, value_scale, the given factors. `four_over_six`: how scales of nvfp4 are computed.
cdef int write_kv(
    Tensor key, Tensor value, StoredCache key_cache, StoredCache value_cache, Tensor slot_mapping, Tensor key_scale,
    Tensor value_scale, bint four_over_six) except -1

# The first axis of each cache counts blocks. `pairs` is [n, 2] of (source, target), copied in order.
cdef int copy_blocks(list caches, Tensor pairs) except -1

# Copies block pairs[i, 0] of each source to block pairs[i, 1] of the target with the same list index, which has the
# same axes after the first.
cdef int transfer_blocks(list sources, list targets, Tensor pairs, int64_t lowest) except -1

# Packed arrays are [num_tokens, ...], one for each cache, with the cache's axes after the second. All caches have one
# block_size. If the dtypes of a cache and its packed array differ, both are floats. No cache may overlap a packed
# array. Optional: rows. Blocks below `lowest` are holes.
cdef int gather_blocks(
    list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1
cdef int scatter_blocks(
    list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1

# The checks of index arrays alone, for calls that run on another device.
cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1
cdef int check_copied(list caches, Tensor pairs) except -1
cdef int check_transferred(list sources, list targets, Tensor pairs, int64_t lowest) except -1
cdef int check_sequences(
    list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1

# Raises UnsupportedOption if a pair reads or writes what another pair writes. `one_cache`: sources and targets are
# blocks of the same caches.
cdef int check_independent(Tensor pairs, bint one_cache) except -1

# The sum of the lengths; ShapeError if `width` blocks do not hold one of them.
cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1
