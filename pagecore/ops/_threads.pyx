"""num_threads and set_num_threads: how many threads a call of the host kernels may use."""

from libc.stdint cimport int64_t
from libcpp.atomic cimport atomic

import os
from operator import index

from pagecore.arrays.refusals import brief
from pagecore.errors import UnsupportedOption
from pagecore.ops.cpu_count import usable_cores

cdef extern from "pagecore/ops/cpu/threads.hpp" namespace "pagecore::cpu" nogil:
    const int64_t kMaxThreads

cdef atomic[int64_t] current  # 0: not asked for yet; atomic, because native threads read it while Python writes


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
    # int() refuses thousands of digits with an error of its own.
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 10 and 1 <= int(wanted) <= kMaxThreads):
        raise UnsupportedOption(
            f"PAGECORE_NUM_THREADS is {wanted!r}; it must be a whole number of threads, 1 to {kMaxThreads}, or unset "
            "for as many as there are cores"
        )
    return int(wanted)


def num_threads():
    """How many threads a call of the host kernels may use, the caller's among them.

    Calls that are too short to share use fewer. While one call has the threads, calls of other Python threads run each
    on its own thread alone.

    Returns
    -------
    int
        What `set_num_threads` said last; without it, what the environment variable PAGECORE_NUM_THREADS says; without
        both, the cores that this process may use: its affinity, cut to the CPU quota of its control group.

    Raises
    ------
    UnsupportedOption
        PAGECORE_NUM_THREADS is no whole number from 1 to 1024.
    """
    return threads_of_a_call()


def set_num_threads(n):
    """Choose how many threads a call of the host kernels may use, and return it.

    Plans made without `num_workers` split the work for this many. Threads are started by the first call that needs
    them, and stay for later ones, also where fewer are asked for.

    Parameters
    ----------
    n : int or None
        1 to 1024, the caller's thread among them; None is what PAGECORE_NUM_THREADS says, else the cores that this
        process may use.

    Returns
    -------
    int
        `num_threads`.

    Raises
    ------
    UnsupportedOption
        A number that makes no sense, given or in PAGECORE_NUM_THREADS where that counts; nothing has changed.
    """
    if n is None:
        current.store(default_threads())
        return current.load()
    try:
        count = index(n)
    except MemoryError:
        raise
    except Exception:
        raise UnsupportedOption(f"the number of threads is {brief(n)}; it must be a whole number or None") from None
    if not 1 <= count <= kMaxThreads:
        raise UnsupportedOption(f"the number of threads is {count}; it must be 1 to {kMaxThreads}")
    current.store(count)
    return count
