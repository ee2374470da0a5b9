"""Backup: published blocks of a sequence are copied to the host, and published in its tree once they are there."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

from pagecore.cache.prefix._prefix cimport PrefixCache, number_namespaces, publish_one
from pagecore.cache.sequences._sequences cimport BackupNote, PrefixHold, Sequence, require
from pagecore.cache.state._state cimport CacheState, Held, StoredBlocks
from pagecore.index._integers cimport new_int32
from pagecore.index.radix._native cimport HintRanges, NativeMatch, Query, RetentionHint
from pagecore.index.radix._radix cimport array_of
from pagecore.native.std cimport span, vector


cdef class Backup:
    """Blocks of one sequence on their way to the host: what they are, and where they go.

    Attributes
    ----------
    options : RetentionOptions
        Namespace and spans of the prefix.
    num_tokens : int
        Tokens of the prefix that the host has after the copy.
    num_old_tokens : int
        Tokens of `num_tokens` whose blocks the host had before, in groups without a window.
    num_blocks : int
        Blocks that are copied, summed over the groups.
    state_tokens : int
        Tokens before the state that is copied; 0 for none.
    pairs : list of numpy.ndarray
        int32 ``[n, (device block, host block)]`` of each group, then of the state slots.
    """

    is_lost = False  # the end of its copies releases it

    @property
    def tokens(self):
        """The token ids of the prefix: int32, a copy that the backup owns."""
        return self.key.ids[:self.num_tokens]

    @property
    def num_tokens(self):
        """Tokens of the prefix."""
        return self.end * self.host.block_size

    @property
    def block_size(self):
        """Tokens of a block."""
        return self.host.block_size

    @property
    def num_old_tokens(self):
        """Tokens of the prefix whose blocks the host had before, in groups without a window."""
        return self.first * self.host.block_size

    @property
    def state_tokens(self):
        """Tokens before the state that is copied; 0 for none."""
        return self.state_blocks * self.host.block_size

    @property
    def blocks(self):
        """Blocks of the device that the backup holds, of each group and then the state slots."""
        return self.sources.arrays

    @property
    def host_blocks(self):
        """New blocks of the host that the backup holds, of each group and then the state slots."""
        return self.lease.blocks

    cdef bint plan(self, Sequence sequence, int64_t most, bint is_last) except -1:
        """List what the host lacks of a sequence, and take host blocks for it; return False if there is nothing to do.

        A host that orders by values takes those of a sequence although it lacks none of its blocks.
        """
        cdef PrefixCache prefix = self.state.prefix
        cdef PrefixHold hold = sequence.hold
        cdef int32_t published = num_wanted(self.host, hold, most)
        cdef int32_t checkpoint = wanted_checkpoint(self.state, sequence, published)
        cdef BackupNote* note
        cdef int32_t slot
        cdef vector[int64_t] counts
        if published == 0:
            return False
        # While the copies run, the host keeps what they continue: its evictions are of other blocks.
        note = hold.note_of(self.host.number)
        if has_backup(self.host, hold, published, checkpoint) and note != NULL and (
            note.is_running or note.evictions == self.host.num_evictions
        ):
            if not (is_last and self.host.uses_hints and hold.needs_values(prefix.now)):
                return False
        self.end = published
        if self.host.uses_hints:
            self.hint = hold.hint(prefix.now)
            hold.hint_ranges(prefix.now)
            self.ranges.assign(hold.ranges.begin(), hold.ranges.end())
        elif self.host.is_exclusive:
            self.hint.rank = -1  # the device has it: the host gives it up first
        self.options = hold.options
        self.hold = hold
        self.key = own_key(self.state, sequence, published)
        self.path = Path()
        self.path.pin(self.host.tree, self.key.key, self.key.query(published), published)
        self.first = self.path.num_blocks
        slot = self.choose_state(sequence, checkpoint)
        if self.state_blocks > 0 and self.has_state():
            self.state_blocks = 0
        self.read_path(sequence)
        self.list_missing(counts)
        note = hold.make_note(self.host.number)
        note.num_blocks = note.state_tokens = 0  # until all of it is offered again
        if not self.fit(counts):
            return False
        self.take(slot, counts)
        if self.end == published and not self.is_cut:
            self.note_offer(published, checkpoint)
        return self.has_copies() or (self.host.uses_hints and self.end > 0)

    cdef bint has_copies(self) noexcept:
        return self.num_blocks > 0 or self.state_blocks > 0

    cdef int32_t choose_state(self, Sequence sequence, int32_t checkpoint) except -1:
        """Set `state_blocks` to the blocks before the state to copy, 0 for none; return the state's slot.

        It is the sequence's checkpoint, or the last state that the device's tree has before the end of the backup: what
        limits the backup may lie before the checkpoint, and the copied blocks are of use only up to a state.
        """
        cdef PrefixCache prefix = self.state.prefix
        cdef NativeMatch found
        cdef Query query
        self.state_blocks = checkpoint // self.host.block_size
        if self.state_blocks > 0:
            return self.state.states.checkpoint_raw(sequence.row)
        if not self.host.has_states:
            return 0
        query = self.key.query(self.end)
        query.space = space_of(prefix.tree, self.key.key)
        found = prefix.tree.native.match(query, self.end)
        if found.state < 0:
            return 0
        self.state_blocks = found.blocks
        return found.state

    cdef bint has_state(self) except -1:
        cdef NativeMatch found
        cdef Query query = self.key.query(self.state_blocks)
        query.space = space_of(self.host.tree, self.key.key)
        found = self.host.tree.native.match(query, self.state_blocks)
        return found.blocks == self.state_blocks and found.state >= 0

    cdef int read_path(self, Sequence sequence) except -1:
        """Write the blocks of the sequence's path in the device's tree to `lanes`."""
        cdef PrefixCache prefix = self.state.prefix
        cdef int64_t depth = sequence.hold.receipt.depth()
        cdef int32_t lane
        self.lanes.resize(<size_t>prefix.num_lanes)
        for lane in range(prefix.num_lanes):
            self.lanes[lane].resize(<size_t>depth)
            prefix.tree.native.known_tail(
                sequence.hold.receipt.native.node, lane, span[int32_t](self.lanes[lane].data(), <size_t>depth)
            )
        return 0

    cdef int list_missing(self, vector[int64_t]& counts) except -1:
        """Leave the device's block of each place that the host lacks in `lanes`, and write their number by group."""
        cdef PrefixCache prefix = self.state.prefix
        cdef int64_t i
        cdef int32_t lane
        counts.assign(<size_t>len(self.host.pools), 0)
        for lane in range(prefix.num_lanes):
            self.lanes[lane].resize(<size_t>self.end)
            for i in range(self.path.num_blocks):
                if self.path.ids[lane][i] != 0:
                    self.lanes[lane][i] = 0
            for i in range(self.end):
                counts[prefix.groups[lane]] += self.lanes[lane][i] != 0
        if self.host.has_states:
            counts[prefix.num_lanes] = self.state_blocks > 0
        return 0

    cdef bint fit(self, vector[int64_t]& counts) except -1:
        """Make room in the host; if it is short, shorten the prefix to what fits. Return False if nothing does."""
        cdef vector[int64_t] needed = counts
        cdef int64_t room, most = self.end - self.path.num_blocks
        cdef int32_t lane, group
        if self.host.make_room(needed):
            return True
        self.host.num_cut += 1
        if self.host.has_states and self.host.pool(self.host.num_lanes).num_free_raw() < counts[self.host.num_lanes]:
            self.is_cut = True
            self.state_blocks = counts[self.host.num_lanes] = 0
        for lane in range(self.host.num_full):
            most = min(most, <int64_t>self.host.pool(self.host.groups[lane]).num_free_raw())
        self.end = min(self.end, self.path.num_blocks + most)
        if self.state_blocks > self.end:
            self.state_blocks = counts[self.host.num_lanes] = 0
        for lane in range(self.host.num_lanes):
            group = self.host.groups[lane]
            room = self.host.pool(group).num_free_raw()
            counts[group] = self.keep_last(lane, room)
        return self.end > 0

    cdef int64_t keep_last(self, int32_t lane, int64_t room) noexcept:
        """Drop all but the last `room` blocks of a lane before the end; return the number of kept ones."""
        cdef int64_t i = self.end, kept = 0
        cdef int32_t component = self.host.components[self.host.groups[lane]]
        self.lanes[lane].resize(<size_t>self.end)
        while i > 0:
            i -= 1
            if self.lanes[lane][i] != 0:
                if kept == room:
                    self.is_cut = self.is_cut or self.host.is_needed(component, i, self.end)
                    self.lanes[lane][i] = 0
                else:
                    kept += 1
        return kept

    cdef int take(self, int32_t slot, const vector[int64_t]& counts) except -1:
        """Take the host's blocks, list the copies, and replace the device's blocks in `lanes` by the host's."""
        cdef vector[int32_t] flat
        cdef int32_t lane, group
        cdef int64_t i
        cdef size_t k
        cdef StoredBlocks taken
        self.lease = take_lease(self.host, counts)
        if self.lease is None:
            self.end = 0
            self.state_blocks = 0
            self.pairs = []
            return 0
        taken = self.lease.stored
        self.source_ids.resize(counts.size())
        self.pairs = []
        for group in range(self.host.num_lanes):
            lane = self.state.prefix.lane_of[group]
            flat.clear()
            k = 0
            for i in range(self.end):
                if self.lanes[lane][i] != 0:
                    self.source_ids[group].push_back(self.lanes[lane][i])
                    flat.push_back(self.lanes[lane][i])
                    flat.push_back(taken.blocks[group][k])
                    self.lanes[lane][i] = taken.blocks[group][k]
                    k += 1
            self.num_blocks += <int64_t>k
            self.pairs.append(array_of(flat).reshape(-1, 2))
        if self.host.has_states:
            flat.clear()
            if self.state_blocks > 0:
                self.source_ids[self.host.num_lanes].push_back(slot)
                flat.push_back(slot)
                self.state_slot = taken.blocks[self.host.num_lanes][0]
                flat.push_back(self.state_slot)
            self.pairs.append(array_of(flat).reshape(-1, 2))
        return 0

    cdef int pin_sources(self, Sequence sequence) except -1:
        """Hold the device's blocks until `finish` or `give_up`: the copy does not end within the call."""
        cdef PrefixCache prefix = self.state.prefix
        pools = prefix.tables.pools[:prefix.num_lanes]
        if prefix.states is not None:
            pools = (*pools, prefix.states.checkpoints)
        self.sources = StoredBlocks(pools)
        self.sources.reserve(self.source_ids)
        receipt = prefix.tree.blank_receipt(sequence.hold.receipt.key)
        prefix.transfers.add(self)
        receipt.native = prefix.tree.native.lock_again(sequence.hold.receipt.native)
        self.receipt = receipt
        self.sources.share()
        return 0

    cdef int settle(self) except -1:
        """Publish the copied blocks in the host's tree."""
        try:
            publish(
                self.host, self.key.key, self.key.query(self.end), self.lanes, self.end, self.state_blocks,
                self.state_slot, self.hint, HintRanges(self.ranges.data(), self.ranges.size()), self.state.prefix.now,
            )
        except BaseException:
            self.forget()
            raise
        finally:
            self.release()
        return 0

    cdef void note_offer(self, int32_t published, int32_t checkpoint) noexcept:
        cdef BackupNote* note = self.hold.note_of(self.host.number)
        if note == NULL:
            return
        self.host.num_offers += 1
        self.number = note.number = self.host.num_offers
        note.num_blocks, note.state_tokens = published, checkpoint
        note.evictions = self.host.num_evictions
        note.is_running = False

    cdef BackupNote* own_note(self) noexcept:
        cdef BackupNote* note
        if self.number == 0:
            return NULL
        note = self.hold.note_of(self.host.number)
        if note == NULL or note.number != self.number:
            return NULL
        return note

    cdef void forget(self) noexcept:
        cdef BackupNote* note = self.own_note()
        if note != NULL:
            note.num_blocks = note.state_tokens = 0

    cdef void release(self) noexcept:
        cdef RetentionHint no_hint
        cdef BackupNote* note
        if self.receipt is not None:
            self.receipt.drop(no_hint)
            self.receipt = None
            self.sources.release()
            self.state.prefix.transfers.discard(self)
            note = self.own_note()
            if note != NULL:
                note.is_running = False
        if self.path is not None:
            self.path.release()
        if self.lease is not None:
            self.lease.give_up()
        if self.parts is not None:
            for part in self.parts:
                part.drop()
            self.parts = None

    # -- for Python ----------------------------------------------------------------------------------------------

    @property
    def identity(self):
        """Key of the namespace and the spans: a tuple of (start, end, digest), None for none."""
        return self.key.key, spans_of(self.key, self.host.block_size)

    @property
    def num_receipts(self):
        """Pins of the host's tree that the backup has."""
        return 1 if self.path is not None and self.path.receipt is not None else 0

    def finish(self):
        """Publish the copied blocks in the host's tree, and release what the backup holds; do it once."""
        _guard = Held(self.state.lock)
        if self.num_receipts:
            self.settle()

    def give_up(self):
        """Release what the backup holds; nothing is published. After `finish` the call does nothing."""
        _guard = Held(self.state.lock)
        if self.num_receipts:
            self.forget()
            self.release()


