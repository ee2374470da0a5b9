"""Passes over a group's block table: the first holder and the fill of each block, and slots without a token."""

from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.pools._block_pool cimport BlockPool


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


def count_wasted(
    const int32_t[:, ::1] table, BlockPool pool not None, list sequences, list capacities, int32_t block_size
):
    """Return the slots of held blocks without a computed token; a shared block counts once, for its fullest holder.

    Parameters
    ----------
    table : int32 [rows, width]
    pool : BlockPool
        The pool of the blocks.
    sequences : list of Sequence
    capacities : list of int
        Number of tokens that the blocks of each sequence have room for.
    """
    cdef Sequence sequence
    cdef dict wasted = {}, holders = {}
    cdef int32_t i, j, end, empty, block
    for i in range(<int32_t> len(sequences)):
        sequence = sequences[i]
        end = min((<int32_t> capacities[i] + block_size - 1) // block_size, <int32_t> table.shape[1])
        empty = block_size - sequence.computed % block_size
        for j in range(sequence.computed // block_size, end):
            block = table[sequence.row, j]
            if block:
                wasted[block] = min(empty, <int32_t> wasted.get(block, empty))
                holders[block] = <int32_t> holders.get(block, 0) + 1
            empty = block_size
    # Another holder, the prefix cache or a sequence with more tokens, has the block in full.
    return sum([count for block, count in wasted.items() if pool.ref_count_raw(block) == holders[block]])
