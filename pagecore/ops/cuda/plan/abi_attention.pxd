# The parts of cuda_src/abi/attention.h and plan.h that the binding of attention uses, and the conversion to them.
from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t

from pagecore.ops.args cimport Cache, Indices, Table, TokenArray
from pagecore.ops.cuda.plan._plan cimport PcPlanLayout


cdef extern from "cuda_src/abi/plan.h" nogil:
    enum PcFloat:
        PC_FLOAT32
        PC_FLOAT16
        PC_BFLOAT16

    cdef struct PcRows:
        pass

    cdef struct PcCache:
        pass

    cdef struct PcIndices:
        uint64_t data

    cdef struct PcTable:
        int32_t num_rows
        int32_t width

    cdef struct PcSchedule:
        uint64_t items
        uint64_t first_item

    cdef struct PcSelection:
        uint64_t entries
        int64_t sequence_stride
        int64_t head_stride
        uint64_t counts
        int64_t counts_sequence_stride
        int64_t counts_head_stride
        int32_t width
        int32_t unit
        int32_t unit_shift
        int32_t wide
        int32_t counts_wide

    cdef struct PcTree:
        PcIndices positions
        int32_t words

    cdef struct PcAttentionParams:
        PcRows query
        PcRows out
        PcCache key
        PcCache value
        PcTable table
        PcIndices rows
        PcIndices seq_lens
        PcIndices cu_query_lens
        PcSchedule schedule
        uint64_t lse
        int64_t lse_token_stride
        int64_t lse_head_stride
        uint64_t partial_out
        uint64_t partial_lse
        uint64_t counters
        int64_t num_partial_rows
        uint64_t sinks
        uint64_t alibi_slopes
        uint64_t key_scale
        uint64_t value_scale
        uint64_t query_scale
        uint64_t out_scale
        uint64_t mask
        uint64_t mask_starts
        int64_t mask_size
        int32_t num_tokens
        int32_t num_sequences
        int32_t num_query_heads
        int32_t num_kv_heads
        int32_t head_dim
        int32_t value_dim
        int32_t num_blocks
        int32_t block_size
        int32_t block_shift
        int32_t causal
        int32_t window_left
        int32_t window_right
        int32_t fold_tokens
        PcFloat query_type
        PcFloat key_type
        PcFloat value_type
        float scale
        float softcap
        int32_t sink_tokens
        int16_t key_scale_stride
        int16_t value_scale_stride
        PcFloat out_type
        float out_factor
        int32_t query_scale_stride
        PcSelection selection
        PcTree tree

    cdef struct PcPlanParams:
        PcAttentionParams attention
        PcPlanLayout layout
        uint64_t buffer

    const int32_t kFoldTokens "pagecore::kFoldTokens"


cdef extern from "cuda_src/abi/formats.h" nogil:
    enum PcFormat:
        PC_PLAIN

    bint pc_has_row_scale(PcFormat format)

    cdef struct PcStored:
        PcFormat format

    cdef struct PcStoredAttentionParams:
        PcAttentionParams attention
        PcStored key
        PcStored value


cdef extern from "cuda_src/shapes/attention.h" nogil:
    cdef struct PcLaunchShape:
        int threads
        int shared_bytes
        int blocks_per_sm
        int max_rows

    cdef struct PcMatrixDims:
        int key
        int value

    PcMatrixDims pc_matrix_dims(int head_dim, int value_dim)
    PcLaunchShape pc_decode_shape(int key_dim, int value_dim)
    PcLaunchShape pc_decode_sealed_shape(int key_dim, int value_dim)
    PcLaunchShape pc_general_shape(int dim)
    const int kMaxGeneralDim "pc_max_general_dim"


cdef extern from "cuda_src/shapes/stored.h" nogil:
    cdef struct PcStoredKernel:
        int type
        int bits
        int dim

    PcStoredKernel pc_stored_kernel(
        PcFormat key, PcFormat value, PcFloat query_type, int head_dim, int value_dim)
    PcStoredKernel pc_prefill_stored_kernel(
        PcFormat key, PcFormat value, PcFloat query_type, int head_dim, int value_dim)
    PcLaunchShape pc_stored_shape(int bits, int dim)


cdef extern from "cuda_src/shapes/prefill.h" nogil:
    PcLaunchShape pc_prefill_shape(int key_dim, int value_dim, bint full)
    PcLaunchShape pc_prefill_stored_shape(int code_bits, int dim, bint full)
    PcLaunchShape pc_prefill_sealed_shape(int key_dim, int value_dim, bint full)


cdef extern from "pagecore/ops/cuda/device_args.hpp" namespace "pagecore::cuda" nogil:
    PcRows device_tokens(const TokenArray& tokens)
    PcCache device_cache(const Cache& cache)
    PcStored device_stored(const Cache& cache)
    PcIndices device_indices(const Indices& indices)
    PcTable device_table(const Table& table)
