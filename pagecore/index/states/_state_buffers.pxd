from libc.stdint cimport int32_t, int64_t

from pagecore.index.tables._block_tables_native cimport BlockCopy
from pagecore.native.std cimport unique_ptr, vector
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


cdef class StateMemory:
    """Owner of the native buffers. The arrays keep it alive, rather than the StateBuffers that keeps the arrays."""
    cdef unique_ptr[NativeStateBuffers] native


cdef class StateBuffers:
    cdef StateMemory memory
    cdef NativeStateBuffers* native
    cdef readonly object state_read, state_write, checkpoint_write, checkpoint_lengths, draft_read, draft_write
    cdef object all_zeros, all_copies, all_loads, all_saves

    cdef object _array(self, void* data, Py_ssize_t size, Py_ssize_t width=*)
