# The C++ of this folder.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t
from libcpp cimport bool as cbool

from pagecore.index._integers cimport const_int32
from pagecore.native.std cimport span, vector
from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/index/radix/nodes/content_hash.hpp" namespace "pagecore::radix" nogil:
    uint64_t hash_bytes(const char* bytes, size_t size, uint64_t seed)


ctypedef const int32_t* Int32Pointer


cdef extern from "pagecore/index/radix/retention/claims.hpp" namespace "pagecore::radix" nogil:
    ctypedef span[const_int32] Int32s "std::span<const int32_t>"

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

    cdef cppclass RetentionHint:
        double priority
        double expiry
        double rank

    cdef cppclass HintRange:
        int64_t end
        RetentionHint hint

    ctypedef span[HintRange] HintRanges "std::span<const pagecore::radix::HintRange>"


cdef extern from "pagecore/index/radix/retention/claims.hpp" namespace "pagecore::radix" nogil:
    cdef cppclass State:
        int64_t blocks
        int32_t id

    ctypedef span[State] States "std::span<const pagecore::radix::State>"

    cdef cppclass Offer:
        Query query
        vector[Int32Pointer] lanes
        States states
        RetentionHint hint
        HintRanges ranges
        double time


cdef extern from "pagecore/index/radix/tree/journal.hpp" namespace "pagecore::radix" nogil:
    cdef cppclass ChangeRecord:
        cbool is_stored
        int32_t component
        int32_t first
        int32_t count
        int32_t num_marks
        uint64_t root
        uint64_t parent

    cdef cppclass NativeChanges "pagecore::radix::Changes":
        vector[ChangeRecord] records
        vector[uint64_t] hashes
        vector[int32_t] tokens
        vector[Mark] marks
        cbool has_overflowed

    uint64_t hash_block(uint64_t parent, const int32_t* tokens, int64_t block_size, Marks marks, int64_t block)


cdef extern from "pagecore/index/radix/tree/tree.hpp" namespace "pagecore::radix" nogil:
    cdef enum class Policy(int):
        pass


cdef extern from "pagecore/index/radix/tree/tree.hpp" namespace "pagecore::RadixTree" nogil:
    cdef cppclass Options:
        int64_t block_size
        int64_t full_lanes
        vector[int64_t] windows
        vector[int64_t] chunks
        vector[int64_t] sinks
        cbool has_states
        int64_t state_interval
        int64_t min_kept
        Policy policy
        double protected_share

    cdef cppclass NativeMatch "pagecore::RadixTree::Match":
        int64_t blocks
        int64_t full_blocks
        int32_t full_node
        int32_t full_offset
        int64_t checkpoint
        int32_t node
        int32_t offset
        int32_t state
        int64_t shared_blocks
        uint32_t ahead
        int32_t shared_node
        int32_t shared_offset

    cdef cppclass NativeInserted "pagecore::radix::Inserted":
        int64_t blocks
        int64_t old_blocks
        vector[vector[int32_t]] taken
        vector[vector[int32_t]] duplicates

    cdef cppclass NativeReceipt "pagecore::radix::Receipt":
        int32_t node
        uint32_t components

    cdef cppclass Prepared "pagecore::RadixTree::Prepared":
        NativeInserted answer


ctypedef NativeReceipt* ReceiptPointer


