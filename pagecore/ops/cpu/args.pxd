# The host's own structs of args.hpp and the functions of ops.hpp, host_calls.hpp and dispatch.hpp, for _cpu.pyx.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp cimport bool as cbool

from pagecore.arrays.dtypes.codes cimport DType
from pagecore.native.std cimport vector
from pagecore.native.translate cimport raise_python_error
from pagecore.ops.args cimport (
    BlockArray,
    Cache,
    Format,
    Indices,
    Lse,
    MergeArgs,
    MergeManyArgs,
    PerHead,
    Table,
    TokenArray,
    WriteArgs,
)
from pagecore.ops.plan cimport PcWorkItem
from pagecore.ops.sealed_plane cimport SealedBlocks


cdef extern from "pagecore/ops/cpu/codec.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass Codec:
        char* numbers
        char* codes
        char* scales
        int64_t numbers_stride
        int64_t codes_stride
        int64_t scales_stride
        int64_t num_rows
        int64_t dim
        DType type
        Format format
        cbool four_over_six
        const float* factors
        int64_t num_factors


cdef extern from "pagecore/ops/cpu/ops.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass Selection:
        const char* data
        const char* counts
        int64_t width
        int64_t sequence_stride
        int64_t head_stride
        int64_t counts_sequence_stride
        int64_t counts_head_stride
        int64_t unit
        cbool by_block
        cbool wide
        cbool counts_wide

    void run_quantize "pagecore::cpu::quantize"(const Codec& codec, int64_t num_threads) except +raise_python_error
    void run_dequantize "pagecore::cpu::dequantize"(const Codec& codec, int64_t num_threads) except +raise_python_error

    cdef cppclass Tree:
        const uint64_t* bits
        int64_t words
        Indices positions

    cdef cppclass AttentionArgs:
        TokenArray query
        Cache key
        Cache value
        Table table
        Indices seq_lens
        Indices rows
        Indices cu_query_lens
        double scale
        double softcap
        cbool causal
        int64_t window_left
        int64_t window_right
        int64_t sink_tokens
        PerHead sinks
        PerHead alibi_slopes
        PerHead key_scale
        PerHead value_scale
        const uint8_t* mask
        int64_t mask_size
        Selection selection
        Tree tree
        SealedBlocks sealed
        TokenArray out
        Lse lse

    cdef cppclass PlanView:
        const PcWorkItem* items
        int64_t num_items
        int64_t num_partial_rows
        const int32_t* cu_query_lens
        const int32_t* seq_lens
        int64_t num_sequences
        int64_t num_query_heads
        int64_t num_kv_heads
        cbool causal
        int64_t window_left
        int64_t window_right
        int64_t sink_tokens
        cbool batch_invariant
        cbool tree

    cdef cppclass PackedSequences:
        Table table
        Indices seq_lens
        Indices rows
        int64_t block_size
        int64_t num_blocks
        int64_t num_tokens
        int64_t lowest

    void run_check_slots "pagecore::cpu::check_slots"(
        const Indices& slots, int64_t num_tokens, const Cache& cache) except +raise_python_error
    void run_check_attention "pagecore::cpu::check_attention"(const AttentionArgs& args) except +raise_python_error
    void run_check_copied "pagecore::cpu::check_copied"(
        const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets) except +raise_python_error
    void run_check_sequences "pagecore::cpu::check_sequences"(const PackedSequences& batch) except +raise_python_error
    void run_check_transferred "pagecore::cpu::check_transferred"(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t lowest) except +raise_python_error
    void run_check_independent "pagecore::cpu::check_independent"(
        const Indices& sources, const Indices& targets, bint one_cache) except +raise_python_error
    int64_t sum_lengths "pagecore::cpu::total_tokens"(
        const Indices& seq_lens, int64_t width, int64_t block_size) except +raise_python_error
    void run_gather "pagecore::cpu::gather_blocks"(
        const vector[BlockArray]& caches, const vector[BlockArray]& packed,
        const PackedSequences& batch, int64_t num_threads) except +raise_python_error
    void run_scatter "pagecore::cpu::scatter_blocks"(
        const vector[BlockArray]& packed, const vector[BlockArray]& caches,
        const PackedSequences& batch, int64_t num_threads) except +raise_python_error
    void run_transfer "pagecore::cpu::transfer_blocks"(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t num_threads, int64_t lowest) except +raise_python_error
    cdef cppclass PlannedMoves:
        pass

    PlannedMoves plan_transfer(
        const vector[BlockArray]& sources, const vector[BlockArray]& targets, const Indices& source_ids,
        const Indices& target_ids, int64_t num_threads, int64_t lowest) except +raise_python_error
    void run_attention "pagecore::cpu::attention"(
        const AttentionArgs& args, const PlanView* plan, int64_t num_threads) except +raise_python_error
    void run_write "pagecore::cpu::write_kv"(const WriteArgs& args, int64_t num_threads) except +raise_python_error
    void run_copy "pagecore::cpu::copy_blocks"(
        const vector[BlockArray]& arrays, const Indices& sources, const Indices& targets,
        int64_t num_threads) except +raise_python_error
    void run_merge "pagecore::cpu::merge"(const MergeArgs& args, int64_t num_threads) except +raise_python_error
    void run_merge_many "pagecore::cpu::merge_many"(
        const MergeManyArgs& args, int64_t num_threads) except +raise_python_error
    void run_check_parts "pagecore::cpu::check_parts"(
        const Indices& cu_parts, int64_t num_parts) except +raise_python_error

cdef extern from "pagecore/ops/cpu/host_calls.hpp" namespace "pagecore::cpu" nogil:
    cdef cppclass HostCalls:
        pass

    const HostCalls& native_calls "pagecore::cpu::host_calls"() noexcept

cdef extern from "pagecore/ops/cpu/dispatch.hpp" namespace "pagecore::cpu" nogil:
    const char* current_isa "pagecore::cpu::isa"() except +raise_python_error
