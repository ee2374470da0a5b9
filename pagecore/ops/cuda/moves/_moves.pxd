# The data-moving kernels on CUDA. The caller has checked all arguments except the contents of arrays on the device;
# kernels skip invalid entries there.
from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache
from pagecore.ops.arguments._arguments cimport Place

# Slot-mapped write. Keys are divided by key_divisors, one for each head, or all by key_divisor if that is None; values
# likewise. For formats that compute their scales the divisors are the given factors. `is_4over6`: nvfp4 scales are
# chosen among two. `written`: the arrays of the caches, and None.
cdef int write_kv(
    Tensor key, Tensor value, const Cache& keys, const Cache& values, Tensor slot_mapping, Tensor key_divisors,
    float key_divisor, Tensor value_divisors, float value_divisor, bint is_4over6, list written,
    const Place* place) except -1

# Block copies inside caches and between caches. Pairs on the host have been checked, and the launch carries them. Pairs
# on the device are copied one after another, or in parallel if the caller claims that they are `independent`.
cdef int copy_blocks(list caches, Tensor pairs, bint independent, const Place* place) except -1
cdef int transfer_blocks(
    list sources, list targets, Tensor pairs, bint independent, int64_t lowest, const Place* place) except -1

# Copies of sequences from and to blocks. `longest` is an upper bound of the tokens of a sequence.
cdef int gather_blocks(
    list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
    int64_t lowest, const Place* place) except -1
cdef int scatter_blocks(
    list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
    int64_t lowest, const Place* place) except -1

# Merge of two parts of attention. out may be out_a or out_b, lse may be lse_a or lse_b; mask may be None.
cdef int merge(
    Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor mask, Tensor out, Tensor lse,
    const Place* place) except -1

# Merge of any number of parts for each token, [token, part, head, dim] or, with cu_parts, [part, head, dim].
cdef int merge_many(
    Tensor parts, Tensor lses, Tensor cu_parts, Tensor out, Tensor lse, const Place* place) except -1

# Writes changed entries to a contiguous int32 table. `entries` is the address of PcTableEntry[capacity], `count`
# that of an int32, the number of valid entries; both are on the device of the table. Every count takes the same launch.
cpdef int scatter_entries(
    uintptr_t entries, uintptr_t count, int capacity, Tensor table, uintptr_t stream) except -1