cdef extern from "pagecore/index/radix/tree/tree.hpp" namespace "pagecore" nogil:
    ctypedef span[ReceiptPointer] ReceiptPointers "std::span<pagecore::radix::Receipt* const>"
    ctypedef span[NativeMatch] Matches "std::span<pagecore::RadixTree::Match>"
    ctypedef span[Offer] Offers "std::span<const pagecore::radix::Offer>"

    cdef cppclass NativeRadixTree "pagecore::RadixTree":
        NativeRadixTree(const Options& options) except +raise_python_error
        int32_t add_namespace() except +raise_python_error
        int32_t dead_namespace()
        void forget_dead_namespace()
        void drop_namespace_if_empty(int32_t space)
        NativeMatch match(const Query& query, int64_t limit) except +raise_python_error
        void copy_blocks(int32_t node, int32_t offset, int32_t lane, span[int32_t] out)
        void copy_ahead(const NativeMatch& match, int32_t lane, span[int32_t] out)
        NativeReceipt lock(NativeMatch& match, uint32_t components) except +raise_python_error
        void lock_all(Matches matches, uint32_t components, ReceiptPointers receipts) except +raise_python_error
        NativeReceipt lock_again(const NativeReceipt& receipt)
        void unlock(NativeReceipt& receipt, uint32_t components, const RetentionHint& hint)
        void insert(const Offer& offer, NativeReceipt* receipt, NativeInserted& out) except +raise_python_error
        void extend(const Offer& offer, NativeReceipt& receipt, NativeInserted& out) except +raise_python_error
        void prepare_all(Offers offers, vector[Prepared]& batch) except +raise_python_error
        void insert_prepared(const Offer& offer, NativeReceipt* receipt, Prepared& prepared)
        int64_t evict(
            int32_t component, int64_t amount, vector[vector[int32_t]]& out, double time
        ) except +raise_python_error
        int64_t evict_namespace(int32_t space, vector[vector[int32_t]]& out) except +raise_python_error
        int64_t revoke(
            const Query& query, int64_t valid, ReceiptPointers receipts, vector[vector[int32_t]]& out
        ) except +raise_python_error
        int32_t copy_path_of(
            int32_t lane, int32_t id, vector[int32_t]& tokens, vector[Mark]& marks
        ) except +raise_python_error
        int64_t evict_path(
            const Query& query, int64_t limit, int64_t keep, vector[vector[int32_t]]& out
        ) except +raise_python_error
        void copy_tail(int32_t end, int32_t lane, span[int32_t] out) except +raise_python_error
        int32_t id_at(int32_t end, int64_t block, int32_t lane) except +raise_python_error
        int32_t replace_id(int32_t end, int64_t block, int32_t lane, int32_t id) except +raise_python_error
        void start_journal(size_t max_bytes, vector[uint64_t] roots) except +raise_python_error
        void stop_journal()
        bint has_journal()
        void set_root(int32_t space, uint64_t root) except +raise_python_error
        void list_journal_roots(vector[uint64_t]& out) except +raise_python_error
        void take_changes(NativeChanges& out)
        void list_contents(NativeChanges& out) except +raise_python_error
        void advance(double time)
        # Changes that cannot fail after reserve(), reserve_ids() and reserve_evicted(), and reads of known places.
        void reserve(int64_t nodes) except +raise_python_error
        void reserve_ids(int32_t lane, int32_t num_ids) except +raise_python_error
        void reserve_evicted(vector[vector[int32_t]]& out) except +raise_python_error
        int64_t nodes_to_move()
        NativeReceipt reserved_lock_shared "lock_shared"(NativeMatch& match, bint is_hit)
        void count_hit(const NativeReceipt& receipt, int64_t state_blocks)
        NativeReceipt reserved_lock_full "lock_full"(NativeMatch& match)
        NativeReceipt reserved_lock_ahead "lock_ahead"(NativeMatch& match)
        void shorten(NativeReceipt& receipt, int64_t blocks)
        bint try_extend(const Offer& offer, NativeReceipt& receipt, NativeInserted& out)
        bint try_insert(const Offer& offer, NativeReceipt& receipt, NativeInserted& out)
        int64_t reserved_evict "evict"(int32_t component, int64_t amount, vector[vector[int32_t]]& out)
        void known_tail "copy_tail"(int32_t end, int32_t lane, span[int32_t] out)
        int32_t known_id "id_at"(int32_t end, int64_t block, int32_t lane)
        int32_t reserved_replace "replace_id"(int32_t end, int64_t block, int32_t lane, int32_t id)
        int32_t next_victim(int32_t component)
        int32_t num_ids_to_take(int32_t node, int32_t component)
        int32_t state_of(int32_t node)
        double priority_of(int32_t node, int32_t component)
        int32_t copy_path(
            int32_t node, vector[int32_t]& tokens, vector[Mark]& marks, vector[vector[int32_t]]& ids
        ) except +raise_python_error
        int32_t num_pins(int32_t end, int64_t block, int32_t component)
        int64_t first_needed(int32_t component, int64_t end)
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
