from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._integers cimport Integers, const_int32
from pagecore.native.translate cimport raise_python_error

ctypedef const int32_t* Int32Pointer


cdef extern from "pagecore/index/radix_tree.hpp" namespace "pagecore::radix" nogil:
    ctypedef span[const_int32] Int32s "std::span<const int32_t>"

    cdef enum class Policy(int):
        pass

    cdef cppclass Bytes32 "std::array<uint8_t, 32>":
        uint8_t* data()

    cdef cppclass Digest:
        Digest()
        int32_t kind
        Bytes32 bytes

    cdef cppclass Mark:
        int32_t block
        int64_t start
        int64_t end
        Digest digest

    ctypedef span[Mark] Marks "std::span<const pagecore::radix::Mark>"

    cdef cppclass Query:
        Int32s tokens
        Marks marks
        int32_t space

    cdef cppclass Wish:
        double priority
        double expiry
        double rank


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

    cdef cppclass State:
        int64_t blocks
        int32_t id

    ctypedef span[State] States "std::span<const pagecore::RadixTree::State>"

    cdef cppclass Offer:
        Query query
        vector[Int32Pointer] lanes
        States states
        Wish wish
        double time

    cdef cppclass NativeInserted "pagecore::RadixTree::Inserted":
        int64_t blocks
        int64_t old_blocks
        vector[vector[int32_t]] taken
        vector[vector[int32_t]] duplicates

    cdef cppclass NativeReceipt "pagecore::RadixTree::Receipt":
        int32_t node
        uint32_t components


cdef extern from "pagecore/index/radix_tree.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeRadixTree "pagecore::RadixTree":
        NativeRadixTree(const Options& options) except +raise_python_error
        int32_t add_namespace() except +raise_python_error
        bint has_dead_namespaces()
        vector[int32_t] take_dead_namespaces() except +raise_python_error
        void drop_namespace_if_empty(int32_t space)
        NativeMatch match(const Query& query, int64_t limit) except +raise_python_error
        void copy_blocks(int32_t node, int32_t offset, int32_t lane, span[int32_t] out)
        NativeReceipt lock(NativeMatch& match, uint32_t components) except +raise_python_error
        NativeReceipt lock_again(const NativeReceipt& receipt)
        void unlock(NativeReceipt& receipt, uint32_t components, const Wish& wish)
        void insert(const Offer& offer, NativeReceipt* receipt, NativeInserted& out) except +raise_python_error
        void check(const Offer& offer, NativeInserted& out) except +raise_python_error
        int64_t evict(int32_t component, int64_t amount, vector[vector[int32_t]]& out) except +raise_python_error
        void advance(double time)
        int64_t evictable(int32_t component)
        int64_t held(int32_t component)
        int32_t num_components()
        int32_t num_lanes()
        int64_t num_nodes()
        int64_t num_receipts()
        int64_t depth(int32_t node)
        size_t nbytes()
        void check_invariants() except +raise_python_error


# What a call looks up: tokens, spans and namespace, checked and converted.
cdef class Prefix:
    cdef Integers tokens
    cdef vector[Mark] marks
    cdef object key       # of the namespace
    cdef int32_t space    # -1: the tree has none such
    cdef int64_t limit    # blocks

    cdef Query query(self) noexcept


cdef class Entry:
    """One insertion, checked and converted."""
    cdef Prefix prefix
    cdef list lanes
    cdef vector[State] states
    cdef Wish wish
    cdef double time
    cdef Receipt receipt


cdef class Match:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_full_tokens
    cdef readonly object checkpoint
    cdef readonly object state
    cdef readonly object blocks


cdef class Receipt:
    cdef readonly RadixTree tree
    cdef readonly Match match
    cdef NativeReceipt native


cdef class RadixTree:
    cdef unique_ptr[NativeRadixTree] native
    cdef NativeInserted inserted  # scratch
    cdef dict spaces              # namespace, typed -> its number
    cdef dict space_keys          # and back
    cdef readonly int64_t block_size
    cdef readonly tuple components
    cdef readonly tuple windows
    cdef readonly str policy
    cdef readonly object state_interval
    cdef int32_t num_lanes
    cdef uint32_t every_component
    cdef bint has_states

    cdef Prefix _prefix(self, object tokens, object namespace, object spans, object max_tokens)
    cdef int _add_spans(self, Prefix prefix, object spans) except -1
    cdef int _wish(self, Wish* wish, object time, object priority, object time_to_live, object rank) except -1
    cdef int32_t _component(self, object component) except -1
    cdef Match _match(self, Prefix prefix)
    cdef Match _found(self, const NativeMatch& found)
    cdef Receipt _lock(self, Prefix prefix)
    cdef Entry _entry(
        self, object tokens, object blocks, object states, object namespace, object spans, Receipt receipt
    )
    cdef int _fill_offer(self, Entry entry, Offer* offer) except -1
    cdef object _insert(self, Entry entry)
    cdef object _per_lane(self, const vector[vector[int32_t]]& ids)
    cdef int _forget_dead(self) except -1
    cdef int _check_receipt(self, Receipt receipt) except -1


cdef class Inserted:
    cdef readonly int64_t num_tokens
    cdef readonly int64_t num_old_tokens
    cdef readonly object taken
    cdef readonly object duplicates
    cdef readonly object taken_states
    cdef readonly object duplicate_states


cdef class Evicted:
    cdef readonly int64_t amount
    cdef readonly object blocks
    cdef readonly object states
