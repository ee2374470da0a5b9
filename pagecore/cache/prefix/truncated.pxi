"""Blocks inside which a sequence was truncated: shared with the tree until the sequence writes to them."""

from libc.stdint cimport int32_t, int64_t

from pagecore.cache.sequences._kept cimport KeptKeys, first_kept, sink_blocks
from pagecore.cache.sequences._sequences cimport Sequence
from pagecore.index.radix._radix cimport Receipt


cdef void give_up_truncated(PrefixCache prefix, Sequence sequence) noexcept:
    cdef int32_t lane, block_index = sequence.hold.truncated_block()
    if sequence.hold.truncated_ahead:
        prefix.shorten_ahead(sequence.hold, block_index * prefix.block_size)
        prefix.note_truncated(sequence.hold)
    else:
        prefix.shorten(sequence.hold, sequence.hold.published)
    for lane in range(prefix.num_lanes):
        substitute_truncated(prefix, sequence, lane, block_index)


cdef void substitute_truncated(PrefixCache prefix, Sequence sequence, int32_t lane, int32_t block_index) noexcept:
    """Replace the block in the tree if the tree still holds it, so that the sequence writes in place."""
    cdef int32_t row, block = prefix.shared_block(sequence, block_index, lane)
    if block != 0:
        row = find_substitute(prefix, sequence, lane, block, block_index)
        if row >= 0:
            prefix.substitute(<Sequence>prefix.by_row[row], block_index, lane)


cdef int32_t find_substitute(
    PrefixCache prefix, Sequence sequence, int32_t lane, int32_t block, int32_t block_index
) noexcept:
    """Return the row of a sequence whose own block, or hole, can replace the truncated block in the tree; or -1.

    A sequence with a duplicate of the block qualifies. So does any sequence that holds the block, provided that the
    windows of all sequences that hold it have moved past it.
    """
    cdef int32_t own
    cdef int64_t passed
    cdef KeptKeys keys
    cdef int32_t past = -1
    cdef bint is_needed = lane < prefix.num_full
    if prefix.num_duplicated == 0 and is_needed:
        return -1
    for candidate in prefix.by_row:
        if candidate is None or candidate is sequence:
            continue
        if prefix.tree_block(<Sequence>candidate, block_index, lane) != block:
            continue
        own = prefix.own_block(<Sequence>candidate, block_index, lane)
        if own != 0 and own != block:
            return (<Sequence>candidate).row
        if not is_needed:
            keys = prefix.kept[lane - prefix.num_full]
            passed = first_kept(keys, (<Sequence>candidate).computed)
            is_needed = own != 0 or block_index >= passed // prefix.block_size or (
                block_index < sink_blocks(keys, prefix.block_size))
        past = (<Sequence>candidate).row
    return -1 if is_needed else past


cdef bint becomes_exclusive(PrefixCache prefix, Sequence sequence, int32_t lane, list writers) noexcept:
    cdef int32_t block_index = sequence.hold.truncated_block()
    cdef int32_t block = prefix.shared_block(sequence, block_index, lane)
    if block == 0 or prefix.tree_block(sequence, block_index, lane) != block:
        return False
    return (
        is_pinned_by(prefix, sequence, lane, writers)
        or find_substitute(prefix, sequence, lane, block, block_index) >= 0
    )


cdef bint is_pinned_by(PrefixCache prefix, Sequence sequence, int32_t lane, list writers) noexcept:
    """Return True if only `writers` pin the tree's copy of the sequence's truncated block."""
    cdef int32_t block_index = sequence.hold.truncated_block()
    cdef Receipt receipt = prefix.cover(sequence, block_index, lane)
    cdef int32_t num_pins = prefix.tree.native.num_pins(
        receipt.native.node, block_index, prefix.components[prefix.groups[lane]]
    )
    for writer in writers:
        num_pins -= (
            (<Sequence>writer).hold.truncated_block() == block_index
            and prefix.cover(<Sequence>writer, block_index, lane).native.node == receipt.native.node
        )
    return num_pins <= 0
