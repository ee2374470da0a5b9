"""Remove: drop a sequence, also while its step is in flight or while it is swapped out."""

from libc.math cimport NAN
from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.prefix._prefix cimport num_publishable, number_namespaces, publish_one, renew_values
from pagecore.cache.sequences._sequences cimport Sequence, num_whole, require
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.cache.step._step cimport Step
from pagecore.index.radix._native cimport RetentionHint
from pagecore.index.tables._native cimport Int32s


def remove(CacheState state not None, sequence, rank=None):
    """Remove a sequence and release its blocks, tail first; see `PagedKVCache.remove`."""
    cdef Sequence removed
    cdef Step step, writer
    cdef int32_t row
    cdef RetentionHint hint
    hint.rank = NAN if rank is None else <double>rank
    _guard = Held(state.lock)
    state.begin()
    removed = require(state, sequence, False)
    while removed.flight is not None and (<Step>removed.flight).is_used_elsewhere():
        state.wait_for(removed.flight)
        removed = require(state, sequence, False)
    writer = writer_of_last(removed)
    while writer is not None and writer.is_used_elsewhere():
        state.wait_for(writer)
        removed = require(state, sequence, False)
        writer = writer_of_last(removed)
    if state.prefix is not None and state.seals is not None and removed.row >= 0:
        seal_whole(state, removed)
        removed = require(state, sequence, False)
    if state.observer is not None and state.prefix is not None:
        state.observer.removing(removed)
        removed = require(state, sequence, False)
    step = <Step>removed.flight
    if step is not None:
        step.skip_sequence_on_device(removed)
    if writer is not None:
        writer.skip_content_on_device(removed.cross)
    if state.prefix is not None and removed.row >= 0:
        number_namespaces(state.prefix, [removed])
        publish_one(state.prefix, removed, 0)
        renew_values(state.prefix, removed)
    row = removed.row
    if row >= 0:
        state.tables.remove_raw(&row, 1)
    # The row is gone: from here on nothing fails.
    if row >= 0 and state.states is not None:
        state.states.remove_raw(Int32s(&row, 1))
    if removed.stored is not None:
        (<StoredBlocks>removed.stored).release()
    if state.prefix is not None:
        state.prefix.release(removed, hint)
    if step is not None:
        step.skip_sequence(removed)
    if writer is not None:
        writer.skip_content(removed.cross)
    if removed.cross is not None:
        removed.cross.num_swapped -= row < 0
        state.cross.release(removed.cross)
        removed.cross = None
    removed.owner = removed.flight = removed.swap_space = removed.stored = None
    removed.row = removed.pending = -1
    state.num_live -= 1
    if row >= 0:
        state.by_row[row] = None
    try:
        state.drop_name(removed)
    except Exception:  # the id can no longer be compared; the sequence is removed all the same
        pass


cdef int seal_whole(CacheState state, Sequence sequence) except -1:
    """Seal the whole blocks of a sequence that can be published, unless a graph would record it."""
    cdef int64_t operation = state.num_operations
    cdef int32_t length
    if state.seals.quantise is None or sequence.hold.published == INT32_MAX:
        return 0
    if state.seals.quantise.is_captured() or state.num_operations != operation:
        return 0
    length = num_whole(sequence, state.block_size)
    length = num_publishable(state.prefix, sequence, length, 0) * state.block_size
    if length <= sequence.sealed:
        return 0
    state.seals.begin()
    state.seals.add(sequence, length)
    state.seals.run()
    if state.num_operations == operation:  # otherwise code of the caller has changed the cache
        sequence.sealed = length
    return 0


cdef Step writer_of_last(Sequence sequence):
    """Return the step that writes the encoder output of a sequence, if the sequence is the last that holds it."""
    if sequence.cross is None or sequence.cross.num_holders > 1:
        return None
    return <Step>sequence.cross.writer
