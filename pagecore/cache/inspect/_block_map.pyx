"""One pass over a group's block table that tells, for each block, who holds it and how full it is."""

from libc.stdint cimport int32_t

from pagecore.cache._sequence cimport Sequence


def mark_blocks(
    const int32_t[:, ::1] table, list sequences, list sizes, int32_t block_size, int32_t[::1] owner, int32_t[::1] tokens
):
    """Mark the blocks of each of `sequences`, which hold the first `sizes[i]` entries of their rows.

    `owner` [num_blocks] gets the place of the first sequence that holds a block, `tokens` [num_blocks] its computed
    tokens, those of its fullest holder; blocks that nobody holds keep what is there. Holes mark the null block.
    """
    cdef Sequence sequence
    cdef const int32_t* blocks
    cdef int32_t* owner_of = &owner[0]
    cdef int32_t* tokens_in = &tokens[0]
    cdef int32_t i, j, size, left
    # Backwards, so that the first holder's mark is the one that stays.
    for i in range(<int32_t> len(sequences) - 1, -1, -1):
        sequence, size = sequences[i], sizes[i]
        if size == 0:
            continue
        # One check for the row; the ids in it are the index's own.
        blocks, left = &table[sequence.row, 0], sequence.computed
        for j in range(min(size, <int32_t> table.shape[1])):
            owner_of[blocks[j]] = i
            tokens_in[blocks[j]] = max(tokens_in[blocks[j]], min(left, block_size))
            left = max(left - block_size, 0)
