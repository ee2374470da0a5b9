"""Latent attention on CUDA: the parameter struct and the launches of a call."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uintptr_t
from libc.string cimport memset
from libcpp cimport bool as cbool

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport TokenArray, index_array, table_array, token_array
from pagecore.ops.arguments._arguments cimport Place
from pagecore.ops.cuda.attention._attention cimport (
    PcDivisor,
    PcLatentFormat,
    PcLatentParams,
    kMaxGeneralLatent,
    kMaxGeneralRow,
    pc_latent_tiles,
    select_latent_kernel,
)
from pagecore.ops.cuda.plan._plan cimport PC_DECODE, PC_NUM_SECTIONS, PC_PROMPTS
from pagecore.ops.cuda.plan.abi_attention cimport (
    PcAttentionParams,
    PcCache,
    PcFloat,
    PcLaunchShape,
    device_indices,
    device_table,
    device_tokens,
)
from pagecore.ops.cuda.schedule._schedule cimport Work, could_have_items, may_have_items, schedule
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.arrays.cuda.current import runtime
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops.cuda.compilation.kernels import kernel

cdef extern from "pagecore/ops/cuda/latent/latent_launch.hpp" namespace "pagecore::cuda" nogil:
    PcDivisor make_divisor(int64_t divisor)
    PcCache byte_plane(const void* data, int64_t block_stride, int64_t token_stride)
    cbool begins_at_vectors(const TokenArray& rows)
    cbool begins_at_vectors(const PcCache& plane)


cdef int attend_latent(
        Tensor query, Tensor query_rope, const LatentRows& cache, const LatentOptions& options, Tensor table,
        Tensor lens, Tensor rows, Tensor cu_query_lens, AttentionPlan plan, Tensor sinks, Tensor out, Tensor lse,
        object example, const Place* place) except -1:
    cdef PcLatentParams params
    cdef PcAttentionParams* p = &params.attention
    cdef Work work
    if query.shape_[0] == 0:
        return 0
    check_sizes(query, cache, lens)
    memset(&params, 0, sizeof(params))
    p.query, p.out = device_tokens(token_array(query)), device_tokens(token_array(out))
    params.query_rope = device_tokens(token_array(query_rope))
    fill_cache(&params, cache, options.sparse)
    p.table, p.rows = device_table(table_array(table)), device_indices(index_array(rows))
    p.num_tokens, p.num_sequences = <int32_t>query.shape_[0], <int32_t>lens.shape_[0]
    p.num_query_heads, p.num_kv_heads = <int32_t>query.shape_[1], 1
    p.query_type = p.out_type = <PcFloat>query.dtype_code
    p.out_factor = 1.0
    p.causal = options.causal
    p.window_left, p.window_right = <int32_t>options.window_left, <int32_t>options.window_right
    p.scale = <float>options.scale
    params.value_factor = <float>options.value_factor
    p.sinks = 0 if sinks is None else <uintptr_t>sinks.data
    if lse is not None:
        p.lse = <uintptr_t>lse.data
        p.lse_token_stride, p.lse_head_stride = lse.strides_[0] // 4, lse.strides_[1] // 4
    # `_kept` owns the memory that the call allocates; the allocator reuses it in the order of the stream.
    memset(&work, 0, sizeof(work))
    _kept = schedule(p, &work, lens, cu_query_lens, plan, None, False, example, place)
    cdef bint in_vectors = begins_at_vectors(token_array(query)) and begins_at_vectors(token_array(query_rope)) and (
        begins_at_vectors(token_array(out)) and begins_at_vectors(p.key) and begins_at_vectors(p.value))
    return launch_all(params, work, place, in_vectors)


cdef int check_sizes(Tensor query, const LatentRows& cache, Tensor lens) except -1:
    cdef int64_t latent = (cache.latent_dim + 3) // 4 * 4, rope = (cache.rope_dim + 3) // 4 * 4
    if latent > kMaxGeneralLatent or latent + rope > kMaxGeneralRow:
        raise UnsupportedOption(
            f"a row has {cache.latent_dim} latent and {cache.rope_dim} rope numbers; on CUDA a latent has at most "
            f"{kMaxGeneralLatent} and a row {kMaxGeneralRow}: copy the arrays to the host")
    if max(query.shape_[0], lens.shape_[0], cache.block_size) >= INT32_MAX:
        raise ShapeError(
            f"query_latent has shape {query.shape}, seq_lens {lens.shape}, and latent_cache blocks of "
            f"{cache.block_size} tokens; on CUDA each count is below 2^31: split the batch")
    return 0


cdef void fill_cache(PcLatentParams* params, const LatentRows& cache, bint sparse) noexcept:
    cdef PcAttentionParams* p = &params.attention
    cdef int shift = 0
    p.key = byte_plane(cache.latent, cache.block_stride, cache.token_stride)
    p.value = byte_plane(cache.rope, cache.rope_block_stride, cache.rope_token_stride)
    p.key_type = p.value_type = <PcFloat>cache.type
    p.value_dim, p.head_dim = <int32_t>cache.latent_dim, <int32_t>(cache.latent_dim + cache.rope_dim)
    params.rope_dim = <int32_t>cache.rope_dim
    params.format = <PcLatentFormat>cache.format
    params.block = make_divisor(cache.block_size)
    params.sparse = sparse
    # A list has slots, which are blocks of one token.
    cdef int64_t block_size = 1 if sparse else cache.block_size
    cdef int64_t num_blocks = cache.num_blocks * (cache.block_size if sparse else 1)
    p.num_blocks, p.block_size = <int32_t>min(num_blocks, INT32_MAX), <int32_t>block_size
    while (<int64_t>1 << shift) < block_size:
        shift += 1
    p.block_shift = shift if <int64_t>1 << shift == block_size else -1


# ---- launches

cdef int launch_all(PcLatentParams& params, const Work& work, const Place* place, bint in_vectors) except -1:
    """Launch decode and prompts, each if it may have items, and at least one of them for rows of padding.

    All kernels are loaded before the first one writes. Those that a later capture with the same plan may launch are
    loaded too, because CUDA cannot load during a capture.
    """
    cdef PcAttentionParams* p = &params.attention
    cdef PcLaunchShape shapes[PC_NUM_SECTIONS]
    cdef list ready = []
    cdef int section, num_rows
    for section in range(PC_NUM_SECTIONS):
        launches = may_have_items(p[0], work, section) or (section == PC_PROMPTS and ready[PC_DECODE] is None)
        loaded = None
        if launches or (work.has_plan and could_have_items(p[0], work, section)):
            name = select_latent_kernel(params, section == PC_DECODE, in_vectors, &shapes[section])
            loaded = kernel(name, place.device_id, place.stream)
        ready.append(loaded if launches else None)
    for section in range(PC_NUM_SECTIONS):
        if ready[section] is None:
            continue
        p.schedule.first_item = work.buffer + work.layout.sections[section].first_item
        num_rows = p.num_query_heads
        if p.cu_query_lens.data != 0:
            num_rows *= work.layout.sections[section].query_tile
        grid = (pc_latent_tiles(num_rows, shapes[section].max_rows), work.layout.sections[section].num_workers, 1)
        runtime().launch(
            ready[section], grid, shapes[section].threads, shapes[section].shared_bytes, place.stream,
            <uintptr_t>&params)
    return 0