def back_up(CacheState state not None, HostIndex host not None, sequence, int64_t most, copy, bint is_last=False):
    """Copy what the host lacks of a sequence's published blocks; return the Backup, or None if nothing is copied.

    Parameters
    ----------
    most : int
        Longest prefix to copy, in tokens.
    copy : callable
        ``copy(backup)`` copies ``backup.pairs``. If it returns True, the copies are still running: it calls
        ``backup.finish()`` or ``backup.give_up()`` later.
    is_last : bool
        The sequence is about to be removed: times to live begin again.
    """
    cdef Sequence source
    cdef Backup one
    cdef BackupNote* note
    _guard = Held(state.lock)
    state.begin()
    host.sweep()
    source = require(state, sequence, False)
    if source.row < 0:
        return None
    number_namespaces(state.prefix, [source])
    publish_one(state.prefix, source, 0)
    one = Backup.__new__(Backup)
    one.state = state
    one.host = host
    try:
        if not one.plan(source, most, is_last):
            one.release()
            return None
        if not one.has_copies():
            one.settle()
            return None
        one.pin_sources(source)
        if copy(one):
            note = source.hold.note_of(host.number)
            if note != NULL:
                note.is_running = one.own_note() != NULL and one.receipt is not None
            return one
    except BaseException:
        one.forget()
        one.release()
        raise
    one.settle()
    return one


def require_all(CacheState state not None, sequences):
    """Return sequences as a list; raise InvalidSequence for one that is not of the cache, or was removed."""
    checked = []
    for sequence in sequences:
        checked.append(require(state, sequence, False))
    return checked


cdef PrefixKey own_key(CacheState state, Sequence sequence, int32_t num_blocks):
    cdef PrefixKey key = PrefixKey.__new__(PrefixKey)
    cdef int32_t* data = NULL
    cdef Py_ssize_t count = <Py_ssize_t>num_blocks * state.block_size
    key.ids = new_int32(count, &data)
    memcpy(data, sequence.ids, count * sizeof(int32_t))
    key.num_blocks = num_blocks
    key.key = sequence.hold.receipt.key
    key.marks.assign(sequence.hold.marks.begin(), sequence.hold.marks.end())
    return key
