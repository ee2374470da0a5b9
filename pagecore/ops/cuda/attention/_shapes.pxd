# Selection of the attention kernel for a call.
from pagecore.ops.cuda.plan.abi_attention cimport PcLaunchShape


# The properties of a call that select its kernel.
cdef struct KernelQuery:
    int head_dim
    int value_dim
    int query_type  # PcFloat, here and below
    int key_type
    int value_type
    int key_format  # PcFormat
    int value_format
    bint aligned         # every row of query, keys, values and output begins at a multiple of 16 bytes
    bint aligned_scales  # every row of scales begins at a multiple of 4 bytes
    bint full            # softcap, ALiBi or a mask
    bint selected        # blocks or tokens are selected


# Return the name of the kernel for few queries (decode) or for prefill, and write its launch shape to `shape`.
# UnsupportedOption if the selected variant has no instance for the call.
cdef str select_kernel(const KernelQuery& query, bint decode, PcLaunchShape* shape)
