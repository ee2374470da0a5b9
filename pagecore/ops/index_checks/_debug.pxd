# Checks of index arrays in device memory, made under `debug`; see _debug.pyx. They raise as the host kernels do.
from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._place cimport Place
from pagecore.ops.arguments._selected cimport Selected
from pagecore.ops.arguments._tree cimport TreeMask


# True if debug is on. UnsupportedOption if PAGECORE_DEBUG, read by the first call, is invalid.
cdef bint debugging() except -1

cdef int debug_slots(Tensor slot_mapping, Tensor key, Tensor key_cache, const Place* place) except -1

# `independent`: the caller claims that pairs may be copied in any order, which is checked too.
cdef int debug_copied(list caches, Tensor pairs, bint independent, const Place* place) except -1
cdef int debug_transferred(
    list sources, list targets, Tensor pairs, bint independent, int64_t lowest, const Place* place) except -1

# For gather and scatter. `packed` is the first packed array and `name` its argument; rows may be None.
cdef int debug_sequences(
    list caches, Tensor packed, str name, Tensor block_table, Tensor seq_lens, Tensor rows,
    const Place* place) except -1

# rows, cu_query_lens, mask, tree and selected may be None.
cdef int debug_attention(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
    Tensor mask, TreeMask tree, Selected selected, const Place* place) except -1

# For scores of blocks and tokens. rows and cu_query_lens may be None; all arrays are on the device.
cdef int debug_scores(
    Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
    int64_t block_size, const Place* place) except -1
