from libc.stdint cimport int32_t, int64_t, uint64_t

from pagecore.native.std cimport unique_ptr
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
        NativeStepBuffers(int64_t, int64_t, int64_t, SlotType, int64_t) except +raise_python_error
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
        void* slots(size_t group)
        void skip_slots(int32_t first, int32_t last) except +raise_python_error
        void pad(int32_t num_sequences, int32_t num_tokens, int32_t null_row)
        void check_invariants() except +raise_python_error


cdef class StepMemory:
    """Owner of the native buffers. The arrays keep it alive, rather than the StepBuffers that keeps the arrays."""
    cdef unique_ptr[NativeStepBuffers] native


cdef class StepBuffers:
    cdef StepMemory memory
    cdef NativeStepBuffers* native
    cdef readonly str slot_dtype
    cdef readonly object rows, query_lens, cu_query_lens, seq_lens, positions, token_ids, tree_mask
    cdef readonly tuple slot_mappings
    # Addresses of the arrays; they never move.
    cdef int32_t* rows_data
    cdef int32_t* query_lens_data
    cdef int32_t* cu_query_lens_data
    cdef int32_t* seq_lens_data
    cdef int32_t* positions_data
    cdef int32_t* token_ids_data

    cdef object _array(self, void* data, Py_ssize_t size, bint is_wide=*)
    cdef object _tree_array(self)
