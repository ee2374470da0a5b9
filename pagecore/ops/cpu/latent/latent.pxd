# The structs of latent_args.hpp and the functions of latent.hpp.
from libc.stdint cimport int32_t, int64_t
from libcpp cimport bool as cbool

from pagecore.arrays.dtypes.codes cimport DType
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport Cache, Indices, ScalePlane, Table, TokenArray
from pagecore.ops.cpu.args cimport AttentionArgs, PackedSequences, PlanView


cdef extern from "pagecore/ops/cpu/latent/latent.hpp" namespace "pagecore::cpu" nogil:
    enum class LatentFormat(int32_t):
        Plain
        E4M3
        Fp8DsMla
        Nvfp4DsMla

    const int64_t kPackedLatentDim
    const int64_t kPackedRopeDim
    const int64_t kFp8RowBytes
    const int64_t kNvfp4RowBytes
    const int64_t kLatentWidthMax

    cdef cppclass LatentCache:
        char* latent
        int64_t block_stride
        int64_t token_stride
        char* rope
        int64_t rope_block_stride
        int64_t rope_token_stride
        DType type
        LatentFormat format
        int64_t num_blocks
        int64_t block_size
        int64_t latent_dim
        int64_t rope_dim

    cdef cppclass LatentRows:
        char* data
        int64_t stride
        DType type

    int64_t latent_row_width(const LatentCache& cache)

    cdef cppclass LatentArgs:
        AttentionArgs call
        TokenArray query_rope
        LatentCache cache
        cbool sparse

    cdef cppclass LatentWriteArgs:
        TokenArray latent
        TokenArray rope
        LatentCache cache
        Indices slots
        float factor

    cdef cppclass IndexWriteArgs:
        TokenArray key
        Cache keys
        ScalePlane scales
        Indices slots

    cdef cppclass IndexScoreArgs:
        TokenArray query
        const float* weights
        Cache keys
        ScalePlane scales
        Table table
        float* out
        int64_t out_stride
        int64_t width

    cdef cppclass IndexScoreCall:
        IndexScoreArgs args
        Indices seq_lens
        Indices rows
        Indices cu_query_lens
        cbool causal

    cdef cppclass TopkArgs:
        const float* scores
        int64_t score_stride
        int64_t num_rows
        int64_t width
        Indices lens
        int64_t k
        int32_t* out

    cdef cppclass SlotsArgs:
        const int32_t* positions
        int64_t num_tokens
        int64_t width
        Table table
        Indices rows
        Indices cu_query_lens
        int64_t num_sequences
        int64_t block_size
        int32_t* out

    void run_latent_attention "pagecore::cpu::latent_attention"(
        const LatentArgs& args, const PlanView* plan, int64_t num_threads) except +raise_python_error
    void run_check_latent "pagecore::cpu::check_latent_attention"(const LatentArgs& args) except +raise_python_error
    void run_write_latent "pagecore::cpu::write_latent"(
        const LatentWriteArgs& args, int64_t num_threads) except +raise_python_error
    void run_write_index "pagecore::cpu::write_index"(
        const IndexWriteArgs& args, int64_t num_threads) except +raise_python_error
    void run_gather_latent "pagecore::cpu::gather_latent"(
        const LatentCache& cache, float factor, const PackedSequences& batch, const LatentRows& out,
        int64_t num_threads) except +raise_python_error
    void run_index_scores "pagecore::cpu::index_scores"(
        const IndexScoreCall& call, int64_t num_threads) except +raise_python_error
    void run_select_topk "pagecore::cpu::select_topk"(
        const TopkArgs& args, int64_t num_threads) except +raise_python_error
    void run_slots_of "pagecore::cpu::slots_of"(
        const SlotsArgs& args, int64_t num_threads) except +raise_python_error
