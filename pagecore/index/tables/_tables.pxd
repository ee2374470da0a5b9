from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers, const_int32
from pagecore.index.tables._native cimport (
    BlockCopy,
    ChangedEntry,
    Int32s,
    NativeBlockTables,
    NativeStepBuffers,
    SlotsOut,
)
from pagecore.native.std cimport span, unique_ptr, vector


# step_buffers.pxi

cdef class StepMemory:
    """Owner of the native buffers. The arrays keep it alive, rather than the StepBuffers that keeps the arrays."""
    cdef unique_ptr[NativeStepBuffers] native


cdef class StepBuffers:
    cdef StepMemory memory
    cdef NativeStepBuffers* native
    cdef readonly str slot_dtype
    cdef readonly object rows, query_lens, cu_query_lens, seq_lens, positions, token_ids, tree_mask
    cdef readonly object sealed_lens    # None unless the steps have sealed blocks
    cdef readonly tuple slot_mappings
    # Addresses of the arrays; they never move.
    cdef int32_t* rows_data
    cdef int32_t* query_lens_data
    cdef int32_t* cu_query_lens_data
    cdef int32_t* seq_lens_data
    cdef int32_t* positions_data
    cdef int32_t* token_ids_data
    cdef int32_t* sealed_lens_data      # or NULL

    cdef object _array(self, void* data, Py_ssize_t size, bint is_wide=*)
    cdef object _tree_array(self)


# block_tables_core.pxi

cdef class TablesCore:
    cdef unique_ptr[NativeBlockTables] native
    cdef readonly tuple pools
    cdef readonly tuple block_sizes
    cdef bint is_grouped  # made with a sequence of pools: results are tuples with one entry for each group

    # Calls of BlockTables, with arguments converted.
    cdef int32_t _next_row(self) noexcept  # -1 if every row is in use
    cdef int _reorder(self, Int32s rows, Int32s parents) except -1
    cdef int64_t _check_step(self, Int32s rows, Int32s counts) except -1
    cdef bint _try_extend(self, Int32s rows, Int32s counts, const vector[SlotsOut]& out) except -1
    cdef int64_t _settle_copies(self, int64_t group) except -1
    cdef int _take_copies(self, int64_t group, span[BlockCopy] out) except -1
    cdef int _follow_changes(self) except -1
    cdef void _put_back_changes(self, ChangedEntry* entries, Py_ssize_t count) noexcept

    # The raw interface, for the cache: the methods of the same names for n rows, without Python objects. A call that
    # raises has changed nothing.
    # `length` is -1 for all tokens of the prefix.
    cdef int32_t add_raw(self, const vector[span[const_int32]]& prefix, int64_t length=*) except -1
    cdef int32_t fork_raw(self, int32_t row) except -1
    cdef int remove_raw(self, const int32_t* rows, Py_ssize_t n) except -1
    cdef int reorder_raw(self, const int32_t* rows, const int32_t* parents, Py_ssize_t n) except -1
    cdef int truncate_raw(self, const int32_t* rows, const int32_t* lengths, Py_ssize_t n, bint keep_capacity) except -1
    cdef int64_t release_before_raw(
        self, const int32_t* rows, int64_t group, const int32_t* positions, Py_ssize_t n, int64_t first=*
    ) except -1
    cdef int shortage_raw(
        self, const int32_t* rows, const int32_t* counts, Py_ssize_t n, vector[int64_t]& out,
        const vector[int32_t]& first_blocks
    ) except -1
    # Returns False if blocks are short. `first_blocks` may be empty.
    cdef bint try_prepare_raw(
        self, const int32_t* rows, const int32_t* counts, Py_ssize_t n, StepBuffers out,
        const vector[int32_t]& first_blocks
    ) except -1
    # Returns False if blocks are short; `missing` has room for the number of each group. Blocks of the groups in
    # `replaced` are left alone, except for those past the length.
    cdef bint try_compact_raw(
        self, int32_t row, int32_t unmoved, int32_t length, vector[int64_t]& missing, const vector[int32_t]& replaced
    ) except -1
    # Replaces an entry of a row by a held block, whose reference it takes over, or by a hole, 0.
    cdef void replace_raw(self, int32_t row, int64_t group, int32_t at, int32_t block) noexcept
    # Raises OutOfBlocks with the figures of the try_prepare_raw or try_compact_raw that has just failed.
    cdef int fail_out_of_blocks(self) except -1
    # Takes the copies of a group into `out`, whose capacity covers each row of the step that required them.
    cdef int take_copies_raw(self, int64_t group, vector[BlockCopy]& out) except -1
    # Undoes the copies that take_copies_raw has just returned, in the rows of the step that required them.
    cdef int undo_copies_raw(
        self, const int32_t* rows, Py_ssize_t num_rows, int64_t group, BlockCopy* copies, Py_ssize_t num_copies
    ) except -1
    # Writes up to `capacity` changed entries; returns the number.
    cdef Py_ssize_t take_changes_raw(self, ChangedEntry* out, Py_ssize_t capacity) except -1
    # The blocks of a row in a group; valid until the row changes.
    cdef Int32s row_raw(self, int32_t row, int64_t group) noexcept
    cdef int32_t length_raw(self, int32_t row) noexcept
    cdef int64_t num_free_rows(self) noexcept


cdef inline Int32s view(Integers values):
    return span[const_int32](values.data, <size_t> values.size)

# A tuple of values by group; ShapeError if they are not iterable.
cdef tuple as_tuple(object values, str name)


# table_steps.pxi

cdef class TableSteps(TablesCore):
    cdef object _extend(self, object rows, object counts, object out, bint must)
    cdef list _slot_targets(self, object out, int64_t num_tokens)
    cdef bint _is_short(self, Integers rows, Integers counts) except -1
    cdef int _read_first_blocks(self, object first_blocks, vector[int32_t]& out) except -1


# block_tables.pxi

cdef class BlockTables(TableSteps):
    pass
