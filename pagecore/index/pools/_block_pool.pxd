from libc.stdint cimport int32_t, int64_t

from pagecore.index._integers cimport const_int32
from pagecore.native.std cimport shared_ptr, span, vector
from pagecore.native.translate cimport raise_python_error


cdef extern from "pagecore/index/pools/free_list.hpp" namespace "pagecore" nogil:
    cdef enum class Order(int):
        Lifo
        Fifo
        Address


cdef extern from "pagecore/index/pools/block_pool.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeBlockPool "pagecore::BlockPool":
        NativeBlockPool(int64_t num_blocks, Order order) except +raise_python_error
        bint try_allocate(span[int32_t] out) except +raise_python_error
        bint try_allocate_known "try_allocate"(span[int32_t] out)
        void share(span[const_int32] blocks) except +raise_python_error
        int32_t free(span[const_int32] blocks) except +raise_python_error
        int32_t retire(span[const_int32] blocks, int64_t step) except +raise_python_error
        int32_t reclaim(int64_t step) except +raise_python_error
        int32_t ref_count(int64_t block) except +raise_python_error
        void copy_ref_counts(span[int32_t] out) except +raise_python_error
        # For blocks that are known to be held: these cannot fail.
        void share_known "share"(span[const_int32] blocks)
        int32_t free_known "free"(span[const_int32] blocks)
        size_t num_unshared_known "num_unshared"(span[const_int32] blocks)
        void find_held_once_known "find_held_once"(span[const_int32] blocks, vector[int32_t]& out)
        int32_t ref_count_known "ref_count"(int64_t block)
        size_t num_unshared(span[const_int32] blocks) except +raise_python_error
        void find_held_once(span[const_int32] blocks, vector[int32_t]& out) except +raise_python_error
        int32_t num_blocks()
        int32_t num_free() except +raise_python_error
        int32_t num_free_known "num_free"()
        int32_t num_used() except +raise_python_error
        int32_t num_retired() except +raise_python_error
        size_t nbytes() except +raise_python_error
        void check_invariants() except +raise_python_error


cdef class BlockPool:
    cdef shared_ptr[NativeBlockPool] native  # shared with block tables and allocators
    cdef readonly str order
    cdef readonly int32_t num_blocks

    cdef object _try_allocate(self, int64_t count)
    # The raw interface, for blocks that are known to be held in this pool.
    cdef void share_raw(self, const int32_t* blocks, size_t count) noexcept
    cdef int32_t free_raw(self, const int32_t* blocks, size_t count) noexcept
    cdef int32_t ref_count_raw(self, int32_t block) noexcept
    cdef int32_t num_free_raw(self) noexcept
    # Takes out.size() blocks; returns False, with nothing taken, if fewer are free.
    cdef bint try_allocate_raw(self, vector[int32_t]& out) noexcept
    cdef size_t num_unshared_raw(self, const int32_t* blocks, size_t count) noexcept
    # Precondition: `out` has room for `count` more.
    cdef void find_held_once_raw(self, const int32_t* blocks, size_t count, vector[int32_t]& out) noexcept
