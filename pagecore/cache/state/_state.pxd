from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.cache.prefix._prefix cimport PrefixCache
from pagecore.cache.sequences._kept cimport KeptKeys
from pagecore.cache.sequences._sequences cimport CrossContents, Sequence
from pagecore.index.states._states cimport StateTable
from pagecore.index.tables._native cimport BlockCopy
from pagecore.index.tables._tables cimport BlockTables
from pagecore.native.std cimport vector


# lock.pxi

cdef extern from "pagecore/cache/state/state_lock.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeStateLock "pagecore::StateLock":
        bint try_acquire(unsigned long thread, bint has_waited)
        void release()
        int64_t suspend()
        void resume(int64_t depth)
        int64_t depth()
        uint64_t generation()
        void begin_waiting()
        void end_waiting()
        void begin_queueing()
        void end_queueing()
        bint has_waiting()
        void notify()
        void wait(uint64_t seen)
        void reset_in_child(unsigned long thread)


cdef class StateLock:
    cdef NativeStateLock native
    cdef object __weakref__

    cdef int acquire(self) except -1
    cdef int queue(self, bint checks_signals) except -1
    # Releases the lock until another thread releases or notifies it; the caller holds it again afterwards.
    cdef int sleep(self) except -1
    # Wakes the threads that sleep.
    cdef void notify(self) noexcept


# Holds a lock until it is collected. That cannot fail, whereas the end of a `with` block can if memory is short.
cdef class Held:
    cdef StateLock lock


# stored.pxi

cdef extern from *:
    """
    // Assignment whose failed allocation becomes a Python exception.
    template <typename T>
    void pagecore_copy_vector(T& to, const T& from) { to = from; }
    """
    void copy_vector "pagecore_copy_vector"(vector[vector[int32_t]]& to, const vector[vector[int32_t]]& source) except +


cdef class StoredBlocks:
    cdef tuple pools
    cdef vector[vector[int32_t]] blocks     # of each group; holes are 0. With states, last: running slot, checkpoint
    cdef vector[vector[int32_t]] held       # without holes, tail first
    cdef size_t num_held                    # number of groups whose blocks are held
    cdef int32_t checkpoint_length          # tokens of the checkpoint in the list of states; 0 for none

    # Lists blocks, or their number, for share() or allocate(), and allocates the memory that these need.
    cdef int reserve(self, const vector[vector[int32_t]]& like) except -1
    # Replaces each listed block by a new one; returns False, with nothing taken, if a pool has too few.
    cdef bint allocate(self) noexcept
    # Adds a reference to each of `blocks`, which another holder keeps alive meanwhile.
    cdef void share(self) noexcept
    # Releases the last `count` blocks of a group whose blocks are held and that has no holes.
    cdef void drop_last(self, size_t group, size_t count) noexcept
    cdef void list_held(self, size_t group) noexcept
    cdef void release(self) noexcept


# tenants.pxi

cdef class Tenants:
    cdef BlockTables tables
    cdef int32_t block_size
    cdef vector[vector[int64_t]] last       # of each group and block: the tenant whose values it may hold, or a mark
    cdef readonly dict numbers              # number of a tenant by the key of its namespace
    cdef int64_t next_number
    cdef size_t limit                       # number of namespaces at which those without a block are forgotten
    cdef readonly int64_t num_scrubbed_blocks

    # Returns the tenant's number; `key` is the result of `key_of`, or None for sequences without a namespace.
    cdef int64_t number_of(self, object key) except -1
    # Before a step takes blocks: lists the number of blocks from the next token's on, and their ids, by row and group.
    cdef int note_held(self, list sequences, vector[int32_t]& held) except -1
    # After it took them: lists the blocks to be zeroed, as the targets of pairs, and marks targets of copies doubtful.
    cdef int list_stale(
        self, list sequences, const vector[int32_t]& held, const vector[vector[BlockCopy]]& copies,
        vector[vector[BlockCopy]]& stale
    ) except -1
    # After the blocks are zeroed and copied: marks the blocks from each row's next token on with the row's tenant.
    cdef void settle(self, list sequences, const vector[vector[BlockCopy]]& stale) noexcept
    # Marks blocks that are about to be overwritten as a whole as doubtful.
    cdef void doubt(self, const vector[vector[int32_t]]& blocks) noexcept
    # Marks the blocks of a row that were all overwritten as a whole with its tenant.
    cdef void own_row(self, int32_t row, int64_t tenant) noexcept
    cdef void mark(self, int32_t row, size_t first, int64_t tenant) noexcept
    cdef void mark_targets(self, const vector[vector[BlockCopy]]& copies) noexcept
    cdef bint is_clean_for(self, int64_t tenant, int64_t last) noexcept
    cdef void doubt_copied(self, const vector[vector[BlockCopy]]& copies) noexcept
    cdef int compare_rows(
        self, list sequences, const vector[int32_t]& held, vector[vector[BlockCopy]]& stale
    ) except -1
    cdef size_t first_block(self, Sequence sequence) noexcept
    cdef int forget_unused(self) except -1


# seals.pxi

