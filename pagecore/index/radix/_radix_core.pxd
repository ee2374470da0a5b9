from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp.memory cimport unique_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index.radix._radix_journal cimport ChangeLog
from pagecore.index.radix._radix_native cimport (
    NativeBatch,
    NativeInserted,
    NativeMatch,
    NativeRadixTree,
    NativeReceipt,
    Offers,
)
from pagecore.index.radix._radix_query cimport (
    HintRanges,
    Insertion,
    Int32Pointer,
    Mark,
    Offer,
    Prefix,
    Query,
    RetentionHint,
    States,
)
from pagecore.index.radix._radix_values cimport Evicted, Inserted, Match


cdef class Receipt:
    cdef readonly RadixCore tree
    cdef readonly Match match
    cdef NativeReceipt native
    cdef object key  # of the namespace; None for the default namespace


cdef int refuse_receipt(object receipt) except -1

# Raises UnsupportedDtype if `receipt` is not a Receipt.
cdef inline Receipt as_receipt(object receipt):
    if not isinstance(receipt, Receipt):
        refuse_receipt(receipt)
    return <Receipt> receipt


cdef class RadixCore:
    cdef unique_ptr[NativeRadixTree] native
    cdef NativeInserted inserted           # result of the last insertion
    cdef Offer offer                       # scratch
    cdef vector[vector[int32_t]] gone_raw  # result of the last evict_raw, by lane
    cdef dict spaces                       # key of a namespace -> its number
    cdef list space_keys                   # number -> key; None for numbers that are free
    cdef dict root_keys                    # with a journal: root of a namespace -> its key
    cdef readonly int64_t block_size
    cdef readonly tuple components
    cdef readonly tuple windows
    cdef readonly tuple chunks
    cdef readonly tuple sinks
    cdef readonly str policy
    cdef readonly object state_interval
    cdef int32_t num_lanes
    cdef uint32_t every_component
    cdef bint has_states

    # Arguments.
    cdef Prefix _prefix(self, object tokens, object namespace, object spans, object max_tokens)
    cdef int32_t _component(self, object component) except -1
    cdef int32_t _lane(self, object lane) except -1
    cdef int _check_receipt(self, Receipt receipt) except -1

    # Namespaces.
    cdef int32_t _space(self, object key) except -1
    cdef void _drop_space(self, int32_t space) noexcept
    cdef void _forget_dead(self) noexcept

    cdef void _forget_roots(self) except *

    # Calls of RadixTree, with arguments converted.
    cdef Match _new_match(self)
    cdef Receipt _new_receipt(self, Prefix prefix)
    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1
    cdef int _fill(self, Match match, const NativeMatch& found) except -1
    cdef int _fill_shared(self, Match match, const NativeMatch& found) except -1
    cdef Match _match(self, Prefix prefix)
    cdef int _reserve_locks(self, Py_ssize_t count) except -1
    cdef int _lock(self, NativeMatch& found, Receipt receipt, double now) except -1
    cdef int _unlock(self, Receipt receipt, uint32_t components, const RetentionHint& hint, double now) except -1
    cdef int _insert(self, Insertion insertion, Inserted inserted) except -1
    cdef int _extend(self, Insertion insertion, Receipt receipt, Inserted inserted) except -1
    cdef int _prepare_all(self, Offers offers, NativeBatch& batch) except -1
    cdef int _insert_prepared(
        self, const Offer& offer, Receipt receipt, NativeBatch& batch, Py_ssize_t which, Inserted inserted
    ) except -1
    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept
    cdef int32_t _block_at(self, Receipt receipt, int64_t index, int32_t lane) except -1
    cdef int _replace(self, Receipt receipt, int64_t index, int32_t lane, int32_t block) except -1
    cdef int _evict(self, int32_t component, int64_t amount, double time, Evicted evicted) except -1

    # The raw interface, for the cache, whose own changes must not stop half way. These calls reserve memory and change
    # nothing observable:
    cdef int reserve_raw(self, int64_t num_moves) except -1  # for num_moves calls of lock_shared_raw and shorten_raw
    cdef int reserve_ids_raw(self, int32_t lane, int32_t num_ids) except -1
    cdef Receipt blank_receipt(self, object key)  # for lock_shared_raw or fork_raw; holds nothing yet
    cdef int match_raw(self, const Query& query, int64_t limit, NativeMatch* found) except -1
    # The number of a receipt's namespace, added if it is new; the caller drops it again if nothing is inserted.
    cdef int32_t space_raw(self, Receipt receipt) except -1
    # These calls cannot fail:
    cdef void drop_space_raw(self, int32_t space) noexcept
    cdef void advance_raw(self, double time) noexcept
    # Copies the blocks of the shared prefix of a match.
    cdef void copy_shared_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept
    # Pins the shared prefix of a match, and counts its state as hit.
    cdef void lock_shared_raw(self, NativeMatch& found, Receipt receipt) noexcept
    # The blocks of the full prefix of a match in a lane of its components `ahead`, and a pin on these components.
    cdef void copy_ahead_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept
    cdef void lock_ahead_raw(self, NativeMatch& found, Receipt receipt) noexcept
    # Pins the full prefix of a match, and what windows have before its end, holes included; not a hit.
    cdef void lock_full_raw(self, NativeMatch& found, Receipt receipt) noexcept
    cdef void fork_raw(self, Receipt source, Receipt target) noexcept
    cdef void shorten_raw(self, Receipt receipt, int64_t blocks) noexcept
    cdef void release_raw(self, Receipt receipt, const RetentionHint& hint) noexcept
    cdef int64_t depth_raw(self, Receipt receipt) noexcept  # in blocks
    cdef int64_t first_needed_raw(self, int32_t component, int64_t end) noexcept  # of a prefix of `end` blocks
    cdef int64_t evictable_raw(self, int32_t component) noexcept
    cdef int list_states_raw(self, vector[int32_t]& out) except -1
    cdef int32_t block_at_raw(self, Receipt receipt, int64_t index, int32_t lane) noexcept
    cdef int32_t num_pins_raw(self, Receipt receipt, int64_t index, int32_t component) noexcept
    cdef void copy_tail_raw(self, Receipt receipt, int32_t lane, span[int32_t] ids) noexcept
    cdef int32_t replace_raw(self, Receipt receipt, int64_t index, int32_t block, int32_t lane) noexcept
    # The node whose ids of a component evict_raw takes first, -1 for none; and the number of these ids.
    cdef int32_t next_victim_raw(self, int32_t component, int32_t* count) noexcept
    # Copies tokens, marks and ids of the path that ends with a node, ids by lane; returns its namespace's number.
    cdef int32_t copy_path_raw(
        self, int32_t node, vector[int32_t]& tokens, vector[Mark]& marks, vector[vector[int32_t]]& ids
    ) except -2
    cdef int32_t state_of_raw(self, int32_t node) noexcept  # -1 for none
    # Evicts min(amount, 4096, evictable) of a component into `gone_raw`; returns the number.
    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept
    # Evicts the end of a path back to `keep` tokens into `gone`; returns the number of blocks.
    cdef int64_t evict_path_raw(self, Prefix prefix, int64_t keep, vector[vector[int32_t]]& gone) except -1
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
