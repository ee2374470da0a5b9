"""Sequences come, grow, branch, shrink and go.

Every function takes the lock of the cache, plans, and then commits by calls that cannot fail; see `CacheState`.
"""

from libc.math cimport NAN
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.cache._hold cimport PrefixHold
from pagecore.cache._lock cimport Held
from pagecore.cache._sequence cimport Sequence, new_sequence, require, require_each
from pagecore.cache._state cimport CacheState
from pagecore.cache._step cimport Step
from pagecore.cache._stored cimport StoredBlocks
from pagecore.index._integers cimport Integers, as_int64, as_integers, const_int32
from pagecore.index._namespace_key cimport key_of
from pagecore.index._radix_query cimport RetentionHint
from pagecore.index._radix_tree cimport NativeMatch

import numpy as np

from pagecore.cache._sequence import as_list
from pagecore.errors import InvalidSequence, NotEnoughMemory, OutOfRows, ShapeError, UnsupportedOption


NO_IDS = np.zeros(0, np.int32)


cdef class Prefix:
    """Blocks of each group that a row begins with."""
    cdef vector[vector[int32_t]] blocks
    cdef vector[span[const_int32]] spans


cdef Prefix found_prefix(CacheState state, const NativeMatch& found):
    cdef Prefix prefix = Prefix.__new__(Prefix)
    cdef size_t group, num_groups = state.prefix.lane_of.size()
    prefix.blocks.resize(num_groups)
    prefix.spans.resize(num_groups)
    for group in range(num_groups):
        prefix.blocks[group].resize(<size_t>found.blocks)
        if found.blocks > 0:
            state.prefix.tree.copy_match_raw(
                found, state.prefix.lane_of[group], span[int32_t](prefix.blocks[group].data(), <size_t>found.blocks)
            )
        prefix.spans[group] = span[const_int32](prefix.blocks[group].data(), <size_t>found.blocks)
    return prefix


cdef void come_alive(CacheState state, Sequence sequence, int32_t row) noexcept:
    sequence.row = row
    state.by_row[row] = sequence
    sequence.owner = state
    state.num_live += 1


cdef int require_row(CacheState state) except -1:
    if state.tables.num_free_rows() == 0:
        raise OutOfRows(
            f"all {state.tables.max_sequences} rows are in use; remove a sequence, swap one out or raise max_sequences"
        )
    return 0