cdef class Seals:
    cdef BlockTables tables
    cdef int32_t block_size
    cdef readonly int32_t residual
    cdef readonly object quantise
    cdef vector[int32_t] tails, sealed          # groups
    cdef vector[vector[BlockCopy]] pairs        # of each tail: blocks that the operation seals

    # True for a length inside a sealed block of a sequence.
    cdef bint cuts(self, Sequence sequence, int64_t length) noexcept
    # True for the group of the newest tokens of layers with sealed blocks; for the group of these blocks.
    cdef bint has_tail(self, int32_t group) noexcept
    cdef bint has_sealed(self, int32_t group) noexcept
    # Returns the sealed tokens of a sequence once `length` of its tokens are computed.
    cdef int32_t reach(self, Sequence sequence, int64_t length) noexcept
    # An operation calls `begin`, `add` for each sequence and its new number of sealed tokens, and `run`, which
    # quantises the blocks and returns their pairs; None if there are none. Code of the caller may run in `run`, and the
    # numbers of the sequences are set after it.
    cdef void begin(self) noexcept
    cdef int add(self, Sequence sequence, int32_t length) except -1
    cdef list run(self)


# new_blocks.pxi

cdef class NewBlocks:
    cdef tuple pools
    cdef vector[int64_t] needed             # of each group
    cdef vector[vector[int32_t]] blocks     # of each group: the blocks that were taken

    # Fills `missing` with the blocks that each group is short of; returns True if any is.
    cdef bint lacks(self, vector[int64_t]& missing) except -1
    # Takes the needed blocks of some groups; raises OutOfBlocks if they are short, with nothing taken.
    cdef int take(self, const vector[int32_t]& groups, str advice) except -1
    # Raises OutOfBlocks with the figures of all groups.
    cdef int refuse(self, str advice) except -1
    # Frees the blocks that were taken.
    cdef void give_back(self) noexcept
    # Forgets the blocks that were taken, which rows have by now.
    cdef void forget(self) noexcept


# restored.pxi

cdef struct Cut:
    int32_t row, index, sealed      # a row, the index of the block inside which it is cut, and the sealed block there


cdef class Restored:
    cdef CacheState state
    cdef vector[vector[Cut]] cuts           # of each tail
    cdef NewBlocks new                      # of each tail: the block of each cut, once they are taken

    # Lists a sequence that is to be cut to `length` tokens, inside a sealed block.
    cdef int add(self, Sequence sequence, int32_t length) except -1
    # Takes the blocks and writes them; after an error nothing is taken. Code of the caller may run.
    cdef int fill(self) except -1
    # Gives the blocks to the rows, which have been cut.
    cdef void place(self) noexcept
    # Frees blocks that are not placed.
    cdef void give_back(self) noexcept
    cdef void doubt(self) noexcept
    cdef list pair_arrays(self)


# state.pxi

cdef class CacheState:
    cdef readonly BlockTables tables
    cdef readonly StateTable states         # None in a cache without layers that keep states
    cdef readonly PrefixCache prefix        # None in a cache without one
    cdef readonly Tenants tenants           # None in a cache that does not scrub
    cdef readonly Seals seals               # None in a cache without sealed blocks
    cdef readonly CrossContents cross       # None in a cache without cross attention
    cdef readonly StateLock lock            # held by every operation
    # A PrefixObserver, called under the lock: before a sequence is added, after a commit, before a removal; or None.
    cdef public object observer
    cdef readonly object removal            # removes a sequence when its context ends
    cdef dict names                         # sequence by id; entries whose sequence is not live are leftovers
    cdef list by_row                        # the sequence in each row; None for a free row
    cdef vector[KeptKeys] kept              # of each group that does not keep all keys
    cdef readonly int32_t block_size
    cdef readonly int32_t num_live          # sequences, including those that are swapped out
    # Steps whose batch was collected before it was committed or abandoned, and pins that were collected.
    cdef int32_t num_lost
    cdef readonly bint lacks_slots          # the last step that was refused lacks state slots, not blocks
    cdef readonly int64_t num_copied_blocks
    cdef int64_t num_operations             # operations that have begun
    cdef int64_t next_number

    # First call of every operation, under the lock: reads the clock and abandons lost steps.
    cdef int begin(self) except -1
    # First call of every query: abandons lost steps, without the clock.
    cdef int sweep(self) except -1
    # Waits until no other thread writes or attends with a step.
    cdef int wait_for(self, object step) except -1
    # Returns the first position, sinks apart, that an idle sequence keeps in a group.
    cdef int64_t first_kept_of(self, const KeptKeys& keys, Sequence sequence) noexcept
    # Writes the first block of each group that a sequence of `length` tokens keeps; 0 without a window. `sealed` tokens
    # are in sealed blocks; -1 if its commit seals blocks.
    cdef int list_first_kept(self, int64_t length, int32_t sealed, vector[int32_t]& out) except -1
    # Checks an id; returns an unused number for None.
    cdef object new_name(self, object name)
    # Lists a sequence under its id before it is live, which the caller cannot observe.
    cdef int reserve_name(self, Sequence sequence) except -1
    # Unlists a sequence that is no longer live.
    cdef int drop_name(self, Sequence sequence) except -1
    cdef int sweep_names(self) except -1
