from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._radix_query cimport Entry, Int32Pointer, Offer, Prefix, Query, RetentionHint
from pagecore.index._radix_values cimport Inserted, Match
from pagecore.native.translate cimport raise_python_error

cdef extern from "pagecore/index/radix_tree.hpp" namespace "pagecore::radix" nogil:
    cdef enum class Policy(int):
        pass

    cdef cppclass Run:
        pass


cdef extern from "pagecore/index/radix_tree.hpp" namespace "pagecore::RadixTree" nogil:
    cdef cppclass Options:
        int64_t block_size
        int64_t full_lanes
        vector[int64_t] windows
        cbool has_states
        int64_t state_interval
        Policy policy

    cdef cppclass NativeMatch "pagecore::RadixTree::Match":
        int64_t blocks
        int64_t full_blocks
        int64_t checkpoint
        int32_t node
        int32_t offset
        int32_t state

    cdef cppclass NativeInserted "pagecore::RadixTree::Inserted":
        int64_t blocks
        int64_t old_blocks
        vector[vector[int32_t]] taken
        vector[vector[int32_t]] duplicates

    cdef cppclass NativeReceipt "pagecore::RadixTree::Receipt":
        int32_t node
        uint32_t components

    cdef cppclass NativeBatch "pagecore::RadixTree::Batch":
        vector[NativeInserted] answers
        vector[Run] runs


cdef extern from "pagecore/index/radix_tree.hpp" namespace "pagecore" nogil:
    ctypedef span[Offer] Offers "std::span<const pagecore::RadixTree::Offer>"

    cdef cppclass NativeRadixTree "pagecore::RadixTree":
        NativeRadixTree(const Options& options) except +raise_python_error
        int32_t add_namespace() except +raise_python_error
        int32_t dead_namespace()
        void forget_dead_namespace()
        void drop_namespace_if_empty(int32_t space)
        NativeMatch match(const Query& query, int64_t limit) except +raise_python_error
        void copy_blocks(int32_t node, int32_t offset, int32_t lane, span[int32_t] out)
        NativeReceipt lock(NativeMatch& match, uint32_t components) except +raise_python_error
        void reserve_locks(int64_t count) except +raise_python_error
        NativeReceipt lock_again(const NativeReceipt& receipt) except +raise_python_error
        void unlock(NativeReceipt& receipt, uint32_t components, const RetentionHint& hint) except +raise_python_error
        void insert(const Offer& offer, NativeReceipt* receipt, NativeInserted& out) except +raise_python_error
        void insert(
            const Offer& offer, NativeReceipt* receipt, NativeInserted& out, Run* spare
        ) except +raise_python_error
        void extend(const Offer& offer, NativeReceipt& receipt, NativeInserted& out) except +raise_python_error
        void prepare_all(Offers offers, NativeBatch& batch) except +raise_python_error
        int64_t evict(
            int32_t component, int64_t amount, vector[vector[int32_t]]& out, double time
        ) except +raise_python_error
        void copy_tail(int32_t end, int32_t lane, span[int32_t] out) except +raise_python_error
        int32_t id_at(int32_t end, int64_t block, int32_t lane) except +raise_python_error
        int32_t replace_id(int32_t end, int64_t block, int32_t lane, int32_t id) except +raise_python_error
        void advance(double time)
        # Changes that cannot fail, once reserve() and its kin have been called.
        void reserve(int64_t nodes) except +raise_python_error
        void reserve_ids(int32_t lane, int32_t num_ids) except +raise_python_error
        void reserve_evicted(vector[vector[int32_t]]& out) except +raise_python_error
        int64_t nodes_to_move()
        NativeReceipt reserved_lock "lock"(NativeMatch& match, uint32_t components)
        void shorten(NativeReceipt& receipt, int64_t blocks)
        bint try_extend(const Offer& offer, NativeReceipt& receipt, NativeInserted& out)
        bint try_insert(const Offer& offer, NativeReceipt& receipt, NativeInserted& out)
        int64_t reserved_evict "evict"(int32_t component, int64_t amount, vector[vector[int32_t]]& out)
        void known_tail "copy_tail"(int32_t end, int32_t lane, span[int32_t] out)
        int32_t known_id "id_at"(int32_t end, int64_t block, int32_t lane)
        int32_t reserved_replace "replace_id"(int32_t end, int64_t block, int32_t lane, int32_t id)
        int32_t num_pins(int32_t end, int64_t block, int32_t component)
        int64_t evictable(int32_t component)
        int64_t held(int32_t component)
        vector[int32_t] held_ids(int32_t lane) except +raise_python_error
        int32_t num_components()
        int32_t num_lanes()
        int64_t num_nodes()
        int64_t num_receipts()
        int64_t depth(int32_t node)
        size_t nbytes()
        void check_invariants() except +raise_python_error


