"""Passes over sequences and their blocks: the first holder and the fill of each block, and the counts of statistics."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.tables._native cimport Int32s
from pagecore.index.tables._tables cimport BlockTables


def mark_blocks(
    const int32_t[:, ::1] table, list sequences, list sizes, int32_t block_size, int32_t[::1] owner, int32_t[::1] tokens
):
    """Write the first holder of each block, and the computed tokens of its fullest holder.

    Blocks without a holder keep their entries. Holes write the entries of the null block.

    Parameters
    ----------
    table : int32 [rows, width]
    sequences : list of Sequence
    sizes : list of int
        Entries of each sequence's row that are blocks.
    owner : int32 [num_blocks]
        Output: index of the first of `sequences` that holds the block.
    tokens : int32 [num_blocks]
        Output: computed tokens in the block.
    """
    cdef Sequence sequence
    cdef const int32_t* blocks
    cdef int32_t* owner_of = &owner[0]
    cdef int32_t* tokens_in = &tokens[0]
    cdef int32_t i, j, size, left
    # Backwards, so that the first holder is written last.
    for i in range(<int32_t> len(sequences) - 1, -1, -1):
        sequence, size = sequences[i], sizes[i]
        if size == 0:
            continue
        # One bounds check for the row; the ids in it come from the index and are valid.
        blocks, left = &table[sequence.row, 0], sequence.computed
        for j in range(min(size, <int32_t> table.shape[1])):
            owner_of[blocks[j]] = i
            tokens_in[blocks[j]] = max(tokens_in[blocks[j]], min(left, block_size))
            left = max(left - block_size, 0)


def count_sequences(list sequences not None, BlockTables tables not None, object pools, int32_t block_size):
    """Return the counts of `CacheStats` that need a pass over the sequences.

    Parameters
    ----------
    sequences : list of Sequence
    tables : BlockTables
        Tables of the rows of those that are not swapped out.
    pools : iterable of BlockPool
        The pool of each group.
    block_size : int
        Tokens of a block.

    Returns
    -------
    num_resident, num_tokens : int
        Sequences with a row, and their computed tokens.
    num_swapped, num_swapped_tokens : int
        Sequences that are swapped out, and their computed tokens.
    num_wasted : int
        Slots of held blocks without a computed token, over all groups; a shared block counts once, for its fullest
        holder.
    """
    cdef Sequence sequence
    cdef int64_t num_resident = 0, num_tokens = 0, num_swapped_tokens = 0, num_wasted = 0
    cdef int64_t group = 0
    for sequence in sequences:
        if sequence.swap_space is None:
            num_resident += 1
            num_tokens += sequence.computed
        else:
            num_swapped_tokens += sequence.computed
    for pool in pools:
        num_wasted += count_wasted(sequences, tables, pool, group, block_size)
        group += 1
    return num_resident, num_tokens, len(sequences) - num_resident, num_swapped_tokens, num_wasted


cdef int64_t count_wasted(
    list sequences, BlockTables tables, BlockPool pool, int64_t group, int32_t block_size
) except -1:
    """Return the slots of the held blocks of a group without a computed token."""
    cdef Sequence sequence
    cdef Int32s blocks
    cdef int32_t j, count, empty, block
    cdef int64_t wasted = 0
    cdef dict least = {}, holders = {}  # of blocks with several holders
    for sequence in sequences:
        if sequence.swap_space is not None:
            continue
        blocks = tables.row_raw(sequence.row, group)
        count = <int32_t> blocks.size()
        empty = block_size - sequence.computed % block_size
        for j in range(sequence.computed // block_size, count):
            block = blocks.data()[j]
            if block and pool.ref_count_raw(block) == 1:
                wasted += empty
            elif block:
                least[block] = min(empty, <int32_t> least.get(block, empty))
                holders[block] = <int32_t> holders.get(block, 0) + 1
            empty = block_size
    for block, empty in least.items():
        # Another holder, the prefix cache or a sequence with more tokens, has the block in full.
        if pool.ref_count_raw(block) == holders[block]:
            wasted += empty
    return wasted
