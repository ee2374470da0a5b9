# The maximum number of threads for a call of the host kernels. The thread pool is linked into ops/cpu/_cpu alone, so
# calls pass the number as an argument.
from libc.stdint cimport int64_t
from libcpp.atomic cimport atomic


# UnsupportedOption if PAGECORE_NUM_THREADS, read by the first call, is invalid.
cdef int64_t threads_of_a_call() except -1

# The address of the number, for native threads that do not hold the GIL; it is never 0. Raises as threads_of_a_call().
cdef const atomic[int64_t]* threads_address() except NULL
