"""The best positions of index scores, and the slots of positions."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memset

from pagecore.arrays.dtypes.codes cimport CPU, INT32, INT64
from pagecore.arrays.tensors._tensor cimport Tensor, contiguous
from pagecore.ops.args cimport Indices, index_array, table_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_length,
    check_place,
    check_result,
    find_place,
    finished,
    float32_array,
    float_tensor,
    given_indices,
    new_result,
    note_written,
    read_size,
    to_device,
    to_host,
    viewed,
)
from pagecore.ops.arguments._overlap cimport check_apart
from pagecore.ops.cpu._cpu cimport select_topk as run_select, slots_of as run_slots
from pagecore.ops.cpu.latent.latent cimport SlotsArgs, TopkArgs
from pagecore.ops.cuda._index_checks cimport check_not_captured
from pagecore.ops.cuda.latent._latent cimport find_slots
from pagecore.ops.cuda.sparse._sparse cimport Selecting, select as launch_select
from pagecore.ops.index_checks._index_checks cimport debugging

import numpy as np

from pagecore.errors import ShapeError


def select_topk(scores, k, lens=None, *, stream=None):
    """Select the positions of the k greatest scores of each row, best first; equal scores by ascending position.

    Parameters
    ----------
    scores : array, [T, n]
        float32, on the host or CUDA.
    k : int
        On CUDA at most 4096.
    lens : integers, [T], optional
        Number of leading scores of each row that count; n by default. In CUDA memory they are clamped to 0 .. n.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `scores`.

    Returns
    -------
    array, [T, k]
        int32 positions; -1 where a row has fewer than k scores above -inf. NaN is never selected. A new array in the
        framework of `scores`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Invalid arrays or lengths.
    """
    cdef Place place
    cdef Tensor given = float_tensor(float32_array(scores, "scores", "index_scores"), "scores", 2, 2, "[num_tokens, n]")
    find_place(&place, given, "scores", scores, stream)
    if given.shape_[1] > INT32_MAX:
        raise ShapeError(f"scores has shape {given.shape}; positions must fit int32")
    cdef Tensor counts = None
    if lens is not None:
        counts = given_indices(lens, "lens", 1, "[num_tokens]", &place)
        check_length(counts, "lens", 0, given.shape_[0], "one for each row of scores")
    cdef int64_t shape[2]
    shape[0], shape[1] = given.shape_[0], read_size(k, "k", 1)
    cdef Tensor result = new_result(2, shape, INT32, scores, &place)
    cdef TopkArgs args
    args.scores, args.score_stride = <const float*>given.data, given.strides_[0] // 4
    args.num_rows, args.width, args.k = shape[0], given.shape_[1], shape[1]
    args.lens = index_array(counts)
    args.out = <int32_t*>result.data
    if place.device_type == CPU:
        run_select(args)
    else:
        await_arrays((scores, lens), &place)
        topk_on_device(args, counts, &place)
        note_written(result, &place)
    return finished(result, scores, &place)


cdef int topk_on_device(const TopkArgs& args, Tensor lens, const Place* place) except -1:
    """Launch a selection of the best; lengths that are on the host are checked."""
    cdef Selecting call
    cdef Indices lengths
    cdef int64_t i
    if lens is not None:
        lengths = index_array(lens)
        if lens.device_type == CPU:
            for i in range(lens.shape_[0]):
                if not 0 <= lengths.at(i) <= args.width:
                    raise ShapeError(f"lens[{i}] is {lengths.at(i)}; expected 0 to {args.width}, the scores of a row")
            lens = to_device(lens, "lens", place)
            lengths = index_array(lens)
    memset(&call, 0, sizeof(call))
    call.scores, call.score_stride = <const char*>args.scores, args.score_stride
    call.num_rows, call.width, call.length, call.rows_per_length = args.num_rows, args.width, args.width, 1
    call.budget = call.capacity = args.k
    call.positions, call.ranked = <char*>args.out, True
    return launch_select(call, lengths, place)


def slots_of(positions, block_table, block_size, *, rows=None, cu_query_lens=None, out=None, stream=None):
    """Return the slots of positions of sequences: ``block_table[row, p // block_size] * block_size + p % block_size``.

    Positions are on the host or on CUDA; for CUDA positions, lists and host arrays of integers are copied to the
    device. A call on CUDA with `out` and device integers is one launch; it neither allocates nor waits.

    Parameters
    ----------
    positions : integers, [T, n]
        A negative position has slot -1.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
    block_size : int
    rows, cu_query_lens
        As for `paged_attention`: by default each sequence has one row of positions.
    out : array, [T, n], optional
        int32, C-contiguous; it is returned. It must not share memory with another argument.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `positions`.

    Returns
    -------
    array, [T, n]
        int32, for `indices` of `latent_attention`: a new array in the framework of `positions`, or `out`.

    Raises
    ------
    ShapeError
        A position is past its row of the table, or the shapes do not match.
    InvalidBlock, InvalidSequence
        A block is negative or its slots do not fit int32, or a row is outside the table. Integers of a call on CUDA are
        checked under `debug` only; otherwise invalid positions, blocks and rows have slot -1.
    UnsupportedDtype, UnsupportedOption, DeviceError, NotEnoughMemory
        Arrays are not supported.
    """
    cdef int64_t tokens = read_size(block_size, "block_size", 1)
    cdef Place place
    cdef Tensor first = viewed(positions, "positions")
    if first is not None and first.device_type != CPU:
        find_place(&place, first, "positions", positions, stream)
        return device_slots(positions, block_table, tokens, rows, cu_query_lens, out, &place)
    find_place(&place, Tensor.__new__(Tensor), "positions", None, stream)
    cdef PositionLists lists = position_lists(positions, block_table, rows, cu_query_lens, NULL)
    if lists.positions.dtype_code == INT64:
        values = lists.positions.numpy()
        if values.size and values.max() > INT32_MAX:
            raise ShapeError(f"positions holds {values.max()}; positions must fit int32")
    narrow = np.ascontiguousarray(np.maximum(lists.positions.numpy(), -1), np.int32)
    cdef Tensor numbers = any_tensor(narrow, "positions")
    cdef Tensor result = slot_array(out, lists, positions, &place)
    cdef SlotsArgs args
    args.positions, args.out = <const int32_t*>numbers.data, <int32_t*>result.data
    args.num_tokens, args.width = numbers.shape_[0], numbers.shape_[1]
    args.table, args.rows, args.cu_query_lens = (
        table_array(lists.table), index_array(lists.rows), index_array(lists.cu))
    args.num_sequences, args.block_size = lists.num_sequences, tokens
    run_slots(args)
    return finished(result, positions, &place) if out is None else out


cdef class PositionLists:
    """The index arguments of slots_of, on the host or on the device of the call. Optional: rows, cu."""

    cdef Tensor positions
    cdef Tensor table
    cdef Tensor rows
    cdef Tensor cu
    cdef int64_t num_sequences


cdef PositionLists position_lists(
        object positions, object block_table, object rows, object cu_query_lens, const Place* place):
    cdef PositionLists lists = PositionLists.__new__(PositionLists)
    lists.positions = given_indices(positions, "positions", 2, "[num_tokens, n]", place)
    lists.table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", place)
    lists.num_sequences = lists.table.shape_[0]
    if rows is not None:
        lists.rows = given_indices(rows, "rows", 1, "[num_sequences]", place)
        lists.num_sequences = lists.rows.shape_[0]
    if cu_query_lens is not None:
        lists.cu = given_indices(cu_query_lens, "cu_query_lens", 1, "[num_sequences + 1]", place)
        check_length(lists.cu, "cu_query_lens", 0, lists.num_sequences + 1, "one more than the sequences")
    else:
        check_length(
            lists.positions, "positions", 0, lists.num_sequences, "one row for each sequence, or pass cu_query_lens=")
    return lists


cdef Tensor slot_array(object out, PositionLists lists, object example, const Place* place):
    """Return the array of the result: a new one, or `out`, checked."""
    if out is None:
        return new_result(2, lists.positions.shape_, INT32, example, place)
    cdef Tensor result = any_tensor(out, "out")
    check_place(result, "out", place)
    check_result(result, "out", 2, lists.positions.shape_, INT32)
    if not contiguous(result):
        raise ShapeError(f"out has strides {result.strides}; it must be C-contiguous")
    for read, name in ((lists.positions, "positions"), (lists.table, "block_table"), (lists.rows, "rows"),
                       (lists.cu, "cu_query_lens")):
        check_apart(result, "out", read, name)
    return result


cdef object device_slots(
        object positions, object block_table, int64_t block_size, object rows, object cu_query_lens, object out,
        const Place* place):
    cdef PositionLists lists = position_lists(positions, block_table, rows, cu_query_lens, place)
    cdef Tensor result = slot_array(out, lists, positions, place)
    await_arrays((positions, block_table, rows, cu_query_lens), place)
    if debugging():
        check_not_captured(place)
        slots_of(
            to_host(lists.positions, place), to_host(lists.table, place), block_size, rows=to_host(lists.rows, place),
            cu_query_lens=to_host(lists.cu, place))
    cdef Tensor table = to_device(lists.table, "block_table", place)
    cdef Tensor picked = None if lists.rows is None else to_device(lists.rows, "rows", place)
    cdef Tensor cu = None if lists.cu is None else to_device(lists.cu, "cu_query_lens", place)
    find_slots(lists.positions, table, picked, cu, lists.num_sequences, block_size, result, place)
    return finished(result, positions, place) if out is None else out
