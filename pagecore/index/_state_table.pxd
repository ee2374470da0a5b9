from libc.stdint cimport int32_t, int64_t
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.span cimport span
from libcpp.vector cimport vector

from pagecore.index._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index._block_tables cimport BlockCopy, BlockTables
from pagecore.index._block_tables_native cimport Int32s
from pagecore.index._integers cimport Integers
from pagecore.index._state_buffers cimport NativeStateBuffers, StateBuffers
from pagecore.index._step_buffers cimport StepBuffers
from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/index/state_table.hpp" namespace "pagecore" nogil:
    cdef struct StateOptions:
        int64_t chunk
        int64_t interval
        int64_t block_size
        int64_t draft_tokens
        bint in_place

    cdef cppclass NativeStateTable "pagecore::StateTable":
        NativeStateTable(
            shared_ptr[NativeBlockPool], shared_ptr[NativeBlockPool], const StateOptions&, int64_t
        ) except +raise_python_error
        void check_state(int32_t length, int64_t state) except +raise_python_error
        void add(int32_t row, int32_t length, int32_t state, int32_t branch) except +raise_python_error
        void restore(
            int32_t row, int32_t length, int32_t running, int32_t resting, int32_t checkpoint_length, int32_t checkpoint
        )
        void check_idle(Int32s rows, const char* verb) except +raise_python_error
        void fork(int32_t row, int32_t child) except +raise_python_error
        void check_reorder(Int32s rows, Int32s parents) except +raise_python_error
        void reorder(Int32s rows, Int32s parents) except +raise_python_error
        void check_truncate(Int32s rows, Int32s lengths) except +raise_python_error
        void truncate(Int32s rows, Int32s lengths) except +raise_python_error
        void check_used(Int32s rows) except +raise_python_error
        void remove(Int32s rows) except +raise_python_error
        int64_t drop_checkpoints(Int32s rows) except +raise_python_error
        int64_t drop_all_checkpoints()
        void forget_checkpoint(int32_t row) except +raise_python_error
        bint try_reserve(
            Int32s rows, Int32s counts, const int32_t* lengths, const NativeStateBuffers& out, bint keeps
        ) except +raise_python_error
        void take(Int32s rows, Int32s counts, NativeStateBuffers& out) except +raise_python_error
        void give_back() except +raise_python_error
        void fail_out_of_slots() except +raise_python_error
        int64_t shortage(
            Int32s rows, Int32s counts, const int32_t* lengths, bint keeps
        ) except +raise_python_error
        int64_t least_shortage(
            Int32s rows, Int32s counts, const int32_t* lengths, Int32s released
        ) except +raise_python_error
        void check_commit(Int32s rows, Int32s accepted, vector[int32_t]& lengths) except +raise_python_error
        void select_path(int32_t row, Int32s path)
        void restore_path(int32_t row, Int32s path)
        void list_saves(Int32s rows, Int32s accepted, vector[BlockCopy]& out) except +raise_python_error
        void commit(Int32s rows, Int32s accepted) except +raise_python_error
        void check_flight(Int32s rows, bint has_run, vector[int32_t]& lengths) except +raise_python_error
        void abandon(Int32s rows) except +raise_python_error
        void undo(Int32s rows) except +raise_python_error
        int32_t length(int32_t row) except +raise_python_error
        int32_t slot(int32_t row) except +raise_python_error
        int32_t resting(int32_t row) except +raise_python_error
        int32_t checkpoint(int32_t row) except +raise_python_error
        int32_t checkpoint_length(int32_t row) except +raise_python_error
        int32_t resume_length(int32_t row, int32_t length) except +raise_python_error
        int32_t step_count(int32_t row) except +raise_python_error
        int32_t grid_length(int32_t before, int32_t count, int32_t branch)
        int32_t max_sequences()
        size_t nbytes()
        int64_t checkpoint_shortage()
        void count_held(span[int32_t] counts, span[int32_t] checkpoints)
        void check_invariants(bint exclusive) except +raise_python_error


