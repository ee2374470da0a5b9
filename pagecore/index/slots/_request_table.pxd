from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport const_int32, const_int64
from pagecore.index.tables._step_buffers cimport SlotType
from pagecore.native.std cimport span, unique_ptr
from pagecore.native.translate cimport raise_python_error


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
