"""One pass over a group's block table that finds the first holder and the fill of each block."""

from libc.stdint cimport int32_t

from pagecore.cache.sequences._sequence cimport Sequence


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
