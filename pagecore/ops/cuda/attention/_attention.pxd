from libc.stdint cimport int32_t, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, Sealed, Selected, StoredCache, TreeMask
from pagecore.ops.cuda.plan.abi_attention cimport PcAttentionParams, PcLaunchShape, PcRows
from pagecore.ops.planning._plan cimport AttentionPlan


# latent_shapes.pxi: the kernels of latent attention, their parameters and launch shapes.

cdef extern from "cuda_src/shapes/latent.h" nogil:
    cdef struct PcDivisor:
        pass

    ctypedef enum PcLatentFormat:
        pass

    cdef struct PcLatentParams:
        PcAttentionParams attention
        PcRows query_rope
        PcDivisor block
        PcLatentFormat format
        int32_t rope_dim
        int32_t sparse
        float value_factor

    const int kMaxGeneralLatent "pc_max_general_latent"
    const int kMaxGeneralRow "pc_max_general_row"
    int pc_latent_tiles(int num_rows, int rows)


# Returns the name of the kernel of a section and sets its launch shape, whose max_rows are the packed rows of a CTA.
# `in_vectors`: every row begins at a multiple of 16 bytes.
cdef str select_latent_kernel(const PcLatentParams& params, bint decode, bint in_vectors, PcLaunchShape* shape)


# shapes.pxi

# Selection of the attention kernel for a call.

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
    bint sealed          # the first tokens are in sealed blocks
    bint codes_out       # the output is float8
    bint sealed_matrix   # matrix instructions serve their planes in the section


# Return the name of the kernel for few queries (decode) or for prefill, and write its launch shape to `shape`.
# UnsupportedOption if the selected variant has no instance for the call.
cdef str select_kernel(const KernelQuery& query, bint decode, PcLaunchShape* shape)


# attention.pxi

# Paged attention on CUDA: parameters and launches. Arguments are what ops/attention/attention.pxi has checked.

# Launches paged attention. seq_lens and cu_query_lens may be on the host; all other Tensors are on the device of the
# call. key_scale and value_scale are given factors, one for each head. rows, cu_query_lens, sinks, alibi_slopes,
# mask, tree, key_scale, value_scale and lse may be None.
#
# `selected` is None, or has lists on the device; such a call plans its own batch, batch-invariant if `plan` is.
# `sealed` is None, or is on the device; the caches are then plain.
#
# `out` has the dtype of `query`, or float8_e4m3fn. A float8 output is multiplied by `out_factor`; if `out_scale` is not
# None, it is divided by the number of that array instead. `query_scale` has factors for each key head, or is None.
#
# `planned` is a plan in an array of the caller, uint8 on the device (see plan_lengths); it excludes `plan`. With
# `checks_plan` it is compared with the lengths and options of the call, which waits for the device. Without either plan
# the call plans its batch. The framework of `example` allocates the workspace, unless `plan` has one.
cdef int attention(
    Tensor query, StoredCache keys, StoredCache values, Tensor block_table, Tensor seq_lens, Tensor rows,
    Tensor cu_query_lens, AttentionPlan plan, Tensor planned, double scale, bint causal, int64_t window_left,
    int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
    TreeMask tree, Tensor key_scale, Tensor value_scale, Tensor query_scale, double out_factor, Tensor out_scale,
    Selected selected, Sealed sealed, Tensor out, Tensor lse, bint checks_plan, object example,
    const Place* place) except -1
