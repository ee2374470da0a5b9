# Windows, chunks and sink tokens; see _windows.pyx.
from libc.stdint cimport int64_t


# Reads a window as keys before and after a query's own position, -1 for no bound. A window of W keys counts the query's
# own, so it is (W - 1, no bound).
cdef int read_window(object window, int64_t* left, int64_t* right) except -1
cdef int read_reach(object window, object chunk, int64_t* left, int64_t* right) except -1
cdef object chunk_of(int64_t left)
# The number of sink tokens of a window whose left side is `left`; 0 for None.
cdef int64_t read_sink_tokens(object sink_tokens, object chunk, int64_t left) except -1
