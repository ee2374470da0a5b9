"""Revocation: cached blocks whose content is wrong leave the tree, even while sequences use them.

The sequences keep their blocks, whose references are their own. Their receipts end before the revoked block, and they
publish nothing from it on: what they computed after it may be wrong, too.
"""

from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t
from libc.string cimport memcmp

from pagecore.cache.sequences._sequences cimport PrefixHold, Sequence
from pagecore.index.radix._native cimport Int32s, Mark, Marks, Query, ReceiptPointer, RetentionHint
from pagecore.index.radix._radix cimport Prefix, Receipt, read_prefix
from pagecore.native.std cimport vector


def revoke_prefix(PrefixCache prefix not None, list sequences not None, ids, options, int64_t valid):
    """Revoke the block with token `valid` of a prefix and what continues it.

    `sequences` lists those of the cache. Returns a dict: the leading tokens that are valid of each sequence that has
    the block.
    """
    cdef Prefix wanted = read_prefix(prefix.block_size, ids, options.namespace, options.spans, None)
    cdef int64_t index = valid // prefix.block_size
    wanted.space = space_of(prefix, wanted.key)
    shared = shared_under_other_tokens(prefix, sequences, wanted.query(), wanted.key, index)
    affected = revoke(prefix, sequences, wanted.query(), wanted.key, index)
    for lane, block in shared:
        affected.update(revoke_cached(prefix, sequences, prefix.groups[lane], block))
    return affected


