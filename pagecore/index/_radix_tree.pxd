from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._radix_query cimport Entry, Int32Pointer, Offer, Prefix, Query, Wish
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
        void unlock(NativeReceipt& receipt, uint32_t components, const Wish& wish) except +raise_python_error
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
    # `extend` without a Python object: lanes[i] has the num_tokens / block_size ids of lane i, from the sequence's
    # start. The answer is in `inserted`, until the next insertion.
    cdef int extend_raw(
        self, Receipt receipt, const int32_t* tokens, int64_t num_tokens, const vector[Int32Pointer]& lanes
    ) except -1
    # The last ids of a lane of the path that a receipt holds.
    cdef int copy_tail_raw(self, Receipt receipt, int32_t lane, span[int32_t] ids) except -1
    cdef void _drop_space(self, int32_t space) noexcept
    cdef void _forget_dead(self) noexcept
    cdef void _hand_over(self, NativeInserted& done, Inserted inserted) noexcept
    cdef int _check_receipt(self, Receipt receipt) except -1
    cdef int32_t _lane(self, object lane) except -1
