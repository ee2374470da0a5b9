# The host kernels. Arguments are Tensors whose ranks, shapes, dtypes, devices and contiguous last axes the caller has
# checked; what stands *in* index arrays (ids, slots, lengths, plan) is checked here, before anything is written.
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._plan cimport AttentionPlan
from pagecore.ops.cpu.args cimport BlockArray, Cache, HostCalls, Indices, Lse, Rows, Table


# Optional (None): rows, cu_query_lens, plan, sinks, alibi_slopes, mask, key_scale, value_scale, lse.
cdef int attention(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, AttentionPlan plan, double scale, bint causal, int64_t window_left, int64_t window_right,
    double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask, Tensor key_scale, Tensor value_scale, Tensor out,
    Tensor lse) except -1

# Optional: key_scale, value_scale.
cdef int write_kv(
    Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key_scale,
    Tensor value_scale) except -1

# caches: a list or tuple of Tensors whose first axis counts blocks; pairs: [n, 2] of (source, target), done in order.
cdef int copy_blocks(list caches, Tensor pairs) except -1

# The sum of lengths, each of which `width` blocks must hold.
cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1

# caches and packed: lists of Tensors, as many of each; the caches of one block_size, packed
# [num_tokens, ...] with the axes of the cache beside it. Where dtypes differ both are floats. rows may be None. The two
# sides must not overlap.
cdef int gather_blocks(list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows) except -1
cdef int scatter_blocks(list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows) except -1

# Block pairs[i, 0] of each source onto block pairs[i, 1] of the target beside it, which has the same other axes.
cdef int transfer_blocks(list sources, list targets, Tensor pairs) except -1

# Only the checks of the above, of index arrays on the host: for calls that run elsewhere, of which these raise the same
# errors. num_sources and num_targets are those of the smallest caches.
cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1
cdef int check_attended(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, Tensor mask) except -1
cdef int check_copied(list caches, Tensor pairs) except -1
cdef int check_sequences(
    list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1
cdef int check_transferred(list sources, list targets, Tensor pairs) except -1
# That no pair reads or writes what another one writes; one_cache: sources and targets are blocks of the same caches.
cdef int check_independent(Tensor pairs, bint one_cache) except -1

# Tensors as the kernels are told of them; fill_indices leaves what is None absent.
cdef int fill_rows(Rows* rows, Tensor tensor) except -1
cdef int fill_cache(Cache* cache, Tensor tensor) except -1
cdef void fill_lse(Lse* lse, Tensor tensor) noexcept
cdef void fill_indices(Indices* indices, Tensor tensor) noexcept
cdef void fill_table(Table* table, Tensor tensor) noexcept
cdef void fill_pairs(Indices* sources, Indices* targets, Tensor pairs) noexcept
cdef int add_arrays(vector[BlockArray]& arrays, list tensors) except -1

# out may be out_a or out_b, lse may be lse_a or lse_b; lse may be None.
cdef int merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse) except -1

# For the native code of another extension, which cannot link the kernels themselves; lives as long as this module.
cdef const HostCalls* host_calls() noexcept

cpdef str isa()
cpdef str set_isa(object name)
cpdef tuple available_isas()
