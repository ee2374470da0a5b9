from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from pagecore.index._integers cimport Integers
from pagecore.index.radix._native cimport (
    HintRanges,
    Int32Pointer,
    Mark,
    NativeChanges,
    NativeInserted,
    NativeMatch,
    NativeRadixTree,
    NativeReceipt,
    Offer,
    Options,
    Query,
    ReceiptPointer,
    RetentionHint,
    State,
    States,
)
from pagecore.native.std cimport vector


# namespace_key.pxi

# The key of a namespace. Keys are equal iff the namespaces are equal in value and type. Keys consist of built-in types
# only, so that hashing and comparing them runs no code of the caller. A key keeps the objects of its namespace alive.
cdef object key_of(object namespace)

# The content hash of the namespace with a key; the hashes of its blocks begin with it.
cdef uint64_t root_of(object key) except? 0


# query.pxi

# Arguments of a lookup, checked and converted: tokens, spans and namespace.
cdef class Prefix:
    cdef Integers tokens
    cdef vector[Mark] marks
    cdef object key       # of the namespace
    cdef int32_t space    # number of the namespace; -1: unknown to the tree
    cdef int64_t limit    # blocks

    cdef Query query(self) noexcept


cdef class Insertion:
    """Arguments of an insertion, checked and converted."""
    cdef Prefix prefix
    cdef list lanes
    cdef vector[State] states
    cdef RetentionHint hint
    cdef double time
    cdef object receipt  # a Receipt of the tree, or None

    # The offer borrows memory of the insertion, which must outlive it.
    cdef int fill(self, Offer* offer) except -1


# A list of the elements of an iterable argument.
cdef list as_list(object values, str name)

# A finite float; `what` names it in messages.
cdef double as_number(object value, str what) except? -1

# The caller's clock: -inf, which advances nothing, for None.
cdef double as_time(object time) except? -1

# Reads the arguments of a lookup. The namespace stays a key, with number -1: the tree finds the number when no more
# code of the caller can run. Tokens may still be the caller's memory.
cdef Prefix read_prefix(int64_t block_size, object tokens, object namespace, object spans, object max_tokens)

# Appends the marks of spans in the first `blocks` blocks.
cdef int read_marks(object spans, int64_t block_size, int64_t blocks, vector[Mark]& marks) except -1

# Checks and converts the retention arguments. The caller advances the clock to `now` after the last step that can fail.
cdef int read_hint(RetentionHint* hint, double* now, str policy, object time, object priority, object time_to_live,
                   object rank) except -1

# Reads the arguments of an insertion except receipt, hint and time. Tokens and blocks may be the caller's memory until
# own_insertion() copies them from block `first` on.
cdef int own_insertion(Insertion insertion, int64_t block_size, int64_t first) except -1
cdef Insertion read_insertion(
    int64_t block_size, int32_t num_lanes, object tokens, object blocks, object states, object namespace, object spans
)


# values.pxi

cdef class Match:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_full_tokens
    cdef readonly object checkpoint
    cdef readonly object state
    cdef readonly object blocks
    cdef readonly int64_t num_shared_tokens
    cdef readonly object shared_blocks


cdef class Inserted:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_old_tokens
    # By lane, states last. The arrays are made when first read, because allocating them could fail after the tree has
    # changed.
    cdef vector[vector[int32_t]] taken_ids
    cdef vector[vector[int32_t]] duplicate_ids
    cdef object taken_blocks
    cdef object duplicate_blocks


cdef class Evicted:
    cdef readonly int64_t amount
    cdef vector[vector[int32_t]] gone
    cdef object gone_blocks


# A new int32 array.
cdef object array_of(const vector[int32_t]& ids)

# Arrays of ids by lane, states last: one array for one lane, else a tuple.
cdef object blocks_of(const vector[vector[int32_t]]& ids)
cdef object states_of(const vector[vector[int32_t]]& ids)


# options.pxi

# The arguments of RadixTree, checked and converted; the native tree checks the numbers.
cdef Options read_options(
    object block_size, object full, object windows, object chunks, object sinks, object states,
    object state_interval, object min_kept, object policy
)


# core.pxi

cdef class Receipt:
    cdef readonly RadixCore tree
    cdef readonly Match match
    cdef NativeReceipt native
    cdef object key  # of the namespace; None for the default namespace

    cdef int64_t depth(self) noexcept  # blocks of the pinned prefix
    # Releases what the receipt pins, without a change of the clock.
    cdef void drop(self, const RetentionHint& hint) noexcept


cdef int refuse_receipt(object receipt) except -1

# Raises UnsupportedDtype if `receipt` is not a Receipt.
cdef inline Receipt as_receipt(object receipt):
    if not isinstance(receipt, Receipt):
        refuse_receipt(receipt)
    return <Receipt> receipt


