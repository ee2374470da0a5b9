from libc.stdint cimport int32_t, int64_t, uint32_t

from pagecore.index.radix._radix_native cimport NativeInserted, NativeRadixTree, NativeReceipt, ReceiptPointer
from pagecore.index.radix._radix_query cimport (
    HintRanges,
    Int32Pointer,
    Offer,
    Prefix,
    Query,
    RetentionHint,
    States,
)
from pagecore.index.radix._radix_values cimport Match
from pagecore.native.std cimport vector


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
    cdef int32_t _component(self, object component) except -1
    cdef int32_t _lane(self, object lane) except -1
    cdef int _check_receipt(self, Receipt receipt) except -1

    # Namespaces. _space() adds a new namespace, which the caller drops again if nothing is inserted.
    cdef int32_t _space(self, object key) except -1
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
