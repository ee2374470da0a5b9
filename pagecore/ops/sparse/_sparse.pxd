from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops.args cimport Cache
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cpu.sparse.select cimport SummaryArgs
from pagecore.ops.cuda.sparse._sparse cimport KeySummaryPlanes


# summaries.pxi: summaries of keys (bounds of blocks, labels of tokens) that a write keeps up.

cdef class KeySummary:
    cdef SummaryArgs args
    cdef vector[int32_t] channels
    cdef Tensor listed  # the channels; on the device of the call
    cdef object kernel  # on CUDA
    cdef tuple held

    cdef KeySummaryPlanes planes(self) noexcept
    # Writes the summaries. The slots have been checked.
    cdef int run(self) except -1
    # Loads the kernel of launch() and checks its sizes; both may fail. The slots are on the device.
    cdef int load(self, Tensor slots, const Place* place) except -1
    # Launches the kernel, after the write of the keys.
    cdef int launch(self, Tensor slots, const Place* place) except -1


# Returns None if no plane is given. `keys` is the cache of the keys, and `others` has the tensors and names that no
# summary may overlap.
cdef KeySummary read_summary(
    object key_min, object key_max, object label, object label_channels, Tensor key, Tensor keys, Tensor slots,
    tuple others, const Place* place)

# Bounds [num_blocks, Hkv, D] as a cache with one token a block.
cdef Cache bounds_cache(Tensor bounds) noexcept

# Returns label channels as int32 [Hkv, S] on the device of the call. Those on the host are checked, each in
# 0 .. dim - 1, and written to `out`.
cdef Tensor listed_channels(
    object channels, int64_t num_heads, int64_t dim, vector[int32_t]& out, const Place* place)
