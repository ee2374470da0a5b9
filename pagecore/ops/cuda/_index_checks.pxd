# Kernels that check index arrays in device memory; see _index_checks.pyx. Each function returns True if an entry is
# invalid. The kernels are stricter than the calls that they check for: the host's checks decide and raise.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place


# UnsupportedOption if the stream is being captured: a check waits for the stream.
cdef int check_not_captured(const Place* place) except -1

# lowest <= id < limit.
cdef bint has_invalid_ids(Tensor ids, int64_t lowest, int64_t limit, const Place* place) except -1

# The same for both columns of pairs, [n, 2].
cdef bint has_invalid_pairs(
    Tensor pairs, int64_t lowest, int64_t num_sources, int64_t num_targets, const Place* place) except -1

# Lengths that the rows of the table hold and that sum to num_tokens (-1: any sum), rows and blocks that exist, and
# cu_query_lens that rises from 0 to num_queries at most. rows and cu_query_lens may be None.
cdef bint has_invalid_batch(
    Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_tokens, int64_t num_queries,
    int64_t num_blocks, int64_t block_size, const Place* place) except -1