cdef class Receipt:
    cdef readonly RadixTree tree
    cdef readonly Match match
    cdef NativeReceipt native
    cdef object key  # of the namespace; None: the one without a name


cdef class RadixTree:
    cdef unique_ptr[NativeRadixTree] native
    cdef NativeInserted inserted  # what the last insertion did
    cdef Offer offer              # scratch
    cdef vector[vector[int32_t]] gone_raw  # scratch of evict_raw, as large as it gets
    cdef dict spaces    # key of a namespace -> its number
    cdef list space_keys  # and back; None where the number is not in use
    cdef readonly int64_t block_size
    cdef readonly tuple components
    cdef readonly tuple windows
    cdef readonly str policy
    cdef readonly object state_interval
    cdef int32_t num_lanes
    cdef uint32_t every_component
    cdef bint has_states

    cdef Prefix _prefix(self, object tokens, object namespace, object spans, object max_tokens)
    cdef int32_t _component(self, object component) except -1
    cdef int _find(self, Prefix prefix, NativeMatch* found) except -1
    cdef Match _match(self, Prefix prefix)
    cdef Match _new_match(self)
    cdef int _fill(self, Match match, const NativeMatch& found) except -1
    cdef Receipt _new_receipt(self, Prefix prefix)
    cdef int32_t _space(self, object key) except -1
    cdef int _extend(self, Receipt receipt) except -1
    # For the cache, whose own changes must not stop half way. These take memory, and change nothing that shows:
    cdef int reserve_raw(self, int64_t num_moves) except -1  # for so many calls of lock_raw and shorten_raw
    cdef int reserve_ids_raw(self, int32_t lane, int32_t num_ids) except -1
    cdef Receipt blank_receipt(self, object key)  # not a hold yet: for lock_raw or fork_raw
    cdef int match_raw(self, const Query& query, int64_t limit, NativeMatch* found) except -1
    # The number of a receipt's namespace, which is added where it has none: drop it where nothing comes of it.
    cdef int32_t space_raw(self, Receipt receipt) except -1
    # These cannot fail:
    cdef void drop_space_raw(self, int32_t space) noexcept
    cdef void advance_raw(self, double time) noexcept
    cdef void copy_match_raw(self, const NativeMatch& found, int32_t lane, span[int32_t] out) noexcept
    cdef void lock_raw(self, NativeMatch& found, Receipt receipt) noexcept
    cdef void fork_raw(self, Receipt source, Receipt target) noexcept
    cdef void shorten_raw(self, Receipt receipt, int64_t blocks) noexcept
    cdef void release_raw(self, Receipt receipt, const RetentionHint& hint) noexcept
    cdef int64_t depth_raw(self, Receipt receipt) noexcept
    cdef int64_t evictable_raw(self, int32_t component) noexcept
    cdef int32_t block_at_raw(self, Receipt receipt, int64_t index, int32_t lane) noexcept
    cdef int32_t num_pins_raw(self, Receipt receipt, int64_t index, int32_t component) noexcept
    cdef void copy_tail_raw(self, Receipt receipt, int32_t lane, span[int32_t] ids) noexcept
    cdef int32_t replace_raw(self, Receipt receipt, int64_t index, int32_t block, int32_t lane) noexcept
    # Gives up min(amount, 4096, evictable) of a component into `gone`; returns how many.
    cdef int64_t evict_raw(self, int32_t component, int64_t amount) noexcept
    # Keep a sequence; False, with nothing changed, where memory is short. What was done is in `inserted`.
    cdef bint try_extend_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes
    ) noexcept
    cdef bint try_insert_raw(
        self, Receipt receipt, const Query& query, const vector[Int32Pointer]& lanes, const RetentionHint& hint, double time
    ) noexcept
    cdef void _offer_raw(
        self, const Query& query, const vector[Int32Pointer]& lanes, const RetentionHint& hint, double time
    ) noexcept
    cdef void _drop_space(self, int32_t space) noexcept
    cdef void _forget_dead(self) noexcept
    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept
    cdef int _check_receipt(self, Receipt receipt) except -1
    cdef int32_t _lane(self, object lane) except -1
