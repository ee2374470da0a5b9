# The kernels that move data, on a CUDA device. Arguments are as in ops/cpu/_cpu.pxd, checked but for what stands in
# arrays on the device: there the kernels leave out what makes no sense.
from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.ops._place cimport Place

# Numbers are divided by key_divisors, one for each head, or where that is None all by key_divisor.
cdef int write_kv(
    Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping, Tensor key_divisors,
    float key_divisor, Tensor value_divisors, float value_divisor, const Place* place) except -1

# `pairs` on the host has been checked and travels in the launch. Pairs on the device are copied one after another, or
# all at once where they are `independent`, which the caller vouches for.
cdef int copy_blocks(list caches, Tensor pairs, bint independent, const Place* place) except -1
cdef int transfer_blocks(list sources, list targets, Tensor pairs, bint independent, const Place* place) except -1

# `longest`: what no sequence has more tokens than.
cdef int gather_blocks(
    list caches, list packed, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
    const Place* place) except -1
cdef int scatter_blocks(
    list packed, list caches, Tensor block_table, Tensor seq_lens, Tensor rows, int64_t longest,
    const Place* place) except -1

# out may be out_a or out_b, lse may be lse_a or lse_b.
cdef int merge(
    Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out, Tensor lse, const Place* place) except -1

# The first int32 at `count` entries of those at `entries` (PcTableEntry, room for `capacity`) into a contiguous int32
# table; all three on the device of the table. The launch is the same whatever the count.
cpdef int scatter_entries(
    uintptr_t entries, uintptr_t count, int capacity, Tensor table, uintptr_t stream) except -1
