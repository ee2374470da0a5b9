"""Checks of the arguments of attention, with the remedies for a query or a plan that does not fit."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    Selected,
    StoredCache,
    TreeMask,
    any_tensor,
    are_on_host,
    check_last_axis,
    check_length,
    check_place,
    check_rank,
    check_result,
    is_plain,
    new_result,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_apart_or_same
from pagecore.ops.cpu.args cimport Selection
from pagecore.ops.cpu.calls._calls cimport check_attended
from pagecore.ops.planning._plan cimport AttentionPlan

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption


cdef int refuse_dim(Tensor query, StoredCache keys) except -1:
    if is_plain(keys):
        check_length(keys.codes, "key_cache", 3, query.shape_[2], "the head_dim of query")
    raise ShapeError(
        f"query has shape {query.shape} and so a head_dim of {query.shape_[2]}; key_cache has shape "
        f"{keys.codes.shape} and holds {keys.dim} numbers in a row: the head dims must be equal"
    )


cdef str layout_hint(bint is_transposed):
    """Return a remedy for a query that would fit with its first two axes exchanged."""
    if not is_transposed:
        return ""
    return "; query is [num_tokens, num_query_heads, head_dim]: pass query.transpose(1, 0, 2) if its heads come first"


cdef str cache_hint(bint is_transposed):
    """Return a remedy for a cache whose heads would fit with its second and third axes exchanged."""
    if not is_transposed:
        return ""
    return (
        "; key_cache is [num_blocks, block_size, num_kv_heads, head_dim]: pass key_cache.swapaxes(1, 2), and the same "
        "of value_cache, if the heads of a block come before its tokens"
    )


cdef int check_without_sinks(int64_t num_sinks, TreeMask tree, Selected selected) except -1:
    if tree is not None:
        raise UnsupportedOption(
            f"sink_tokens is {num_sinks} and tree_mask is given; attend with mask, which lists every key, and leave "
            "sink_tokens out"
        )
    if selected is not None:
        raise UnsupportedOption(
            f"sink_tokens is {num_sinks} and {selected.name} is given, which lists all keys that are read; list the "
            "first keys there, and leave sink_tokens out"
        )
    return 0


cdef int check_plan_heads(object plan, Tensor query, int64_t num_kv_heads) except -1:
    """Check the heads of a plan. A cache may have made the plan, so messages name the query, which the caller gave."""
    if not isinstance(plan, AttentionPlan):
        raise UnsupportedOption(f"plan is a {type(plan).__name__}; it must be a plan from plan_attention, or None")
    cdef int64_t planned = (<AttentionPlan>plan).plan.options.num_query_heads
    cdef int64_t planned_kv = (<AttentionPlan>plan).plan.options.num_kv_heads
    if planned == query.shape_[1] and planned_kv == num_kv_heads:
        return 0
    if planned_kv != num_kv_heads:
        raise ShapeError(
            f"the caches have {num_kv_heads} heads and the batch is planned for {planned_kv}; make a plan for "
            f"num_query_heads={query.shape_[1]} and num_kv_heads={num_kv_heads}"
        )
    raise ShapeError(
        f"query has shape {query.shape} and so {query.shape_[1]} heads; the batch is planned for {planned} query heads "
        f"(num_query_heads of plan_attention, or of the layer's spec){layout_hint(query.shape_[0] == planned)}"
    )


cdef int check_given_batch(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor table, Tensor lens, Tensor rows, Tensor cu,
        bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens, Tensor mask, TreeMask tree,
        Selected selected, Sealed sealed) except -1:
    cdef Selection selection
    if not are_on_host((table, lens, rows, cu, mask)) or sealed is not None and not sealed.is_on_host():
        return 0
    if selected is not None:
        if not selected.is_on_host():
            return 0
        selected.fill(&selection)
    # Without its bits a tree reads the blocks of a chain.
    cdef TreeMask here = tree if tree is not None and tree.is_on_host() else None
    return check_attended(
        query, key_cache, value_cache, table, lens, rows, cu, causal, window_left, window_right, sink_tokens, mask,
        here, sealed, selection)


cdef int check_out(
        Tensor out, Tensor query, StoredCache keys, StoredCache values, Tensor table, Tensor lens, Tensor rows,
        Tensor cu, Tensor sinks, Tensor slopes, Tensor mask, Tensor key_scale, Tensor value_scale) except -1:
    """Check overlaps. `out` may be `query` itself: the work that writes a row has read it before."""
    check_apart_or_same(out, "out", query, "query")
    check_apart(out, "out", keys.codes, "key_cache")
    check_apart(out, "out", values.codes, "value_cache")
    check_apart(out, "out", keys.plane, "key_scale")
    check_apart(out, "out", values.plane, "value_scale")
    check_apart(out, "out", table, "block_table")
    check_apart(out, "out", lens, "seq_lens")
    check_apart(out, "out", rows, "rows")
    check_apart(out, "out", cu, "cu_query_lens")
    check_apart(out, "out", sinks, "sinks")
    check_apart(out, "out", slopes, "alibi_slopes")
    check_apart(out, "out", mask, "mask")
    check_apart(out, "out", key_scale, "key_scale")
    return check_apart(out, "out", value_scale, "value_scale")


cdef Tensor planned_tensor(object plan, int64_t num_sequences, const Place* place):
    """Return a plan in an array, from the torch operator. On the host the array is empty, and each call plans."""
    if not speaks_dlpack(plan):
        raise UnsupportedOption(f"plan is a {type(plan).__name__}; it must be a plan from plan_attention, or None")
    cdef Tensor tensor = any_tensor(plan, "plan")
    check_place(tensor, "plan", place)
    if tensor.dtype_code != UINT8:
        raise UnsupportedDtype(f"plan is {tensor.dtype}; a plan in an array is uint8, as returned by plan_attention")
    check_rank(tensor, "plan", 2, "[num_sequences + 1, bytes]")
    check_length(tensor, "plan", 0, num_sequences + 1, "one more than seq_lens; plan this batch")
    if place.device_type == CPU:
        check_length(tensor, "plan", 1, 0, "the host plans each call")
    return tensor


cdef bint speaks_dlpack(object obj) noexcept:
    try:
        return hasattr(obj, "__dlpack__")
    except Exception:  # attributes of foreign objects may raise anything
        return False


cdef Tensor float_result(
        Tensor out, str name, const int64_t* shape, int dtype_code, object example, const Place* place):
    """Return the array of the caller if it fits, or a new array if `out` is None."""
    if out is None:
        return new_result(3, shape, dtype_code, example, place)
    check_place(out, name, place)
    check_result(out, name, 3, shape, dtype_code)
    check_last_axis(out, name)
    return out
