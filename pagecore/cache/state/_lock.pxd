from libc.stdint cimport int64_t, uint64_t


cdef extern from "pagecore/cache/state/state_lock.hpp" namespace "pagecore" nogil:
    cdef cppclass NativeStateLock "pagecore::StateLock":
        bint try_acquire(unsigned long thread)
        void release()
        int64_t suspend()
        void resume(int64_t depth)
        uint64_t generation()
        void begin_waiting()
        void end_waiting()
        bint has_waiting()
        void notify()
        void wait(uint64_t seen)
        void reset_in_child(unsigned long thread)


cdef class StateLock:
    cdef NativeStateLock native
    cdef object __weakref__

    cdef int acquire(self) except -1
    # Releases the lock until another thread releases or notifies it; the caller holds it again afterwards.
    cdef int sleep(self) except -1
    # Wakes the threads that sleep.
    cdef void notify(self) noexcept


# Holds a lock until it is collected. That cannot fail, whereas the end of a `with` block can if memory is short.
cdef class Held:
    cdef StateLock lock