def revoke_block(PrefixCache prefix not None, list sequences not None, int32_t group, int32_t block):
    """Revoke a block of a group, in the tree and in rows, and what continues it; returns as `revoke_prefix` does."""
    cdef Sequence sequence
    cdef Query query
    cdef Int32s row
    cdef int64_t i
    cdef dict affected = {}
    for sequence in sequences:
        if sequence.row < 0:
            continue
        row = prefix.tables.row_raw(sequence.row, group)
        for i in range(<int64_t>row.size()):
            if row.data()[i] != block:
                continue
            query = prefix.query_of(sequence, <int32_t>min(i + 1, sequence.known // prefix.block_size))
            query.space = space_of(prefix, sequence.hold.receipt.key)
            affected.update(revoke(prefix, sequences, query, sequence.hold.receipt.key, i))
            sequence.hold.publish_limit = min(sequence.hold.publish_limit, <int32_t>i)
            affected.setdefault(sequence, valid_tokens(sequence, i * prefix.block_size))
            break
    affected.update(revoke_cached(prefix, sequences, group, block))
    return affected


cdef set shared_under_other_tokens(
    PrefixCache prefix, list sequences, const Query& query, object key, int64_t valid
):
    """Return (lane, block) of the tree's blocks that sequences share which were truncated inside block `valid`.

    Such a sequence may have got other tokens after its computed ones, by which the tree does not find the block.
    """
    cdef Sequence sequence
    cdef int32_t lane, block
    cdef set shared = set()
    if prefix.num_truncated == 0 or valid >= <int64_t>query.tokens.size() // prefix.block_size:
        return shared
    for sequence in sequences:
        if not sequence.hold.truncated_inside_block or sequence.hold.truncated_block() != valid:
            continue
        if not has_block(prefix, sequence, query, key, valid):
            continue
        for lane in range(prefix.num_lanes):
            block = prefix.tree_block(sequence, <int32_t>valid, lane)
            if block != 0:
                shared.add((lane, block))
    return shared


cdef dict revoke_cached(PrefixCache prefix, list sequences, int32_t group, int32_t block):
    """Revoke a block that the tree holds, if it does."""
    cdef vector[int32_t] tokens
    cdef vector[Mark] marks
    cdef Query query
    if group >= prefix.num_lanes:
        return {}
    query.space = prefix.tree.native.copy_path_of(prefix.lane_of[group], block, tokens, marks)
    if query.space < 0:
        return {}
    query.tokens = Int32s(tokens.data(), tokens.size())
    query.marks = Marks(marks.data(), marks.size())
    key = prefix.tree.space_keys[query.space]
    return revoke(prefix, sequences, query, key, <int64_t>tokens.size() // prefix.block_size - 1)


cdef int32_t space_of(PrefixCache prefix, object key) except -2:
    return 0 if key is None else prefix.tree.spaces.get(key, -1)


cdef dict revoke(PrefixCache prefix, list sequences, const Query& query, object key, int64_t valid):
    cdef vector[ReceiptPointer] receipts
    cdef vector[vector[int32_t]] gone
    cdef Sequence sequence
    cdef dict affected = {}
    cdef list holds = []
    if valid >= <int64_t>query.tokens.size() // prefix.block_size:
        return affected
    for sequence in sequences:
        if has_block(prefix, sequence, query, key, valid):
            affected[sequence] = valid_tokens(sequence, valid * prefix.block_size)
            holds.append(sequence.hold)
            add_receipt(receipts, sequence.hold.receipt)
            add_receipt(receipts, sequence.hold.ahead)
    for transfer in prefix.transfers:
        add_receipt(receipts, transfer.receipt)
    if query.space >= 0:
        prefix.tree.revoke_raw(query, valid, receipts, gone)
        free_gone(prefix, gone, prefix.left)
    for each in holds:
        limit(prefix, <PrefixHold>each, <int32_t>valid)
    return affected


cdef int64_t valid_tokens(Sequence sequence, int64_t end) noexcept:
    """Return the number of tokens before `end` that a sequence has, or has after the commit of its step in flight."""
    return min(end, <int64_t>sequence.computed + max(sequence.pending, 0))


cdef int add_receipt(vector[ReceiptPointer]& receipts, Receipt receipt) except -1:
    if receipt is not None and receipt.native.components != 0:
        receipts.push_back(&receipt.native)
    return 0


cdef bint has_block(PrefixCache prefix, Sequence sequence, const Query& query, object key, int64_t valid) except -1:
    """Return True if a sequence has block `valid` of a query, or the beginning of that block.

    A sequence that was truncated inside the block shares it until it writes, and a fork may have copied its beginning:
    only the tokens that the sequence has count.
    """
    cdef PrefixHold hold = sequence.hold
    cdef int64_t begin = valid * prefix.block_size
    cdef int64_t end = valid_tokens(sequence, INT64_MAX)
    if not hold.truncated_inside_block:
        end = max(end, <int64_t>prefix.num_held(hold) * prefix.block_size)
    end = min(end, min(<int64_t>sequence.known, begin + prefix.block_size))
    if end <= begin:
        return False
    if memcmp(sequence.ids, query.tokens.data(), end * sizeof(int32_t)) != 0 or hold.receipt.key != key:
        return False
    return has_marks(hold, query.marks, valid)


cdef bint has_marks(PrefixHold hold, Marks marks, int64_t valid) noexcept:
    """Return True if the spans of a sequence are `marks` in its first `valid` + 1 blocks; both are in order."""
    cdef size_t i = 0
    while i < marks.size() and marks.data()[i].block <= valid:
        if i >= hold.marks.size() or not is_same(hold.marks[i], marks.data()[i]):
            return False
        i += 1
    return i >= hold.marks.size() or hold.marks[i].block > valid


cdef bint is_same(Mark a, Mark b) noexcept:
    return (
        a.block == b.block and a.start == b.start and a.end == b.end and a.digest.kind == b.digest.kind
        and memcmp(a.digest.bytes.data(), b.digest.bytes.data(), 32) == 0
    )


cdef void limit(PrefixCache prefix, PrefixHold hold, int32_t valid) noexcept:
    """Let a sequence publish `valid` blocks at most, which its receipts cover at most."""
    cdef RetentionHint none
    hold.publish_limit = min(hold.publish_limit, valid)
    if hold.published != INT32_MAX:
        hold.published = min(hold.published, valid)
    if hold.ahead is not None and hold.ahead.native.components != 0:
        hold.truncated_ahead = hold.truncated_ahead and hold.ahead.depth() > valid
        if hold.ahead.depth() <= hold.receipt.depth():
            hold.ahead.drop(none)
            hold.truncated_ahead = False
    hold.shorten_notes(0, 0)
    prefix.note_truncated(hold)