cdef class StateTable:
    cdef unique_ptr[NativeStateTable] native
    cdef readonly BlockTables tables
    cdef readonly BlockPool slots
    cdef readonly BlockPool checkpoints  # `slots` itself, unless checkpoints are quantised
    cdef readonly int32_t chunk
    cdef readonly int32_t interval
    cdef readonly int32_t draft_tokens
    cdef bint is_in_place
    cdef bint lacks_slots  # the last step that was refused was short of slots, not of blocks
    cdef const int32_t* row_lengths  # of the block tables
    cdef vector[int32_t] lengths
    cdef vector[int32_t] counts

    cdef bint _try_prepare(
        self, Integers rows, Integers counts, StepBuffers buffers, StateBuffers states, bint keeps) except -1
    cdef object _end(self, object rows, bint has_run)
    cdef Int32s _accepted(self, Integers rows, Integers given, bint* is_partial) except *
    cdef tuple _held(self)

    # The raw interface, for a cache, which changes the block tables itself. Calls that begin with check, shortages and
    # try_reserve_raw may raise, with nothing changed; the change of the same name follows, and cannot fail.
    cdef void add_raw(self, int32_t row, int32_t length, int32_t state, int32_t branch) noexcept
    cdef void restore_raw(
        self, int32_t row, int32_t length, int32_t running, int32_t resting, int32_t checkpoint_length,
        int32_t checkpoint
    ) noexcept
    cdef void fork_raw(self, int32_t row, int32_t child) noexcept
    cdef void remove_raw(self, Int32s rows) noexcept
    cdef int check_reorder_raw(self, Int32s rows, Int32s parents) except -1
    cdef void reorder_raw(self, Int32s rows, Int32s parents) noexcept
    cdef void truncate_raw(self, Int32s rows, Int32s lengths) noexcept
    cdef int64_t drop_all_checkpoints_raw(self) noexcept
    cdef void forget_checkpoint_raw(self, int32_t row) noexcept
    # Takes the slots of a step; returns False, with nothing taken, if they are short. Then take_raw or give_back_raw.
    cdef bint try_reserve_raw(self, Int32s rows, Int32s counts, StateBuffers out, bint keeps) except -1
    cdef void take_raw(self, Int32s rows, Int32s counts, StateBuffers out) noexcept
    cdef void give_back_raw(self) noexcept
    cdef int64_t shortage_raw(self, Int32s rows, Int32s counts, bint keeps) except -1
    # The slots of quantised checkpoints that the last shortage_raw lacked.
    cdef int64_t checkpoint_shortage_raw(self) noexcept
    cdef bint is_quantised(self) noexcept
    # The slots that a step lacks at least, if another holder drops `released` and idle rows drop their checkpoints.
    cdef int64_t least_shortage_raw(self, Int32s rows, Int32s counts, Int32s released) except -1
    cdef int check_commit_raw(self, Int32s rows, Int32s accepted) except -1
    # Selects the slots of a path of a tree of drafts, which commit_raw keeps then, or undoes that.
    cdef void select_path_raw(self, int32_t row, Int32s path, bint is_undone) noexcept
    # Lists the quantised checkpoints that commit_raw will keep.
    cdef int list_saves_raw(self, Int32s rows, Int32s accepted, vector[BlockCopy]& out) except -1
    cdef void commit_raw(self, Int32s rows, Int32s accepted) noexcept
    # Writes the lengths of the rows after end_raw.
    cdef int check_end_raw(self, Int32s rows, bint has_run, int32_t* lengths) except -1
    cdef void end_raw(self, Int32s rows, bint has_run) noexcept
    cdef int32_t slot_raw(self, int32_t row) noexcept
    cdef int32_t resting_raw(self, int32_t row) noexcept
    cdef int32_t checkpoint_raw(self, int32_t row) noexcept
    cdef int32_t checkpoint_length_raw(self, int32_t row) noexcept
    cdef int32_t resume_length_raw(self, int32_t row, int32_t length) noexcept
