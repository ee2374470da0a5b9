"""Paged attention on CUDA: the parameter struct and the launches of a call."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport INT64
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.args cimport Cache, index_array, table_array, token_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    Sealed,
    Selected,
    StoredCache,
    TreeMask,
    is_plain,
    native_cache,
    scale_stride,
)
from pagecore.ops.cuda.plan._plan cimport PC_DECODE, PC_NUM_SECTIONS, PC_PROMPTS
from pagecore.ops.cuda.plan.abi_attention cimport (
    PC_PLAIN,
    PcAttentionParams,
    PcFloat,
    PcLaunchShape,
    PcStoredAttentionParams,
    device_cache,
    device_indices,
    device_stored,
    device_table,
    device_tokens,
    kMaxGeneralDim,
)
from pagecore.ops.cuda.schedule._schedule cimport Work, could_have_items, may_have_items, place_mask, schedule
from pagecore.ops.planning._plan cimport AttentionPlan
from pagecore.ops.sealed_plane cimport SealedBlocks

from pagecore.arrays.cuda.current import runtime
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.ops.cuda.compilation.kernels import kernel

cdef extern from "cuda_src/abi/sealed.h" nogil:
    cdef struct PcSealedPlane:
        int32_t bits

    cdef struct PcSealedAttentionParams:
        PcAttentionParams attention
        PcSealedPlane key

cdef extern from "pagecore/ops/cuda/attention/sealed_args.hpp" namespace "pagecore::cuda" nogil:
    void set_sealed(PcSealedAttentionParams& params, const SealedBlocks& blocks)
    bint serves_sealed(const PcSealedAttentionParams& params, bint prompts)


cdef int attention(
        Tensor query, StoredCache keys, StoredCache values, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, AttentionPlan plan, Tensor planned, double scale, bint causal, int64_t window_left,
        int64_t window_right, int64_t sink_tokens, double softcap, Tensor sinks, Tensor alibi_slopes, Tensor mask,
        TreeMask tree, Tensor key_scale, Tensor value_scale, Tensor query_scale, double out_factor, Tensor out_scale,
        Selected selected, Sealed sealed, Tensor out, Tensor lse, bint checks_plan, object example,
        const Place* place) except -1:
    cdef PcAttentionParams p
    cdef PcStoredAttentionParams stored
    cdef PcSealedAttentionParams older  # absent: its codes have 0 bits
    cdef Work work
    if query.shape_[0] == 0:
        return 0
    memset(&p, 0, sizeof(p))
    memset(&older, 0, sizeof(older))
    if sealed is not None:
        set_sealed(older, sealed.blocks)
    p.query, p.out = device_tokens(token_array(query)), device_tokens(token_array(out))
    fill_caches(&p, &stored, native_cache(keys), native_cache(values), is_plain(keys) and is_plain(values))
    p.table = device_table(table_array(block_table))
    p.rows = device_indices(index_array(rows))
    fill_shape(&p, query, keys, values, seq_lens)
    p.causal, p.window_left, p.window_right = causal, <int32_t>window_left, <int32_t>window_right
    p.scale, p.softcap, p.sink_tokens = <float>scale, <float>softcap, <int32_t>sink_tokens
    p.sinks, p.alibi_slopes = address_of(sinks), address_of(alibi_slopes)
    p.key_scale, p.value_scale = address_of(key_scale), address_of(value_scale)
    p.key_scale_stride, p.value_scale_stride = scale_stride(key_scale), scale_stride(value_scale)
    p.query_scale, p.query_scale_stride = address_of(query_scale), scale_stride(query_scale)
    p.out_type, p.out_factor, p.out_scale = <PcFloat>out.dtype_code, <float>out_factor, address_of(out_scale)
    if mask is not None:
        p.mask, p.mask_size = address_of(mask), mask.shape_[0]
    if tree is not None:
        fill_tree(&p, tree)
    if lse is not None:
        p.lse = address_of(lse)
        p.lse_token_stride, p.lse_head_stride = lse.strides_[0] // 4, lse.strides_[1] // 4

    memset(&work, 0, sizeof(work))
    if selected is not None:
        # Items count selected keys, so a plan of positions does not serve; its options do.
        fill_selection(&p, selected)
        work.batch_invariant = plan is not None and plan.plan.options.batch_invariant
        plan = None
        planned = None
    # `kept` owns the memory that the call allocates; the allocator reuses it in the order of the stream.
    kept = schedule(&p, &work, seq_lens, cu_query_lens, plan, planned, checks_plan, example, place)
    if selected is not None and mask is not None:
        kept.append(place_mask(&p, example, place))
    cdef bint plain_scales = (row_bits(keys.plane) | row_bits(values.plane)) % 4 == 0
    return launch_all(p, stored, older, work, place, is_plain_memory(query, keys, values, out), plain_scales)


# ---- parameters

cdef uint64_t address_of(Tensor tensor) noexcept:
    return 0 if tensor is None else <uintptr_t>tensor.data


cdef int fill_shape(PcAttentionParams* p, Tensor query, StoredCache keys, StoredCache values, Tensor lens) except -1:
    cdef Tensor key_cache = keys.codes
    cdef int64_t block_size = key_cache.shape_[1]
    cdef int64_t dim = max(query.shape_[2], values.dim)
    cdef int shift = 0
    if dim > kMaxGeneralDim:
        raise UnsupportedOption(
            f"head_dim is {dim}; on CUDA it is at most {kMaxGeneralDim}, for keys and for values: read rows of latents "
            "by latent_attention, which serves more"
        )
    if max(query.shape_[0], lens.shape_[0], block_size) >= INT32_MAX:
        raise ShapeError(
            f"query has shape {query.shape} and key_cache {key_cache.shape}; on CUDA counts are below 2^31: split the "
            "batch")
    p.num_tokens, p.num_sequences = <int32_t>query.shape_[0], <int32_t>lens.shape_[0]
    p.num_query_heads, p.num_kv_heads = <int32_t>query.shape_[1], <int32_t>key_cache.shape_[2]
    p.head_dim, p.value_dim = <int32_t>query.shape_[2], <int32_t>values.dim
    p.num_blocks = <int32_t>min(key_cache.shape_[0], INT32_MAX)
    p.block_size = <int32_t>block_size
    while (1 << shift) < block_size:
        shift += 1
    p.block_shift = shift if (1 << shift) == block_size else -1
    p.query_type = <PcFloat>query.dtype_code
    return 0


cdef int fill_tree(PcAttentionParams* p, TreeMask tree) except -1:
    if p.alibi_slopes != 0:
        raise UnsupportedOption(
            "tree_mask and alibi_slopes are both given, which only the host serves; use one of them on CUDA"
        )
    if tree.words >= INT32_MAX // 64:
        raise ShapeError(f"tree_mask has {tree.words} words for each token; use fewer than {INT32_MAX // 64}")
    p.mask, p.mask_size = address_of(tree.bits), 64 * tree.words * tree.bits.shape_[0]
    p.tree.positions = device_indices(index_array(tree.positions))
    p.tree.words = <int32_t>tree.words
    return 0


cdef int fill_caches(
        PcAttentionParams* p, PcStoredAttentionParams* stored, const Cache& keys, const Cache& values,
        bint plain) except -1:
    """Fill the caches of `p` if both are without a format, else those of `stored`."""
    memset(stored, 0, sizeof(stored[0]))
    if plain:
        p.key, p.value = device_cache(keys), device_cache(values)
        p.key_type, p.value_type = <PcFloat><int>keys.type, <PcFloat><int>values.type
        return 0
    stored.key, stored.value = device_stored(keys), device_stored(values)
    return 0


cdef int fill_selection(PcAttentionParams* p, Selected selected) except -1:
    cdef Tensor entries = selected.entries, counts = selected.counts
    cdef int64_t size = entries.itemsize, unit = selected.unit
    cdef int shift = 0
    if entries.shape_[2] >= INT32_MAX:
        raise ShapeError(
            f"{selected.name} has shape {entries.shape}; on CUDA the last axis is below 2^31: list fewer entries")
    p.selection.entries = address_of(entries)
    p.selection.sequence_stride, p.selection.head_stride = entries.strides_[0] // size, entries.strides_[1] // size
    p.selection.width, p.selection.unit = <int32_t>entries.shape_[2], <int32_t>unit
    while (1 << shift) < unit:
        shift += 1
    p.selection.unit_shift = shift if (1 << shift) == unit else -1
    p.selection.wide = entries.dtype_code == INT64
    if counts is not None:
        p.selection.counts = address_of(counts)
        p.selection.counts_sequence_stride = counts.strides_[0] // counts.itemsize
        p.selection.counts_head_stride = counts.strides_[1] // counts.itemsize
        p.selection.counts_wide = counts.dtype_code == INT64
    return 0


# ---- launches

cdef bint is_plain_memory(Tensor query, StoredCache keys, StoredCache values, Tensor out) noexcept:
    """Return True if every row of elements or codes begins at a multiple of 16 bytes, of a float8 output of 4."""
    cdef int64_t unit = 16 if out.itemsize > 1 else 4
    return (row_bits(query) | row_bits(keys.codes) | row_bits(values.codes)) % 16 == 0 and row_bits(out) % unit == 0


cdef int64_t row_bits(Tensor tensor) noexcept:
    """Return the address and strides of all axes but the last, or-ed; 0 for None."""
    if tensor is None:
        return 0
    cdef int64_t bits = <int64_t>address_of(tensor)
    cdef int i
    for i in range(tensor.ndim - 1):
        bits |= tensor.strides_[i]
    return bits


cdef int launch_all(
        PcAttentionParams& p, PcStoredAttentionParams& stored, PcSealedAttentionParams& older, const Work& work,
        const Place* place, bint plain_memory, bint plain_scales) except -1:
    """Launch decode and prefill, each if it may have items, and at least one of them for rows of padding.

    All kernels are loaded before the first one writes, because a load may fail. Kernels that a later capture with the
    same plan may launch are loaded too, because CUDA cannot load during a capture.
    """
    cdef KernelQuery query
    query.head_dim, query.value_dim = p.head_dim, p.value_dim
    query.query_type, query.key_type, query.value_type = p.query_type, p.key_type, p.value_type
    query.key_format, query.value_format = stored.key.format, stored.value.format
    query.aligned, query.aligned_scales = plain_memory, plain_scales
    query.codes_out = p.out_type != p.query_type
    query.full = p.softcap != 0.0 or p.alibi_slopes != 0 or p.mask != 0
    query.selected, query.sealed, query.sealed_matrix = p.selection.entries != 0, older.key.bits != 0, False
    if query.sealed:
        older.attention = p
    cdef PcLaunchShape shapes[PC_NUM_SECTIONS]
    cdef list ready = []
    cdef int section
    for section in range(PC_NUM_SECTIONS):
        launches = may_have_items(p, work, section) or (section == PC_PROMPTS and ready[PC_DECODE] is None)
        loaded = None
        if launches or (work.has_plan and could_have_items(p, work, section)):
            if query.sealed:
                query.sealed_matrix = serves_sealed(older, section == PC_PROMPTS)
            name = select_kernel(query, section == PC_DECODE, &shapes[section])
            loaded = kernel(name, place.device_id, place.stream)
        ready.append(loaded if launches else None)
    for section in range(PC_NUM_SECTIONS):
        if ready[section] is not None:
            launch_section(p, stored, older, work, place, section, ready[section], shapes[section])
    return 0


cdef int launch_section(
        PcAttentionParams& p, PcStoredAttentionParams& stored, PcSealedAttentionParams& older, const Work& work,
        const Place* place, int section, object loaded, const PcLaunchShape& shape) except -1:
    p.schedule.first_item = work.buffer + work.layout.sections[section].first_item
    grid = (work.layout.sections[section].num_workers, p.num_kv_heads, work.layout.head_chunks)
    cdef uintptr_t params = <uintptr_t>&p
    if stored.key.format != PC_PLAIN or stored.value.format != PC_PLAIN:
        stored.attention = p
        params = <uintptr_t>&stored
    elif older.key.bits != 0:
        older.attention = p
        params = <uintptr_t>&older
    runtime().launch(loaded, grid, shape.threads, shape.shared_bytes, place.stream, params)
    return 0
