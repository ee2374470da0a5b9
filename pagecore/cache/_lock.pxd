from libc.stdint cimport int64_t, uint64_t


cdef extern from "pagecore/cache/state_lock.hpp" namespace "pagecore" nogil:
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
    # Gives the lock back until another thread has released or notified it; the caller holds it again afterwards.
    cdef int sleep(self) except -1
    # Wakes the threads that sleep.
    cdef void notify(self) noexcept


# Holds a lock as long as it lives: its end cannot fail, as that of a `with` block can where memory is short.
cdef class Held:
    cdef StateLock lock
