"""Writes, copies and gathers on the host: Tensors become arguments of the kernels."""

from libc.stdint cimport INT64_MAX, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport (
    BlockArray,
    WriteArgs,
    cache_array,
    fill_block_arrays,
    index_array,
    pair_column,
    per_head,
    table_array,
    token_array,
)
from pagecore.ops.arguments._arguments cimport StoredCache, native_cache
from pagecore.ops.cpu._cpu cimport (
    check_copied as run_check_copied,
    check_independent as run_check_independent,
    check_sequences as run_check_sequences,
    check_slots as run_check_slots,
    check_transferred as run_check_transferred,
    copy_blocks as run_copy,
    gather_blocks as run_gather_blocks,
    scatter_blocks as run_scatter,
    total_tokens as sum_lengths,
    transfer_blocks as run_transfer,
    write_kv as run_write,
)
from pagecore.ops.cpu.args cimport PackedSequences


cdef int write_kv(
        Tensor key, Tensor value, StoredCache key_cache, StoredCache value_cache, Tensor slot_mapping,
        Tensor key_scale, Tensor value_scale, bint four_over_six) except -1:
    cdef WriteArgs args
    args.key = token_array(key)
    args.value = token_array(value)
    args.key_cache = native_cache(key_cache)
    args.value_cache = native_cache(value_cache)
    args.four_over_six = four_over_six
    args.slots = index_array(slot_mapping)
    args.key_scale = per_head(key_scale)
    args.value_scale = per_head(value_scale)
    return run_write(args)


cdef int copy_blocks(list caches, Tensor pairs) except -1:
    cdef vector[BlockArray] arrays
    fill_block_arrays(arrays, caches)
    return run_copy(arrays, pair_column(pairs, 0), pair_column(pairs, 1))


cdef int transfer_blocks(list sources, list targets, Tensor pairs, int64_t lowest) except -1:
    cdef vector[BlockArray] from_arrays, to_arrays
    fill_block_arrays(from_arrays, sources)
    fill_block_arrays(to_arrays, targets)
    return run_transfer(from_arrays, to_arrays, pair_column(pairs, 0), pair_column(pairs, 1), lowest)


cdef PackedSequences packed_sequences(
        list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows,
        int64_t lowest) except *:
    cdef PackedSequences batch
    cdef Tensor cache
    batch.table = table_array(block_table)
    batch.seq_lens = index_array(seq_lens)
    batch.rows = index_array(rows)
    batch.num_blocks = INT64_MAX
    for cache in caches:
        batch.block_size = cache.shape_[1]
        batch.num_blocks = min(batch.num_blocks, cache.shape_[0])
    batch.num_tokens = num_tokens
    batch.lowest = lowest
    return batch


cdef int gather_blocks(
        list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1:
    cdef vector[BlockArray] blocks, tokens
    cdef PackedSequences batch
    if not caches:
        return 0
    batch = packed_sequences(caches, (<Tensor>packed[0]).shape_[0], block_table, seq_lens, rows, lowest)
    fill_block_arrays(blocks, caches)
    fill_block_arrays(tokens, packed)
    return run_gather_blocks(blocks, tokens, batch)


cdef int scatter_blocks(
        list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t lowest) except -1:
    cdef vector[BlockArray] blocks, tokens
    cdef PackedSequences batch
    if not caches:
        return 0
    batch = packed_sequences(caches, (<Tensor>packed[0]).shape_[0], block_table, seq_lens, rows, lowest)
    fill_block_arrays(blocks, caches)
    fill_block_arrays(tokens, packed)
    return run_scatter(tokens, blocks, batch)


# ---- checks of index arrays alone

cdef int check_slots(Tensor slot_mapping, Tensor key, Tensor key_cache) except -1:
    return run_check_slots(index_array(slot_mapping), key.shape_[0], cache_array(key_cache))


cdef int check_copied(list caches, Tensor pairs) except -1:
    cdef vector[BlockArray] arrays
    fill_block_arrays(arrays, caches)
    return run_check_copied(arrays, pair_column(pairs, 0), pair_column(pairs, 1))


cdef int check_transferred(list sources, list targets, Tensor pairs, int64_t lowest) except -1:
    cdef vector[BlockArray] from_arrays, to_arrays
    fill_block_arrays(from_arrays, sources)
    fill_block_arrays(to_arrays, targets)
    return run_check_transferred(from_arrays, to_arrays, pair_column(pairs, 0), pair_column(pairs, 1), lowest)


cdef int check_independent(Tensor pairs, bint one_cache) except -1:
    return run_check_independent(pair_column(pairs, 0), pair_column(pairs, 1), one_cache)


cdef int check_sequences(
        list caches, int64_t num_tokens, Tensor block_table, Tensor seq_lens, Tensor rows) except -1:
    if caches:
        run_check_sequences(packed_sequences(caches, num_tokens, block_table, seq_lens, rows, 1))
    return 0


cdef int64_t total_tokens(Tensor seq_lens, int64_t width, int64_t block_size) except -1:
    return sum_lengths(index_array(seq_lens), width, block_size)
