"""Truncate: forget the tokens of sequences past a length."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.sequences._kept cimport KeptKeys, first_seen, sink_blocks
from pagecore.cache.sequences._sequences cimport Sequence, require_each
from pagecore.cache.state._state cimport CacheState, Held, Restored
from pagecore.index._integers cimport Integers, as_integers
from pagecore.index.tables._native cimport Int32s
from pagecore.native.std cimport vector

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import ShapeError, UnsupportedOption


def truncate(CacheState state not None, sequences, lengths):
    """Forget the tokens of each sequence past a length; see `PagedKVCache.truncate`."""
    sequences = as_list(sequences)
    numbers = listed_lengths(lengths, len(sequences))
    _guard = Held(state.lock)
    while not try_truncate(state, sequences, numbers):
        pass


cdef bint try_truncate(CacheState state, list sequences, list numbers) except -1:
    """Truncate; return False, with nothing changed, if code of the caller has changed the cache meanwhile."""
    cdef Restored restored = None
    cdef list shortened
    cdef vector[int32_t] rows, kept, computed
    cdef KeptKeys keys
    cdef int64_t operation
    state.begin()
    shortened = read_lengths(state, sequences, numbers, rows, kept, computed)
    for keys in state.kept:
        if not keys.is_tail:
            check_windows(state, keys, rows, computed)
    if state.prefix is not None:
        state.prefix.reserve_moves(2 * len(shortened))
    if state.seals is not None:
        restored = cut_blocks(state, shortened, computed)
    if restored is not None:
        operation = state.num_operations
        restored.fill()
        if state.num_operations != operation:
            restored.give_back()
            return False
    try:
        state.tables.truncate_raw(rows.data(), computed.data(), <Py_ssize_t>rows.size(), False)
    except BaseException:
        if restored is not None:
            restored.give_back()
        raise
    # The rows have changed: from here on nothing fails.
    if restored is not None:
        restored.place()
    if state.states is not None:
        state.states.truncate_raw(Int32s(rows.data(), rows.size()), Int32s(computed.data(), computed.size()))
    shorten_sequences(state, shortened, kept, computed)
    return True


cdef list read_lengths(
    CacheState state, list sequences, list numbers, vector[int32_t]& rows, vector[int32_t]& kept,
    vector[int32_t]& computed
):
    """Check sequences and lengths; list the rows, and the known and computed tokens to keep."""
    cdef list shortened = require_each(state, sequences, True)
    cdef Sequence sequence
    for sequence, length in zip(shortened, numbers):
        most = max(sequence.known, sequence.computed)
        if not 0 <= length <= most:
            raise ShapeError(f"length is {length}; sequence {sequence.id!r} has {most} tokens: give 0 to {most}")
        if 0 < length < sequence.compacted:
            raise UnsupportedOption(
                f"length is {length}, but sequence {sequence.id!r} was compacted to {sequence.compacted} tokens, whose "
                f"positions have gaps; give {sequence.compacted} to {most}, or 0 to compute it again"
            )
        rows.push_back(sequence.row)
        kept.push_back(length)
        computed.push_back(min(<int32_t>length, sequence.computed))
        if state.states is not None:
            check_state(state, sequence, computed.back())
    return shortened


cdef Restored cut_blocks(CacheState state, list shortened, const vector[int32_t]& computed):
    """Return the blocks to restore for sequences that are cut inside a sealed block; None without such sequences."""
    cdef Restored restored = None
    cdef size_t i
    for i in range(computed.size()):
        if not state.seals.cuts(<Sequence>shortened[i], computed[i]):
            continue
        if state.seals.quantise is None:
            refuse_sealed(state, <Sequence>shortened[i], computed[i])
        if restored is None:
            restored = Restored(state)
        restored.add(<Sequence>shortened[i], computed[i])
    return restored


cdef int refuse_sealed(CacheState state, Sequence sequence, int32_t length) except -1:
    raise UnsupportedOption(
        f"length is {length}, but the first {sequence.sealed} tokens of sequence {sequence.id!r} are in sealed blocks, "
        "whose numbers a cache with device='none' cannot restore; give "
        f"{length // state.block_size * state.block_size}, a multiple of block_size, or {sequence.sealed} or more"
    )


cdef void shorten_sequences(
    CacheState state, list shortened, const vector[int32_t]& kept, const vector[int32_t]& computed
) noexcept:
    """Let sequences and prefix cache follow the rows that were cut."""
    cdef Sequence sequence
    cdef size_t i
    cdef bint is_cut
    for i in range(computed.size()):
        sequence = <Sequence>shortened[i]
        is_cut = state.seals is not None and state.seals.cuts(sequence, computed[i])
        if state.prefix is not None:
            state.prefix.truncate(sequence, computed[i])
            if computed[i] <= <int64_t>sequence.hold.publish_limit * state.block_size:
                sequence.hold.publish_limit = INT32_MAX  # the row has none of the revoked blocks any more
            if is_cut:  # sealing the restored numbers again adds an error, which other sequences do not expect
                sequence.hold.publish_limit = min(sequence.hold.publish_limit, computed[i] // state.block_size)
        sequence.known = min(sequence.known, kept[i])
        sequence.computed = computed[i]
        sequence.sealed = min(sequence.sealed, computed[i] - (computed[i] % state.block_size if is_cut else 0))
        sequence.cached = min(sequence.cached, kept[i])
        if sequence.hold is not None and sequence.computed == sequence.cached:
            sequence.hold.begins_again = True
        if kept[i] == 0:
            forget_compaction(sequence)


cdef void forget_compaction(Sequence sequence) noexcept:
    """Let the positions of an empty sequence begin at 0 again, and its blocks be published."""
    sequence.dropped = sequence.compacted = 0
    if sequence.hold is not None:
        sequence.hold.is_ended = False


cdef int check_state(CacheState state, Sequence sequence, int32_t length) except -1:
    """Raise UnsupportedOption for a length at which a sequence has no recurrent state."""
    cdef int32_t possible = state.states.resume_length_raw(sequence.row, length)
    if possible != length:
        raise UnsupportedOption(
            f"length is {length}, but sequence {sequence.id!r} has no recurrent state after {length} tokens; give "
            f"{possible}, {sequence.computed} or more, and compute the tokens after it again"
            if possible else
            f"length is {length}, but sequence {sequence.id!r} has no recurrent state after {length} tokens, and none "
            f"before; give 0 to compute it again, or {sequence.computed} or more"
        )
    return 0


cdef list listed_lengths(object lengths, Py_ssize_t count):
    """Return one length for each of `count` sequences; `lengths` is an int for all, or one for each."""
    cdef Integers given = as_integers(lengths, "length", ShapeError)
    cdef list listed = []
    cdef Py_ssize_t i
    if given.is_scalar:
        return [given.data[0]] * count
    if given.size != count:
        raise ShapeError(f"{given.size} lengths are given for {count} sequences; give one for each")
    for i in range(count):
        listed.append(given.data[i])
    return listed


cdef int check_windows(
    CacheState state, const KeptKeys& keys, const vector[int32_t]& rows, const vector[int32_t]& lengths
) except -1:
    """Raise UnsupportedOption for a length at which keys that the next token sees were released."""
    cdef size_t i
    cdef int64_t held, holes, sinks = sink_blocks(keys, state.block_size)
    cdef const int32_t* blocks
    for i in range(rows.size()):
        if lengths[i] == 0:
            continue
        blocks = state.tables.row_raw(rows[i], keys.group).data()
        held = (<int64_t>lengths[i] + state.block_size - 1) // state.block_size
        holes = min(sinks, held)
        while holes < held and blocks[holes] == 0:
            holes += 1
        if holes > sinks and holes * state.block_size > first_seen(keys, lengths[i]):
            reach = f"window of {keys.window}" if keys.chunk == 0 else f"chunk of {keys.chunk}"
            raise UnsupportedOption(
                f"length is {lengths[i]}, but the keys before position {holes * state.block_size} have left the "
                f"{reach} tokens and were released; truncate by up to the spec's lookahead, or to 0 and compute the "
                "sequence again"
            )
    return 0
