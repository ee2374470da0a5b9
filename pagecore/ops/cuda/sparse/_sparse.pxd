# Sparse selection on CUDA: summaries of keys, scores, selections. The caller has checked all arguments except the
# contents of arrays on the device, which the kernels clamp.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport BlockArray, Cache, Indices, Table, TokenArray
from pagecore.ops.arguments._arguments cimport Place


cdef extern from "pagecore/ops/cuda/sparse/sparse_launch.hpp" namespace "pagecore::cuda" nogil:
    cdef cppclass KeySummaryPlanes:
        TokenArray key
        Cache stored
        Cache low
        Cache high
        Cache label
        const char* channels

    cdef cppclass ScoreSources:
        TokenArray query
        Cache low
        Cache high
        Table table
        Indices rows
        Indices seq_lens
        Indices cu_query_lens
        const char* channels
        int64_t block_size
        int64_t width


# A selection of each row of float32 scores, `score_stride` numbers apart. Lengths are on the device, one for each
# `rows_per_length` rows, or `length` if they are absent. `ranked`: the best first; `counts` may be NULL then.
cdef struct Selecting:
    const char* scores
    int64_t score_stride
    int64_t num_rows
    int64_t width
    int64_t rows_per_length
    int64_t length
    int64_t budget
    int64_t sinks
    int64_t recent
    int64_t threshold
    int64_t capacity
    char* positions
    char* counts
    bint ranked


# Loads the kernel of summarise, which may fail.
cdef object summary_kernel(const Place* place)

# Raises an error for sizes that summarise does not support; its callers do so before they write anything.
cdef int check_summary(const KeySummaryPlanes& planes, const Indices& slots) except -1

# Keeps up the bounds and labels of keys with the given slots, after their write. `kernel`: of summary_kernel.
cdef int summarise(
    object kernel, const KeySummaryPlanes& planes, const Indices& slots, int64_t num_blocks, int64_t block_size,
    const Place* place) except -1

# Scores blocks (with `low`) or tokens to float32 `scores` [num_tokens, num_kv_heads, width].
cdef int score(const ScoreSources& sources, char* scores, bint causal, bint mean, const Place* place) except -1

cdef int select(const Selecting& call, const Indices& lens, const Place* place) except -1


# Moves of tokens between slots of arrays [block, token, ...], and bounds that are renewed afterwards.
cdef class DeviceMoves:
    cdef Place place
    cdef object kernel, summary, slots
    cdef vector[BlockArray] arrays
    cdef vector[KeySummaryPlanes] bounds

    # Loads kernels and allocates memory for `count` moves. The rest fails only if the device does.
    cdef int reserve(self, int64_t count) except -1
    # Copies source and target slots to the device and moves the tokens, in order; no target is the source of a later
    # move. The bounds of the targets' blocks, which begin with their first slots, are computed anew.
    cdef int run(self, const int64_t* sources, const int64_t* targets, int64_t count) except -1
