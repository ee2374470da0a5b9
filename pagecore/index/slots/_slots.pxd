from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport const_int32, const_int64
from pagecore.index.pools._block_pool cimport BlockPool, NativeBlockPool
from pagecore.index.tables._native cimport SlotType, SlotsOut
from pagecore.native.std cimport shared_ptr, span, unique_ptr
from pagecore.native.translate cimport raise_python_error


# request_table.pxi

cdef extern from "pagecore/index/slots/request_table.hpp" namespace "pagecore" nogil:
    ctypedef span[const_int32] Int32s "std::span<const int32_t>"
    ctypedef span[const_int64] SlotIds "std::span<const int64_t>"

    cdef cppclass NativeRequestTable "pagecore::RequestTable":
        NativeRequestTable(int64_t num_requests, int64_t max_context, SlotType type) except +raise_python_error
        bint try_allocate(span[int32_t] out) except +raise_python_error
        void free(Int32s rows) except +raise_python_error
        void write(Int32s rows, Int32s starts, Int32s counts, SlotIds slots) except +raise_python_error
        void read(int32_t row, int64_t start, int64_t stop, void* out) except +raise_python_error
        void check_range(int32_t row, int64_t start, int64_t stop) except +raise_python_error
        int32_t length(int32_t row) except +raise_python_error
        int32_t num_requests()
        int32_t max_context()
        int32_t num_free()
        int32_t num_used()
        SlotType type()
        void* table()
        size_t nbytes()
        void check_invariants() except +raise_python_error


cdef class RequestTable:
    cdef unique_ptr[NativeRequestTable] native
    cdef readonly str dtype

    cdef object _try_allocate(self, int64_t count)


# slot_methods.pxi

cdef extern from "pagecore/index/slots/slot_allocator.hpp" namespace "pagecore" nogil:
    ctypedef span[const_int32] Lengths "std::span<const int32_t>"

    cdef cppclass NativeSlotAllocator "pagecore::SlotAllocator":
        NativeSlotAllocator(shared_ptr[NativeBlockPool] pool, int64_t block_size) except +raise_python_error
        NativeSlotAllocator(
            shared_ptr[NativeBlockPool] pool, int64_t block_size, shared_ptr[NativeBlockPool] window
        ) except +raise_python_error
        int64_t plan_allocate(int64_t num_tokens) except +raise_python_error
        int64_t plan_extend(Lengths prefix_lens, Lengths seq_lens, SlotIds last_slots) except +raise_python_error
        int64_t plan_decode(Lengths seq_lens, SlotIds last_slots) except +raise_python_error
        bint has_room() except +raise_python_error
        bint try_commit(const SlotsOut& out) except +raise_python_error
        void fail_out_of_blocks() except +raise_python_error
        int32_t free(SlotIds slots) except +raise_python_error
        int32_t release_window(SlotIds slots) except +raise_python_error
        void share(SlotIds slots) except +raise_python_error
        int32_t* window_map()
        int64_t window_map_size()
        void begin_group()
        int32_t end_group() except +raise_python_error
        int64_t block_size()
        int64_t num_slots()
        int64_t num_available() except +raise_python_error
        size_t nbytes()
        void check_invariants() except +raise_python_error


cdef class SlotMethods:
    cdef unique_ptr[NativeSlotAllocator] native
    cdef readonly str index_dtype

    # The native allocator; raises TypeError for an object made by hand, which has none.
    cdef NativeSlotAllocator* made(self) except NULL
    # Makes the native allocator, with a window pool unless `window` is None, and checks the dtype of its slots.
    cdef int make(self, BlockPool pool, BlockPool window, object block_size, object index_dtype) except -1
    # The methods of a WindowSlotAllocator that only this module's native code can call.
    cdef int32_t drop_window(self, object slots) except -1
    cdef int add_references(self, object slots) except -1
    cdef int check(self) except -1
    cdef object _extend(self, object prefix_lens, object seq_lens, object last_slots, object out, bint must)
    cdef object _decode(self, object seq_lens, object last_slots, object out, bint must)
    cdef object _allocate(self, object n, object out, bint must)
    cdef object _target(self, object target, int64_t num_slots, SlotsOut* out)
    cdef object _refuse(self, bint must)


cdef class FreeGroup:
    cdef readonly SlotMethods allocator
    cdef readonly int32_t num_freed
    cdef bint is_open


# slot_allocator.pxi

cdef class SlotAllocator(SlotMethods):
    cdef readonly BlockPool pool


# window_slots.pxi

cdef class WindowSlotAllocator(SlotMethods):
    cdef readonly BlockPool full
    cdef readonly BlockPool window