cdef class RadixCore:
    cdef NativeRadixTree* native
    cdef NativeInserted inserted           # result of the last insertion
    cdef Offer offer                       # scratch
    cdef vector[vector[int32_t]] gone_raw  # result of the last evict_raw, by lane
    cdef dict spaces                       # key of a namespace -> its number
    cdef list space_keys                   # number -> key; None for numbers that are free
    cdef dict root_keys                    # with a journal: root of a namespace -> its key
    cdef Py_ssize_t most_root_keys         # those that are not needed any more are forgotten beyond this number
    cdef readonly int64_t block_size
    cdef readonly tuple components
    cdef readonly tuple windows
    cdef readonly tuple chunks
    cdef readonly tuple sinks
    cdef readonly str policy
    cdef readonly object state_interval
    cdef readonly int64_t min_kept
    cdef int32_t num_lanes
    cdef uint32_t every_component
    cdef bint has_states

    # Arguments.
    cdef int32_t _component(self, object component) except -1
    cdef int32_t _lane(self, object lane) except -1
    cdef int _check_receipt(self, Receipt receipt) except -1

    # Namespaces. _space() adds a new namespace, which the caller drops again if nothing is inserted.
    cdef int32_t _space(self, object key) except -1
    cdef int _forget_roots(self) except -1
    cdef int _find_space(self, Prefix prefix) except -1
    cdef void _drop_space(self, int32_t space) noexcept
    cdef void _forget_dead(self) noexcept

    # Releases a component of a receipt, or with None all of it.
    cdef int unpin(self, Receipt receipt, object component, object time, object rank) except -1
    cdef void _unlock(self, Receipt receipt, uint32_t components, const RetentionHint& hint, double now) noexcept

    # For the cache, whose own changes must not stop half way; it also calls `native`.
    cdef Receipt blank_receipt(self, object key)  # holds nothing yet
    # Reserves memory for `num_moves` receipts that are locked or shortened.
    cdef int reserve_moves(self, int64_t num_moves) except -1
    # Evicts min(amount, 4096, evictable) of a component into `gone_raw`; returns the number.
    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept
    # Evicts the end of a path back to `keep` tokens into `gone`; returns the number of blocks.
    cdef int64_t evict_path_raw(self, Prefix prefix, int64_t keep, vector[vector[int32_t]]& gone) except -1
    # Evicts what continues the first `valid` blocks of a query into `gone`, and shortens `receipts` to them; returns
    # the number of blocks.
    cdef int64_t revoke_raw(
        self, const Query& query, int64_t valid, vector[ReceiptPointer]& receipts, vector[vector[int32_t]]& gone
    ) except -1
    # Evicts a namespace, by the result of key_of or None, into `gone`; returns the number of blocks.
    cdef int64_t evict_namespace_raw(self, object key, vector[vector[int32_t]]& gone) except -1
    # Insertions; False, with nothing changed, if memory is short. The result is in `inserted`.
    cdef bint try_extend_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes
    ) noexcept
    cdef bint try_insert_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes, States states,
        const RetentionHint& hint, HintRanges ranges, double time
    ) noexcept
    cdef void _offer_raw(
        self, const Query& query, const vector[Int32Pointer]& lanes, States states, const RetentionHint& hint,
        HintRanges ranges, double time
    ) noexcept


# lookup.pxi

cdef class RadixLookup(RadixCore):
    # Pins a match in every component, and counts the hit.
    cdef int lock(self, NativeMatch& found, Receipt receipt, double now) except -1

    cdef list _read_prefixes(self, object prefixes, object namespaces, object spans, object max_tokens)
    cdef Match _new_match(self)
    cdef Receipt _new_receipt(self, Prefix prefix)
    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1
    cdef int _fill(self, Match match, const NativeMatch& found) except -1
    cdef object _copy_blocks(self, object lanes, int32_t node, int32_t offset, int64_t count)
    cdef Match _match(self, Prefix prefix)


# insertion.pxi

cdef class RadixInsertion(RadixLookup):
    cdef Insertion _insertion(
        self, object time, object tokens, object blocks, object states, object namespace, object spans, object receipt,
        object priority, object time_to_live, object rank
    )
    cdef Insertion _entry(self, object time, object entry)
    cdef int _check_moved(self, Insertion insertion) except -1
    cdef int32_t _add_space(self, Insertion insertion) except -1
    cdef int _insert(self, Insertion insertion, Inserted inserted) except -1
    cdef int _extend(self, Insertion insertion, Receipt receipt, Inserted inserted) except -1
    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept


# journal.pxi

cdef class ChangeLog:
    cdef NativeChanges native
    cdef int64_t block_size
    cdef dict keys  # root of a namespace -> its key


cdef class RadixJournal(RadixInsertion):
    pass


# tree.pxi

cdef class RadixTree(RadixJournal):
    pass
