"""num_threads and set_num_threads: the limit of threads for a call of the host kernels."""

from libc.stdint cimport int64_t
from libcpp.atomic cimport atomic

import os
from operator import index

from pagecore.errors import UnsupportedOption, shown
from pagecore.ops.cpu_count import usable_cores

cdef extern from "pagecore/ops/cpu/threads/threads.hpp" namespace "pagecore::cpu" nogil:
    const int64_t kMaxThreads

cdef atomic[int64_t] current  # 0: default not read yet; atomic, because native threads read it while Python writes


cdef int64_t threads_of_a_call() except -1:
    if current.load() == 0:
        current.store(default_threads())
    return current.load()


cdef const atomic[int64_t]* threads_address() except NULL:
    threads_of_a_call()
    return &current


cdef int64_t default_threads() except -1:
    cdef str wanted = os.environ.get("PAGECORE_NUM_THREADS", "")
    if not wanted:
        return min(usable_cores(), kMaxThreads)
    # int() raises an error of its own for thousands of digits.
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 10 and 1 <= int(wanted) <= kMaxThreads):
        raise UnsupportedOption(
            f"PAGECORE_NUM_THREADS is {wanted!r}; it must be a whole number of threads, 1 to {kMaxThreads}, or unset "
            "for the number of cores"
        )
    return int(wanted)


def num_threads():
    """Return the maximum number of threads that a call of the host kernels uses, including the calling thread.

    Short calls use fewer. One call uses the thread pool at a time; concurrent calls of other Python threads are
    single-threaded.

    Returns
    -------
    int
        The number set by `set_num_threads`, else by the environment variable PAGECORE_NUM_THREADS, else the cores
        available to the process (CPU affinity and cgroup quota).

    Raises
    ------
    UnsupportedOption
        PAGECORE_NUM_THREADS is not a whole number from 1 to 1024.
    """
    return threads_of_a_call()


def set_num_threads(n):
    """Set the maximum number of threads that a call of the host kernels uses, and return it.

    Plans made without `num_workers` split the work among this number. Threads are started by the first call that needs
    them. They are kept, even if the number is reduced later.

    Parameters
    ----------
    n : int or None
        1 to 1024, including the calling thread. None restores the default: PAGECORE_NUM_THREADS, else the cores
        available to the process.

    Returns
    -------
    int
        The new value of `num_threads`.

    Raises
    ------
    UnsupportedOption
        `n`, or PAGECORE_NUM_THREADS if it is read, is not a whole number from 1 to 1024. Nothing has changed.
    """
    if n is None:
        current.store(default_threads())
        return current.load()
    try:
        if isinstance(n, bool):
            raise TypeError("a bool is not an integer")
        count = index(n)
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"the number of threads is {shown(n)}; it must be a whole number or None") from error
    if not 1 <= count <= kMaxThreads:
        raise UnsupportedOption(f"the number of threads is {count}; it must be 1 to {kMaxThreads}")
    current.store(count)
    return count
