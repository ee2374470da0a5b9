# The C++ of this folder.

from libc.stdint cimport int32_t, int64_t

from pagecore.index.pools._block_pool cimport NativeBlockPool
from pagecore.index.tables._native cimport BlockCopy, Int32s
from pagecore.native.std cimport shared_ptr, span, vector
from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/index/states/state_buffers.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeStateBuffers "pagecore::StateBuffers":
        NativeStateBuffers(int64_t, int64_t) except +raise_python_error
        int32_t max_sequences()
        int32_t draft_tokens()
        int32_t num_sequences()
        int32_t num_zeros()
        int32_t num_copies()
        int32_t num_loads()
        int32_t num_saves()
        size_t nbytes()
        int32_t* state_read()
        int32_t* state_write()
        int32_t* checkpoint_write()
        int32_t* checkpoint_lengths()
        int32_t* zeros()
        void* copies()
        void* loads()
        void* saves()
        void set_saves(const vector[BlockCopy]& saves)
        const int32_t* image()
        size_t image_nbytes()
        void skip(int32_t first, int32_t last)
        int32_t* draft_read(size_t)
        int32_t* draft_write(size_t)
        void check_invariants() except +raise_python_error


cdef extern from "pagecore/index/states/state_table.hpp" namespace "pagecore" nogil:
    cdef struct StateOptions:
        int64_t chunk
        int64_t interval
        int64_t block_size
        int64_t draft_tokens
        bint in_place
        int64_t delay

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
            Int32s rows, Int32s counts, const int32_t* lengths, Int32s released, int64_t others
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
        int32_t spare(int32_t row) except +raise_python_error
        int32_t resting(int32_t row) except +raise_python_error
        int32_t checkpoint(int32_t row) except +raise_python_error
        int32_t checkpoint_length(int32_t row) except +raise_python_error
        int32_t resume_length(int32_t row, int32_t length) except +raise_python_error
        int32_t step_count(int32_t row) except +raise_python_error
        int32_t grid_length(int32_t before, int32_t count, int32_t branch, int32_t end)
        void set_end(int32_t row, int32_t end) except +raise_python_error
        int32_t max_sequences()
        size_t nbytes()
        int64_t checkpoint_shortage()
        void count_held(span[int32_t] counts, span[int32_t] checkpoints)
        void check_invariants(bint exclusive) except +raise_python_error
