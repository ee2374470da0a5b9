"""The lock of a cache: re-entrant, and released by calls that cannot fail."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport int64_t, uint64_t

import os
import weakref

_locks = weakref.WeakSet()


cdef class StateLock:
    """A re-entrant lock. In a forked child it is free, unless the forking thread holds it."""

    def __init__(self):
        _locks.add(self)

    @property
    def depth(self):
        """Number of holds of the thread that has the lock."""
        return self.native.depth()

    cdef int acquire(self) except -1:
        if not self.native.try_acquire(PyThread_get_thread_ident(), False):
            self.queue(True)
        return 0

    cdef int queue(self, bint checks_signals) except -1:
        """Wait for the lock and acquire it."""
        cdef unsigned long thread = PyThread_get_thread_ident()
        cdef uint64_t seen
        while True:
            seen = self.native.generation()
            self.native.begin_queueing()
            with nogil:
                self.native.wait(seen)
            self.native.end_queueing()
            if checks_signals:
                PyErr_CheckSignals()
            if self.native.try_acquire(thread, True):
                return 0

    cdef int sleep(self) except -1:
        cdef uint64_t seen = self.native.generation()
        cdef int64_t depth
        self.native.begin_waiting()
        depth = self.native.suspend()
        with nogil:
            self.native.wait(seen)
        self.native.end_waiting()
        # Acquire before checking for signals: the caller releases the lock even if a signal handler raises.
        if not self.native.try_acquire(PyThread_get_thread_ident(), True):
            self.queue(False)
        self.native.resume(depth)
        PyErr_CheckSignals()
        return 0

    cdef void notify(self) noexcept:
        if self.native.has_waiting():
            self.native.notify()


@cython.freelist(16)
@cython.no_gc
cdef class Held:
    """A hold on a lock, released when it is collected or when its `with` block ends."""

    def __cinit__(self, StateLock lock not None):
        lock.acquire()
        self.lock = lock

    def __dealloc__(self):
        if self.lock is not None:
            self.lock.native.release()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.lock is not None:
            self.lock.native.release()
            self.lock = None


def _reset_in_child():
    cdef unsigned long thread = PyThread_get_thread_ident()
    for lock in _locks:
        (<StateLock>lock).native.reset_in_child(thread)


os.register_at_fork(after_in_child=_reset_in_child)
