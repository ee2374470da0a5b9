from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport Integers
from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.states._native cimport NativeStateBuffers, NativeStateTable
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.index.tables._tables cimport BlockTables, StepBuffers
from pagecore.native.std cimport unique_ptr, vector


# state_buffers.pxi

cdef class StateMemory:
    """Owner of the native buffers. The arrays keep it alive, rather than the StateBuffers that keeps the arrays."""
    cdef unique_ptr[NativeStateBuffers] native


cdef class StateBuffers:
    cdef StateMemory memory
    cdef NativeStateBuffers* native
    cdef readonly object state_read, state_write, checkpoint_write, checkpoint_lengths, draft_read, draft_write
    cdef object all_zeros, all_copies, all_loads, all_saves

    cdef object _array(self, void* data, Py_ssize_t size, Py_ssize_t width=*)


# state_table_core.pxi

cdef class StateTableCore:
    cdef unique_ptr[NativeStateTable] native
    cdef readonly BlockTables tables
    cdef readonly BlockPool slots
    cdef readonly BlockPool checkpoints  # `slots` itself, unless checkpoints are quantised
    cdef readonly int32_t chunk
    cdef readonly int32_t interval
    cdef readonly int32_t draft_tokens
    cdef bint is_in_place
    cdef const int32_t* row_lengths  # of the block tables
    cdef vector[int32_t] lengths
    cdef vector[int32_t] counts

    cdef tuple _held(self)

    # Calls of StateTable, with arguments converted.
    cdef int _check_state(self, int32_t length, int64_t slot) except -1
    cdef int _add(self, int32_t row, int32_t length, int32_t state, int32_t branch) except -1
    cdef int _check_fork(self, int32_t row) except -1
    cdef int _check_ends(self, Int32s rows) except -1
    cdef int _fork(self, int32_t row, int32_t child) except -1
    cdef int _check_used(self, Int32s rows) except -1
    cdef int _check_truncate(self, Int32s rows, Int32s lengths) except -1
    cdef int64_t _drop_checkpoints(self, Int32s rows) except -1
    cdef Int32s _accepted(self, Integers rows, Integers given, bint* is_partial) except *

    # The raw interface, for a cache, which changes the block tables itself. Calls that begin with check, shortages and
    # try_reserve_raw may raise, with nothing changed; the change of the same name follows, and cannot fail.
    cdef void add_raw(self, int32_t row, int32_t length, int32_t state, int32_t branch) noexcept
    # Sets the tokens up to which an equal sequence could find a row, unless a step of the row is in flight.
    cdef void set_end_raw(self, int32_t row, int32_t end) noexcept
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
    cdef int64_t least_shortage_raw(
        self, Int32s rows, Int32s counts, Int32s released, int64_t others
    ) except -1
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


# state_table.pxi

cdef class StateTable(StateTableCore):
    cdef bint lacks_slots  # the last step that was refused was short of slots, not of blocks

    cdef bint _try_prepare(
        self, Integers rows, Integers counts, StepBuffers buffers, StateBuffers states, bint keeps
    ) except -1
    cdef object _end(self, object rows, bint has_run)
