"""The native state of a paged cache: block tables, prefix cache, sequences and the lock that every operation takes."""

from libc.stdint cimport INT32_MAX

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.sequences._kept cimport KeptKeys, first_kept, kept_keys
from pagecore.cache.sequences._sequences cimport CrossContents, Sequence
from pagecore.index.states._states cimport StateTable
from pagecore.index.tables._tables cimport BlockTables

from pagecore.errors import InvalidSequence, shown


cdef class CacheState:
    """State that the operations of a cache share.

    An operation plans first: it converts and checks its arguments and allocates memory. It may fail there, and the
    caller can observe nothing of it. Then it commits by calls that cannot fail, allocate nothing and run no Python
    code. An exception, including KeyboardInterrupt and MemoryError, therefore leaves the cache either as before or as
    after the operation. A sequence is live once its `owner` is set.

    Parameters
    ----------
    tables : BlockTables
    attended : list of AttendedKeys
        Limits of the keys that a query of each group sees.
    prefix_policy : str, optional
        Eviction policy of the prefix cache; None for a cache without one.
    clock : callable
        See `PrefixCache`.
    removal : callable
        Called with the state and a sequence when the context of the sequence ends.
    scrub : bool
        Zero a block when it passes from one namespace to another.
    recompute_last_block : bool
        A prefix hit drops its last block.
    states : StateTable, optional
        Slots of the rows, on the same tables; None for a cache without layers that keep states.
    seals : Seals, optional
        Groups of sealed blocks, on the same tables; their tails are the last groups.
    """

    def __cinit__(
        self, BlockTables tables not None, list attended not None, prefix_policy, clock, removal, bint scrub=False,
        bint recompute_last_block=False, StateTable states=None, Seals seals=None,
    ):
        self.tables = tables
        self.states = states
        self.seals = seals
        self.block_size = tables.block_sizes[0]
        self.by_row = [None] * tables.max_sequences
        self.names = {}
        self.lock = StateLock()
        self.removal = removal
        for group, keys in enumerate(attended):
            if keys.is_limited:
                self.kept.push_back(kept_keys(group, keys, seals is not None and seals.has_tail(group)))
        if scrub:
            self.tenants = Tenants(tables)
        if prefix_policy is not None:
            num_tails = 0 if seals is None else seals.tails.size()
            self.prefix = PrefixCache(
                attended[:len(attended) - num_tails], tables, self.by_row, prefix_policy, clock, recompute_last_block,
                states, seals is not None,
            )

    def serve_cross(self, CrossContents contents not None):
        """Serve cross-attention layers from now on; call it before the first sequence."""
        self.cross = contents

    cdef int begin(self) except -1:
        self.num_operations += 1
        if self.prefix is not None:
            self.prefix.tick()
        return self.sweep()

    cdef int sweep(self) except -1:
        cdef Sequence sequence
        cdef int32_t num_lost = self.num_lost
        if num_lost:
            for sequence in list(self.by_row):
                if sequence is not None and sequence.flight is not None and sequence.flight.is_lost:
                    sequence.flight.give_up()
            for holder in () if self.prefix is None else list(self.prefix.transfers):
                if holder.is_lost:
                    holder.give_up()
            self.num_lost -= num_lost
        if len(self.names) > self.num_live:
            self.sweep_names()
        return 0

    def give_up_lost(self):
        """Abandon the steps of batches that were collected, and release such pins, before the cache is read."""
        self.sweep()

    cdef int wait_for(self, object step) except -1:
        while step is not None and step.is_used_elsewhere():
            self.lock.sleep()
        return 0

    cdef int64_t first_kept_of(self, const KeptKeys& keys, Sequence sequence) noexcept:
        if self.seals is None:
            return first_kept(keys, sequence.computed)
        return sequence.sealed if keys.is_tail else first_kept(keys, sequence.sealed)

    cdef int list_first_kept(self, int64_t length, int32_t sealed, vector[int32_t]& out) except -1:
        cdef KeptKeys keys
        cdef int64_t first
        out.assign(<size_t>self.tables.num_groups, 0)
        for keys in self.kept:
            # An arrival has all blocks, of which those between sinks and window are released, and those that its commit
            # seals.
            if keys.sinks > 0 or (keys.is_tail and sealed < 0):
                continue
            first = max(0, sealed) if keys.is_tail else first_kept(keys, length if sealed < 0 else sealed)
            out[keys.group] = <int32_t>min(first // self.block_size, INT32_MAX)
        return 0

    cdef object new_name(self, object name):
        if name is None:
            while self.next_number in self.names:
                self.next_number += 1
            return self.next_number
        try:
            hash(name)
        except Exception as error:
            raise InvalidSequence(
                f"id is {shown(name)}, which cannot be hashed ({error}); use a number, a string or a tuple"
            ) from None
        return name

    cdef int reserve_name(self, Sequence sequence) except -1:
        # The only place that compares ids: a comparison may run code of the caller.
        cdef object there = self.names.setdefault(sequence.id, sequence)
        while there is not sequence:
            if (<Sequence>there).owner is not None:
                raise InvalidSequence(
                    f"sequence {sequence.id!r} is already in the cache; remove it first, or use another id"
                )
            if self.names.get(sequence.id) is there:
                del self.names[sequence.id]
            there = self.names.setdefault(sequence.id, sequence)
        return 0

    cdef int drop_name(self, Sequence sequence) except -1:
        if self.names.get(sequence.id) is sequence:
            del self.names[sequence.id]
        return 0

    cdef int sweep_names(self) except -1:
        """Forget leftovers of operations that were interrupted."""
        cdef Sequence sequence
        for sequence in list(self.names.values()):
            if sequence.owner is None:
                self.drop_name(sequence)
        return 0

    def listed(self):
        """Return the live sequences in the order in which they were added."""
        live = []
        for each in self.names.values():
            if (<Sequence>each).owner is not None:
                live.append(each)
        return live

    @property
    def num_scrubbed_blocks(self):
        """Number of blocks that steps have zeroed."""
        return 0 if self.tenants is None else self.tenants.num_scrubbed_blocks

    def crossed(self):
        """Return the encoder output of each live sequence that has one."""
        contents = []
        for each in self.names.values():
            if (<Sequence>each).owner is not None and (<Sequence>each).cross is not None:
                contents.append((<Sequence>each).cross)
        return contents

    def find(self, id):
        """Return the live sequence of an id, or None."""
        found = self.names.get(id)
        return found if found is not None and (<Sequence>found).owner is not None else None
