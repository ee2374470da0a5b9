# How many threads a call of the host kernels may use. The threads themselves are linked into ops/cpu/_cpu alone, so
# this number reaches them as an argument.
from libc.stdint cimport int64_t


# Raises UnsupportedOption when PAGECORE_NUM_THREADS, asked for the first time, makes no sense.
cdef int64_t threads_of_a_call() except -1
