"""The debug mode: index arrays in device memory are checked before a call uses them.

A kernel looks for invalid entries first, by rules that are stricter than those of the call. If it finds one, the arrays
are copied to the host, and the checks of the host kernels decide and raise.
"""

from libc.stdint cimport INT64_MIN, int64_t

from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, Sealed, check_length, to_device, to_host
from pagecore.ops.cpu.args cimport Selection
from pagecore.ops.cpu.calls._calls cimport (
    check_attended,
    check_copied,
    check_independent,
    check_parts,
    check_scored,
    check_sequences,
    check_slots,
    check_transferred,
    total_tokens,
)
from pagecore.ops.cuda._index_checks cimport (
    check_not_captured,
    has_invalid_batch,
    has_invalid_ids,
    has_invalid_pairs,
)

import os

from pagecore.errors import UnsupportedOption, shown

cdef enum:
    ANY = -1

cdef int state = -1  # -1: PAGECORE_DEBUG has not been read yet


cdef bint debugging() except -1:
    global state
    if state < 0:
        state = read_environment()
    return state


cdef bint read_environment() except -1:
    cdef str value = os.environ.get("PAGECORE_DEBUG", "")
    if value not in ("", "0", "1"):
        raise UnsupportedOption(f"PAGECORE_DEBUG is {value!r}; it must be 1, or 0 or unset for no checks")
    return value == "1"


def debug(on=None):
    """Turn checks of index arrays in CUDA memory on or off, and return the new state.

    With debug off, slots, block ids, lengths, rows and pairs in device memory are not checked: kernels skip invalid
    entries or read them as holes, and results are wrong without an error. With debug on, each call first launches a
    check, waits for it, and raises the errors that a call on the host raises. Index arrays on the host are always
    checked.

    Parameters
    ----------
    on : bool or None
        None reads the environment variable PAGECORE_DEBUG: 1 for checks; 0, empty or unset for none.

    Returns
    -------
    bool

    Raises
    ------
    UnsupportedOption
        `on` is not True, False or None, or PAGECORE_DEBUG is read and invalid. Nothing has changed.

    Notes
    -----
    A call that is captured in a CUDA graph cannot wait, so it raises UnsupportedOption while debug is on.
    """
    global state
    if on is not None and not isinstance(on, bool):
        raise UnsupportedOption(f"debug is {shown(on)}; it must be True, False or None, which reads PAGECORE_DEBUG")
    state = read_environment() if on is None else on
    return bool(state)


cdef int64_t fewest_blocks(list caches):
    return min([(<Tensor>cache).shape_[0] for cache in caches], default=0)


cdef int debug_slots(Tensor slot_mapping, Tensor key, Tensor key_cache, const Place* place) except -1:
    if has_invalid_ids(slot_mapping, INT64_MIN, key_cache.shape_[0] * key_cache.shape_[1], place):
        check_slots(to_host(slot_mapping, place), key, key_cache)
    return 0


cdef int debug_copied(list caches, Tensor pairs, bint independent, const Place* place) except -1:
    check_not_captured(place)
    if independent:
        check_independent(to_host(pairs, place), True)
    if has_invalid_pairs(pairs, 0, fewest_blocks(caches), fewest_blocks(caches), place):
        check_copied(caches, to_host(pairs, place))
    return 0


cdef int debug_transferred(
        list sources, list targets, Tensor pairs, bint independent, int64_t lowest, const Place* place) except -1:
    check_not_captured(place)
    if independent:
        check_independent(to_host(pairs, place), False)
    if has_invalid_pairs(pairs, lowest, fewest_blocks(sources), fewest_blocks(targets), place):
        check_transferred(sources, targets, to_host(pairs, place), lowest)
    return 0


cdef int debug_sequences(
        list caches, Tensor packed, str name, Tensor block_table, Tensor seq_lens, Tensor rows,
        const Place* place) except -1:
    cdef int64_t block_size = (<Tensor>caches[0]).shape_[1], num_tokens = packed.shape_[0]
    cdef int64_t num_blocks = fewest_blocks(caches)
    if has_invalid_batch(block_table, seq_lens, rows, None, num_tokens, 0, num_blocks, block_size, place):
        lens = to_host(seq_lens, place)
        num_tokens = total_tokens(lens, block_table.shape_[1], block_size)
        check_length(packed, name, 0, num_tokens, "the sum of seq_lens")
        check_sequences(caches, num_tokens, to_host(block_table, place), lens, to_host(rows, place))
    return 0


cdef int debug_attention(
        Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor rows,
        Tensor cu_query_lens, bint causal, int64_t window_left, int64_t window_right, int64_t sink_tokens,
        Tensor mask, TreeMask tree, Selected selected, Sealed sealed, const Place* place) except -1:
    cdef Selection selection
    cdef Selected lists
    check_not_captured(place)
    # Lengths that the caller gave on the host are still there, because the host plans them.
    cdef Tensor lens = to_device(seq_lens, "seq_lens", place)
    cdef Tensor cu = None if cu_query_lens is None else to_device(cu_query_lens, "cu_query_lens", place)
    cdef bint invalid = has_invalid_batch(
        block_table, lens, rows, cu, ANY, query.shape_[0], key_cache.shape_[0], key_cache.shape_[1], place)
    # The length of a mask depends on all lengths together, which the kernel does not sum. It reads neither trees nor
    # selections, nor the table of sealed blocks.
    if selected is not None:
        lists = selected.on_host(place)
        lists.fill(&selection)
    if invalid or mask is not None or tree is not None or selected is not None or sealed is not None:
        check_attended(
            query, key_cache, value_cache, to_host(block_table, place), to_host(seq_lens, place),
            to_host(rows, place), to_host(cu_query_lens, place), causal, window_left, window_right,
            sink_tokens, to_host(mask, place), None if tree is None else tree.on_host(place),
            None if sealed is None else sealed.on_host(place), selection)
    return 0


cdef int debug_parts(Tensor cu_parts, int64_t num_parts, const Place* place) except -1:
    check_not_captured(place)
    return check_parts(to_host(cu_parts, place), num_parts)


cdef int debug_scores(
        Tensor query, Tensor block_table, Tensor seq_lens, Tensor rows, Tensor cu_query_lens, int64_t num_blocks,
        int64_t block_size, const Place* place) except -1:
    check_not_captured(place)
    if has_invalid_batch(
            block_table, seq_lens, rows, cu_query_lens, ANY, query.shape_[0], num_blocks, block_size, place):
        check_scored(
            query, to_host(block_table, place), to_host(seq_lens, place), to_host(rows, place),
            to_host(cu_query_lens, place), num_blocks, block_size)
    return 0
