# The C++ of this folder.

from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.index._integers cimport const_int32
from pagecore.index.pools._block_pool cimport NativeBlockPool
from pagecore.native.std cimport shared_ptr, span, vector
from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/index/slots.hpp" namespace "pagecore" nogil:
    cdef enum class SlotType(int):
        Int32
        Int64

    cdef cppclass SlotsOut:
        void* data
        int64_t size
        SlotType type


cdef extern from "pagecore/index/tables/step_buffers.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeStepBuffers "pagecore::StepBuffers":
        NativeStepBuffers(int64_t, int64_t, int64_t, SlotType, int64_t, bint) except +raise_python_error
        int32_t max_sequences()
        int32_t max_tokens()
        size_t num_groups()
        SlotType slot_type()
        int32_t num_sequences()
        int32_t num_tokens()
        size_t nbytes()
        const void* image()
        size_t image_nbytes()
        int32_t* rows()
        int32_t* query_lens()
        int32_t* cu_query_lens()
        int32_t* seq_lens()
        int32_t* positions()
        int32_t* token_ids()
        int64_t tree_words()
        uint64_t* tree_mask()
        int32_t* sealed_lens()
        void* slots(size_t group)
        void skip_slots(int32_t first, int32_t last) except +raise_python_error
        void pad(int32_t num_sequences, int32_t num_tokens, int32_t null_row)
        void check_invariants() except +raise_python_error


cdef extern from "pagecore/index/tables/pending_copies.hpp" namespace "pagecore" nogil:
    cdef cppclass BlockCopy:
        int32_t source
        int32_t target


cdef extern from "pagecore/index/tables/changed_entries.hpp" namespace "pagecore" nogil:
    cdef cppclass ChangedEntry:
        int64_t index
        int64_t value


cdef extern from "pagecore/index/tables/block_tables.hpp" namespace "pagecore" nogil:
    cdef cppclass DenseTable:
        int32_t* blocks
        int64_t num_rows
        int64_t width
        int64_t stride
        int32_t* lengths
        int64_t num_lengths

    ctypedef span[const_int32] Int32s "std::span<const int32_t>"

    cdef cppclass NativeBlockTables "pagecore::BlockTables":
        NativeBlockTables(
            vector[shared_ptr[NativeBlockPool]], vector[int64_t], int64_t, int64_t
        ) except +raise_python_error
        int32_t next_row()
        int32_t add(const vector[span[const_int32]]& prefix, int64_t length) except +raise_python_error
        int32_t fork(int32_t row) except +raise_python_error
        void remove(Int32s rows) except +raise_python_error
        void reorder(Int32s rows, Int32s parents) except +raise_python_error
        int64_t check_step(Int32s rows, Int32s counts) except +raise_python_error
        bint try_extend(Int32s rows, Int32s counts, const vector[SlotsOut]& out) except +raise_python_error
        bint try_prepare(
            Int32s rows, Int32s counts, NativeStepBuffers& out, const vector[int32_t]& first_blocks
        ) except +raise_python_error
        void shortage(
            Int32s rows, Int32s counts, vector[int64_t]& out, const vector[int32_t]& first_blocks
        ) except +raise_python_error
        void fail_out_of_blocks() except +raise_python_error
        void truncate(Int32s rows, Int32s lengths, bint keep_capacity) except +raise_python_error
        int64_t release_before(Int32s rows, int64_t group, Int32s positions, int64_t first) except +raise_python_error
        bint try_compact(
            int32_t row, int32_t unmoved, int32_t length, span[int64_t] missing, Int32s replaced
        ) except +raise_python_error
        # For a row that has the entry: it cannot fail.
        void replace(int32_t row, int64_t group, int32_t at, int32_t block)
        size_t settle_copies(int64_t group) except +raise_python_error
        void take_copies(int64_t group, span[BlockCopy] out) except +raise_python_error
        void undo_copies(Int32s rows, int64_t group, span[BlockCopy] copies) except +raise_python_error
        void follow_changes() except +raise_python_error
        size_t take_changes(span[ChangedEntry] out) except +raise_python_error
        void put_back_changes(span[ChangedEntry] entries)
        int32_t length(int32_t row) except +raise_python_error
        int64_t capacity(int32_t row) except +raise_python_error
        Int32s blocks(int32_t row, int64_t group) except +raise_python_error
        void fill(Int32s rows, int64_t group, const DenseTable& out) except +raise_python_error
        int64_t num_rows()
        int32_t max_sequences()
        int32_t max_blocks()
        size_t num_groups()
        const int32_t* table(int64_t group) except +raise_python_error
        const int32_t* lengths()
        size_t num_pending_copies()
        int32_t known_length "length"(int32_t row)
        Int32s known_blocks "blocks"(int32_t row, int64_t group)
        size_t nbytes()
        void check_invariants(bint exclusive) except +raise_python_error