def add(CacheState state not None, name, const int32_t[::1] ids not None, options, int64_t most):
    """Add a sequence whose row begins with what the prefix cache has of it, up to `most` tokens."""
    cdef Sequence sequence
    cdef NativeMatch found
    cdef Prefix prefix
    cdef vector[span[const_int32]] none
    cdef int32_t row
    _guard = Held(state.lock)
    state.begin()
    sequence = new_sequence(state.new_name(name), ids)
    if state.prefix is not None:
        sequence.hold = PrefixHold(state.prefix.tree, options, state.tables.max_blocks_per_sequence)
    if state.tenants is not None:
        sequence.tenant = state.tenants.number_of(None if options.namespace is None else key_of(options.namespace))
    state.reserve_name(sequence)  # code of the caller may run until here
    require_row(state)
    if state.prefix is None:
        row = state.tables.add_raw(none)
    else:
        state.prefix.match_sequence(sequence, most // state.block_size, &found)
        prefix = found_prefix(state, found)
        state.prefix.reserve_moves(1)
        row = state.tables.add_raw(prefix.spans)
        # The row is there: from here on nothing fails.
        state.prefix.attach(sequence, found)
        sequence.computed = sequence.cached = <int32_t>found.blocks * state.block_size
    come_alive(state, sequence, row)
    if name is None:
        state.next_number += 1
    return sequence


def fork(CacheState state not None, parent, name):
    """Add a sequence that shares all blocks of `parent`."""
    cdef Sequence source, child
    cdef int32_t row
    _guard = Held(state.lock)
    state.begin()
    require(state, parent, True)
    child = new_sequence(state.new_name(name), NO_IDS)
    state.reserve_name(child)  # code of the caller may run until here
    source = require(state, parent, True)
    require_row(state)
    child.reserve(source.known)
    child.append(source.ids, source.known)
    if state.prefix is not None:
        child.hold = source.hold.blank_copy()
        state.prefix.name_spaces([source])
        state.prefix.publish_one(source, False)
    row = state.tables.fork_raw(source.row)
    # The row is there: from here on nothing fails.
    child.tenant = source.tenant
    child.computed = source.computed
    child.cached = source.cached
    if state.prefix is not None:
        inherit(state, child, child.hold, source.hold, source.published, source.has_duplicates)
    come_alive(state, child, row)
    if name is None:
        state.next_number += 1
    return child


cdef void inherit(
    CacheState state, Sequence child, PrefixHold hold, PrefixHold source, int32_t published, bint has_duplicates
) noexcept:
    """The row of `child` has become that of a sequence with these marks."""
    state.prefix.tree.fork_raw(source.receipt, hold.receipt)
    child.hold = hold
    child.published = published
    state.prefix.note_truncated(child)
    state.prefix.note_duplicates(child, has_duplicates)


cdef class Heir:
    """What a sequence becomes in a reorder."""
    cdef Sequence child, parent
    cdef PrefixHold old_hold, hold, parent_hold
    cdef int32_t* ids           # a copy of the parent's, for the child
    cdef int32_t known, computed, cached, published
    cdef int64_t tenant
    cdef bint has_duplicates

    def __dealloc__(self):
        free(self.ids)

    cdef int copy_ids(self) except -1:
        self.known = self.parent.known
        self.ids = <int32_t*>malloc(max(self.known, 1) * sizeof(int32_t))
        if self.ids == NULL:
            raise NotEnoughMemory(f"no memory for {self.known} token ids; remove a sequence")
        if self.known > 0:
            memcpy(self.ids, self.parent.ids, self.known * sizeof(int32_t))
        return 0

    cdef void read_parent(self) noexcept:
        self.tenant = self.parent.tenant
        self.computed = self.parent.computed
        self.cached = self.parent.cached
        self.published = self.parent.published
        self.has_duplicates = self.parent.has_duplicates
        self.parent_hold = self.parent.hold
        self.old_hold = self.child.hold

    cdef void write_child(self, CacheState state) noexcept:
        cdef int32_t* old = self.child.ids
        self.child.ids = self.ids
        self.ids = old
        self.child.known = self.known
        self.child.ids_capacity = max(self.known, 1)
        self.child.tenant = self.tenant
        self.child.computed = self.computed
        self.child.cached = self.cached
        if state.prefix is not None:
            inherit(state, self.child, self.hold, self.parent_hold, self.published, self.has_duplicates)


def reorder(CacheState state not None, sequences, parents):
    """Let each sequence become what its parent was before the call; parents may repeat."""
    cdef list children, sources
    cdef list heirs = []
    cdef Heir heir
    cdef vector[int32_t] rows, parent_rows
    cdef RetentionHint none
    sequences, parents = as_list(sequences), as_list(parents)
    if len(sequences) != len(parents):
        raise ShapeError(f"{len(parents)} parents are given for {len(sequences)} sequences; give one for each")
    _guard = Held(state.lock)
    state.begin()
    sources = []
    for parent in parents:
        sources.append(require(state, parent, True))
    if state.prefix is not None:
        state.prefix.name_spaces(sources)
    children = require_each(state, sequences, True)
    for child, parent in zip(children, sources):
        rows.push_back((<Sequence>child).row)
        parent_rows.push_back((<Sequence>parent).row)
        if child is not parent:
            heir = Heir()
            heir.child, heir.parent = child, parent
            heir.copy_ids()
            if state.prefix is not None:
                heir.hold = heir.parent.hold.blank_copy()
            heirs.append(heir)
    if state.prefix is not None:
        state.prefix.publish(sources, False)
    state.tables.reorder_raw(rows.data(), parent_rows.data(), <Py_ssize_t>rows.size())
    # The rows have changed: from here on nothing fails.
    for each in heirs:
        (<Heir>each).read_parent()
    for each in heirs:
        (<Heir>each).write_child(state)
    if state.prefix is not None:
        for each in heirs:
            state.prefix.tree.release_raw((<Heir>each).old_hold.receipt, none)


def truncate(CacheState state not None, sequences, lengths):
    """Forget the tokens past a length for each sequence."""
    cdef list cut
    cdef vector[int32_t] rows, kept, computed
    cdef Sequence sequence
    cdef size_t i
    sequences = as_list(sequences)
    numbers = listed_lengths(lengths, len(sequences))
    _guard = Held(state.lock)
    state.begin()
    cut = require_each(state, sequences, True)
    for sequence, length in zip(cut, numbers):
        most = max(sequence.known, sequence.computed)
        if not 0 <= length <= most:
            raise ShapeError(f"length is {length}; sequence {sequence.id!r} has {most} tokens: give 0 to {most}")
        rows.push_back(sequence.row)
        kept.push_back(length)
        computed.push_back(min(<int32_t>length, sequence.computed))
    for i in range(state.windows.size()):
        check_windows(state, state.window_groups[i], state.windows[i], rows, computed)
    if state.prefix is not None:
        state.prefix.reserve_moves(len(cut))
    state.tables.truncate_raw(rows.data(), computed.data(), <Py_ssize_t>rows.size(), False)
    # The rows have changed: from here on nothing fails.
    for i in range(rows.size()):
        sequence = <Sequence>cut[i]
        if state.prefix is not None:
            state.prefix.truncate(sequence, computed[i])
        sequence.known = min(sequence.known, kept[i])
        sequence.computed = computed[i]
        sequence.cached = min(sequence.cached, kept[i])


def listed_lengths(lengths, Py_ssize_t count):
    """Return a length for each of `count` sequences, of an int for all or of one for each."""
    cdef Integers given = as_integers(lengths, "length", ShapeError)
    if given.is_scalar:
        return [given.data[0]] * count
    if given.size != count:
        raise ShapeError(f"{given.size} lengths are given for {count} sequences; give one for each")
    listed = []
    for i in range(count):
        listed.append(given.data[i])
    return listed


cdef int check_windows(
    CacheState state, int32_t group, int64_t window, const vector[int32_t]& rows, const vector[int32_t]& lengths
) except -1:
    """Refuse a length at which the next token would miss keys of its window."""
    cdef size_t i
    cdef int64_t held, holes
    cdef const int32_t* blocks
    for i in range(rows.size()):
        if lengths[i] == 0:
            continue
        blocks = state.tables.row_raw(rows[i], group).data()
        held = (<int64_t>lengths[i] + state.block_size - 1) // state.block_size
        holes = 0
        while holes < held and blocks[holes] == 0:
            holes += 1
        if holes * state.block_size > max(0, lengths[i] - (window - 1)):
            raise UnsupportedOption(
                f"length is {lengths[i]}, but the keys before {holes * state.block_size} have left the window of "
                f"{window} and were released; truncate to 0 and compute the sequence again"
            )
    return 0


def remove(CacheState state not None, sequence, rank=None):
    """Drop a sequence and its references to its blocks, tail first; also while its step is in flight."""
    cdef Sequence removed
    cdef Step step
    cdef int32_t row
    cdef RetentionHint hint
    hint.rank = NAN if rank is None else <double>rank
    _guard = Held(state.lock)
    state.begin()
    removed = require(state, sequence, False)
    while removed.flight is not None and (<Step>removed.flight).is_used_elsewhere():
        state.wait_for(removed.flight)
        removed = require(state, sequence, False)
    step = <Step>removed.flight
    if step is not None:
        step.skip_on_device(removed)
    if state.prefix is not None and removed.row >= 0:
        state.prefix.name_spaces([removed])
        state.prefix.publish_one(removed, False)
    row = removed.row
    if row >= 0:
        state.tables.remove_raw(&row, 1)
    # The row is gone: from here on nothing fails.
    if removed.stored is not None:
        (<StoredBlocks>removed.stored).release()
    if state.prefix is not None:
        state.prefix.release(removed, hint)
    if step is not None:
        step.skip(removed)
    removed.owner = removed.flight = removed.swap_space = removed.stored = None
    removed.row = removed.pending = -1
    state.num_live -= 1
    if row >= 0:
        state.by_row[row] = None
    try:
        state.drop_name(removed)
    except Exception:  # an id that cannot be compared any more; the sequence is gone all the same
        pass


def append(CacheState state not None, sequences, ids):
    """Make ids known: one for each sequence, a row of an array for each, or a list for each."""
    cdef list listed = as_list(sequences)
    cdef Py_ssize_t count = len(listed)
    cdef vector[int32_t] flat
    cdef vector[int64_t] ends
    cdef list checked
    cdef int64_t begin = 0
    cdef Py_ssize_t i
    read_ids(ids, count, flat, ends)
    _guard = Held(state.lock)
    state.begin()
    checked = []
    for each in listed:
        checked.append(require(state, each, False))
    reserve_ids(checked, ends)
    for i in range(count):
        (<Sequence>checked[i]).append(flat.data() + begin, <int32_t>(ends[i] - begin))
        begin = ends[i]


cdef int reserve_ids(list sequences, const vector[int64_t]& ends) except -1:
    """Room for the ids of each sequence; one that is listed several times needs room for all of its ids."""
    cdef int64_t begin = 0
    cdef Py_ssize_t i
    cdef dict total
    if len(set(sequences)) == len(sequences):
        for i in range(len(sequences)):
            (<Sequence>sequences[i]).reserve(ends[i] - begin)
            begin = ends[i]
        return 0
    total = {}
    for i in range(len(sequences)):
        total[sequences[i]] = total.get(sequences[i], 0) + ends[i] - begin
        begin = ends[i]
    for sequence, needed in total.items():
        (<Sequence>sequence).reserve(needed)
    return 0


cdef int32_t read_id(object one) except? -1:
    cdef int64_t number = as_int64(one, "token id")
    if not -INT32_MAX - 1 <= number <= INT32_MAX:
        raise ShapeError(f"a token id is outside of int32; give {-INT32_MAX - 1} to {INT32_MAX}")
    return <int32_t>number


cdef int read_ids(object ids, Py_ssize_t count, vector[int32_t]& flat, vector[int64_t]& ends) except -1:
    """Read the ids of `count` sequences, one after another, and where those of each end."""
    cdef Py_ssize_t i, width = 1
    cdef Integers given
    if isinstance(ids, (list, tuple)):
        if len(ids) != count:
            raise ShapeError(f"{len(ids)} ids are given for {count} sequences; give one, or a list, for each")
        for some in ids:
            if type(some) is int:
                flat.push_back(read_id(some))
            elif isinstance(some, (list, tuple)):
                for one in some:
                    flat.push_back(read_id(one))
            else:
                given = as_integers(some, "token id", ShapeError)
                for i in range(given.size):
                    flat.push_back(given.data[i])
            ends.push_back(<int64_t>flat.size())
        return 0
    if getattr(ids, "ndim", 1) == 2:
        ids = np.asarray(ids)
        if ids.shape[0] != count:
            raise ShapeError(f"ids have shape {ids.shape}; the first axis must be the {count} sequences")
        width = ids.shape[1]
        ids = ids.reshape(-1)
    given = as_integers(ids, "token id", ShapeError)
    if given.is_scalar or given.size != count * width:
        raise ShapeError(f"{given.size} ids are given for {count} sequences; give a list with one, or a list, for each")
    flat.assign(given.data, given.data + given.size)
    for i in range(count):
        ends.push_back((i + 1) * width)
    return 0


def require_live(CacheState state not None, sequences):
    """Return `sequences` as a list; InvalidSequence where one is not in the cache, or listed twice."""
    return require_each(state, as_list(sequences), False)


def available(CacheState state not None):
    """Return the blocks of each group that are free, or held by the prefix cache alone."""
    _guard = Held(state.lock)
    state.sweep()
    cached = [0] * state.tables.num_groups if state.prefix is None else state.prefix.evictable()
    counts = []
    for pool, more in zip(state.tables.pools, cached):
        counts.append(pool.num_free + more)
    return counts


def clear(CacheState state not None):
    """Forget what no row uses of the prefix cache; returns how many blocks became free."""
    _guard = Held(state.lock)
    state.begin()
    return 0 if state.prefix is None else state.prefix.clear()


def held_from(CacheState state not None, sequence, int32_t group):
    """Return the first token of a sequence whose key and value a group still has."""
    cdef Sequence checked
    cdef int64_t holes = 0
    cdef int64_t held
    cdef const int32_t* blocks
    _guard = Held(state.lock)
    state.sweep()
    checked = require(state, sequence, False)
    if checked.swap_space is not None:
        raise InvalidSequence(f"sequence {checked.id!r} is swapped out; swap it in first")
    held = (<int64_t>checked.computed + state.block_size - 1) // state.block_size
    blocks = state.tables.row_raw(checked.row, group).data()
    while holes < held and blocks[holes] == 0:
        holes += 1
    return holes * state.block_size


def shortage(CacheState state not None, sequences, counts, bint is_arrival=False):
    """Return the blocks of each group that a step would lack, free ones and evictable ones counted."""
    cdef list checked, writers = []
    cdef Integers given = as_integers(counts, "count", ShapeError)
    cdef vector[int32_t] rows, added, first_blocks
    cdef vector[int64_t] missing
    cdef Sequence sequence
    cdef Py_ssize_t i
    sequences = as_list(sequences)
    if not given.is_scalar and given.size != len(sequences):
        raise ShapeError(f"{given.size} counts are given for {len(sequences)} sequences; give one for each")
    _guard = Held(state.lock)
    state.sweep()
    checked = require_each(state, sequences, True)
    missing.resize(state.tables.num_groups)
    for i, sequence in enumerate(checked):
        rows.push_back(sequence.row)
        added.push_back(given.data[0 if given.is_scalar else i])
        if added[i] > 0 and sequence.is_cut:
            writers.append(sequence)
    if is_arrival:
        sequence = <Sequence>checked[0]
        state.list_first_visible(<int64_t>sequence.computed + max(0, added[0]), first_blocks)
    state.tables.shortage_raw(rows.data(), added.data(), <Py_ssize_t>rows.size(), missing, first_blocks)
    if state.prefix is not None:
        state.prefix.subtract_evictable(missing, writers, first_blocks)
    lacking = []
    for count in missing:
        lacking.append(max(0, count))
    return lacking


def abandon(CacheState state not None, sequences):
    """Abandon every step in flight that one of `sequences` is in."""
    cdef list listed = as_list(sequences)
    _guard = Held(state.lock)
    for sequence in listed:
        step = require(state, sequence, False).flight
        if step is None:
            raise InvalidSequence(f"sequence {sequence.id!r} has no step in flight; there is nothing to abandon")
        step.is_used_elsewhere()  # refuses a call from within write and attend, before any step ends
    for sequence in listed:
        step = (<Sequence>sequence).flight
        if step is not None:
            step.abandon()
