"""Notes of what host tiers were offered of sequences, and facts about a sequence for which a tier asks."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.sequences._sequences cimport BackupNote, PrefixHold, Sequence, require
from pagecore.cache.state._state cimport CacheState


cdef extern from "pagecore/index/radix/nodes/policy.hpp" namespace "pagecore::radix" nogil:
    const double kDefaultPriority


def list_changed(CacheState state not None, HostIndex host not None, list sequences not None, list limits=None):
    """Return the sequences with published blocks or a checkpoint to back up since their last backup. Hold the lock.

    `limits` has the tokens of each sequence that count; None for all.
    """
    cdef Sequence sequence
    cdef int32_t published
    cdef Py_ssize_t i
    changed = []
    for i in range(len(sequences)):
        if not isinstance(sequences[i], Sequence):
            require(state, sequences[i], False)  # raises
        sequence = <Sequence>sequences[i]
        if sequence.owner is not state or sequence.row < 0:
            continue
        published = num_wanted(host, sequence.hold, INT32_MAX if limits is None else <int64_t>limits[i])
        if not has_backup(host, sequence.hold, published, wanted_checkpoint(state, sequence, published)):
            changed.append(sequence)
    return changed


cdef int32_t num_offered(HostIndex host, PrefixHold hold) noexcept:
    """Return the blocks of a sequence that its last backup has offered to the host."""
    cdef BackupNote* note = hold.note_of(host.number)
    return 0 if note == NULL else note.num_blocks


cdef bint has_backup(HostIndex host, PrefixHold hold, int32_t published, int32_t checkpoint) noexcept:
    """Return True if the last backup of a sequence has offered its first blocks and its checkpoint to the host."""
    cdef BackupNote* note = hold.note_of(host.number)
    return published == 0 or (note != NULL and note.num_blocks == published and note.state_tokens == checkpoint)


cdef int32_t num_wanted(HostIndex host, PrefixHold hold, int64_t most) noexcept:
    """Return the published blocks of a sequence that the host is to have, of its first `most` tokens."""
    if hold.published == INT32_MAX:
        return 0
    return <int32_t>min(<int64_t>hold.published, min(most // host.block_size, count_kept(host, hold)))


cdef int32_t wanted_checkpoint(CacheState state, Sequence sequence, int32_t num_blocks) noexcept:
    """Return the tokens of the state that a sequence keeps and the prefix tree was offered; 0 for none.

    A state after the first `num_blocks` blocks does not count.
    """
    cdef int32_t length = sequence.hold.offered_state
    if state.states is None or length == 0 or state.states.checkpoint_length_raw(sequence.row) != length:
        return 0
    return length if length <= num_blocks * <int64_t>state.block_size else 0


cdef double priority_or_default(double priority) noexcept:
    return kDefaultPriority if priority != priority else priority


def options_of(Sequence sequence not None):
    """Return the RetentionOptions of a live sequence of a cache with a prefix cache."""
    return sequence.hold.options


def version_of(Sequence sequence not None):
    """Return a number of a live sequence that changes when other tokens take the place of some that it has."""
    return sequence.hold.version


def is_new(Sequence sequence not None):
    """Return True if the prefix of a live sequence is not counted yet."""
    return sequence.hold.is_new


def newly_run(list sequences not None):
    """Return those of live sequences that have computed their first tokens, or the first ones after a cut.

    A sequence that was cut to what it reuses is returned once more; one whose prefix is not counted, until it is.
    """
    cdef Sequence sequence
    cdef list found = []  # append() instead of a comprehension, which frees an element twice when memory runs out
    for sequence in sequences:
        if (sequence.hold.is_new or sequence.hold.begins_again) and sequence.computed > sequence.cached:
            found.append(sequence)
            sequence.hold.begins_again = False
    return found


def origin_of(Sequence sequence not None):
    """Return what `count_once` has noted for a live sequence."""
    return sequence.hold.origin


def count_once(Sequence sequence not None, origin, const int64_t[::1] counts, int64_t[::1] totals):
    """Note the origin of a sequence's prefix, and add its counts to the first totals, without an interrupt between."""
    cdef Py_ssize_t i
    for i in range(counts.shape[0]):
        totals[i] += counts[i]
    sequence.hold.origin = origin
    sequence.hold.is_new = False


cdef int64_t count_kept(HostIndex host, PrefixHold hold) noexcept:
    """Return the blocks of a sequence before the first one with a smaller priority than the host keeps."""
    cdef int64_t kept = 0
    cdef size_t i
    if hold.ranges.empty():
        return INT32_MAX if priority_or_default(hold.priority) >= host.min_priority else 0
    for i in range(hold.ranges.size()):
        if priority_or_default(hold.ranges[i].hint.priority) < host.min_priority:
            break
        kept = hold.ranges[i].end
    return kept
