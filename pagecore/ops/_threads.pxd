# How many threads a call of the host kernels may use. The threads themselves are linked into ops/cpu/_cpu alone, so
# this number reaches them as an argument.
from libc.stdint cimport int64_t
from libcpp.atomic cimport atomic


# Raises UnsupportedOption when PAGECORE_NUM_THREADS, asked for the first time, makes no sense.
cdef int64_t threads_of_a_call() except -1

# Where that number stands, for native threads that have no interpreter at hand; raises likewise. Never 0.
cdef const atomic[int64_t]* threads_address() except NULL
