"""Sparse selection: the best positions of each row of scores."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT32, INT64
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, contiguous
from pagecore.ops.args cimport Indices, index_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    await_arrays,
    check_aligned,
    check_place,
    find_place,
    finished,
    float32_array,
    given_indices,
    is_aligned,
    new_result,
    note_written,
    read_size,
    to_device,
    viewed,
)
from pagecore.ops.cpu._cpu cimport select as run_select
from pagecore.ops.cpu.sparse.select cimport SelectArgs
from pagecore.ops.cuda.sparse._sparse cimport Selecting, select as launch_select

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, shown


def select(scores, budget, *, lens, sinks=0, recent=0, threshold=None, stream=None):
    """Select positions by score in each row: the first `sinks`, the last `recent`, and the best `budget` between them.

    Parameters
    ----------
    scores : array, [..., n]
        float32, one score for each block or token, as `score_blocks` and `score_tokens` return them. On the host or
        CUDA, where it must be contiguous. Scores of -inf or NaN are not selected.
    budget : int
        Positions that are selected by score. Of equal scores the lower position is selected.
    lens : int or integers
        Number of positions of each row, up to n: one for all, or an array whose axes are the leading axes of `scores`,
        such as [T] for scores [T, Hkv, n]. For blocks it is the number of blocks of the sequence. For CUDA scores a
        contiguous int32 or int64 array on the device, whose contents are clamped to 0 .. n, is used there.
    sinks, recent : int
        First and last positions that are always selected, in addition to the budget.
    threshold : int, optional
        Rows with fewer positions keep all of them.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `scores`.

    Returns
    -------
    positions, counts : array
        int32 [..., m] and int32 [...], in the framework of `scores`: ascending positions, then -1; and their number.
        m is ``sinks + budget + recent``, or ``threshold - 1`` if that is more. They fit the arguments `blocks` or
        `indices` of `paged_attention`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        Arrays do not match, or an option is not an integer of at least 0.

    Notes
    -----
    A radix select finds the cut in O(n) for each row; rows are shared among threads, or among blocks of threads on
    CUDA.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> positions, counts = pagecore.select(np.array([[2.5, 4, 4, 1, 10]], np.float32), 2, lens=5, recent=1)
    >>> positions, counts
    (array([[1, 2, 4]], dtype=int32), array([3], dtype=int32))
    """
    cdef Place place
    cdef SelectArgs args
    cdef Tensor given = float32_array(scores, "scores", "score_blocks")
    cdef int i, last = given.ndim - 1
    find_place(&place, given, "scores", scores, stream)
    if last < 0:
        raise ShapeError("scores is a single number; expected [..., n], one score for each position")
    if given.shape_[last] > INT32_MAX:
        raise ShapeError(f"scores has {given.shape_[last]} positions; the limit is {INT32_MAX}: score blocks instead")
    if place.device_type != CPU:
        if not contiguous(given):
            raise ShapeError("scores is not contiguous; on CUDA it must be: pass a contiguous copy")
        check_aligned(given, "scores")
    elif not contiguous(given) or not is_aligned(given):
        given = as_tensor(np.array(given.numpy(), order="C"))
    args.width = given.shape_[last]
    args.budget = read_size(budget, "budget", 0)
    args.sinks = read_size(sinks, "sinks", 0)
    args.recent = read_size(recent, "recent", 0)
    args.threshold = 0 if threshold is None else read_size(threshold, "threshold", 0)
    args.capacity = max(args.sinks + args.budget + args.recent, args.threshold - 1)
    args.num_rows = 1
    for i in range(last):
        args.num_rows *= given.shape_[i]
    cdef Tensor listed = device_lengths(lens, given, &place)
    if listed is None:
        listed = given_indices(row_lengths(lens, given), "lens", 1, "[rows]", NULL)
    cdef int64_t shape[8]
    for i in range(last):
        shape[i] = given.shape_[i]
    shape[last] = args.capacity
    cdef Tensor positions = new_result(last + 1, shape, INT32, scores, &place)
    cdef Tensor counts = new_result(last, shape, INT32, scores, &place)
    args.scores = <const float*>given.data
    args.positions = <int32_t*>positions.data
    args.counts = <int32_t*>counts.data
    if place.device_type == CPU:
        args.lens = index_array(listed)
        args.rows_per_length = args.num_rows // max(1, listed.shape_[0])
        run_select(args)
    else:
        await_arrays((scores, lens), &place)
        select_on_device(args, listed, &place)
        note_written(positions, &place)
        note_written(counts, &place)
    return finished(positions, scores, &place), finished(counts, scores, &place)


cdef int select_on_device(SelectArgs& args, Tensor lens, const Place* place) except -1:
    """Launch a selection. Lengths on the host are checked; one length for all rows needs no copy."""
    cdef Selecting call
    cdef Indices lengths
    cdef int64_t count = 1, length
    cdef int i
    for i in range(lens.ndim):
        count *= lens.shape_[i]
    call.length = 0
    if lens.device_type == CPU:
        for i in range(count):
            length = (<const int64_t*>lens.data)[i]
            if not 0 <= length <= args.width:
                raise ShapeError(
                    f"lens[{i}] is {length} and the rows have {args.width} scores; expected 0 to {args.width}")
            call.length = length
        lens = None if count == 1 else to_device(lens, "lens", place)
    if lens is not None:
        lengths.data, lengths.size, lengths.stride = lens.data, count, lens.itemsize
        lengths.wide = lens.dtype_code == INT64
    call.scores, call.score_stride = <const char*>args.scores, args.width
    call.num_rows, call.width, call.rows_per_length = args.num_rows, args.width, args.num_rows // max(1, count)
    call.budget, call.sinks, call.recent, call.threshold = args.budget, args.sinks, args.recent, args.threshold
    call.capacity, call.ranked = args.capacity, False
    call.positions, call.counts = <char*>args.positions, <char*>args.counts
    return launch_select(call, lengths, place)


cdef Tensor device_lengths(object lens, Tensor scores, const Place* place):
    """Return lengths that are on a device, whose axes are leading axes of the scores; None for others."""
    cdef Tensor given = viewed(lens, "lens")
    if given is None or given.device_type == CPU:
        return None
    check_place(given, "lens", place)
    if not INT32 <= given.dtype_code <= INT64:
        raise UnsupportedDtype(f"lens is {given.dtype} on {given.device}; it must be int32 or int64 there")
    if given.shape != scores.shape[:-1][: given.ndim] or not contiguous(given):
        raise ShapeError(
            f"lens has shape {given.shape} and scores {scores.shape}; expected a contiguous array with the leading axes"
            " of scores"
        )
    check_aligned(given, "lens")
    return given


cdef object row_lengths(object lens, Tensor scores):
    """Return the lengths of rows as a flat array whose size divides the number of rows."""
    leading = scores.shape[:-1]
    try:
        given = np.asarray(lens.numpy() if isinstance(lens, Tensor) else lens)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"lens is {shown(lens)}; expected integers: {shown(error)}") from error
    if given.size and given.dtype.kind not in "iu":
        raise UnsupportedDtype(f"lens holds {given.dtype}; it must hold integers")
    if given.shape != leading[: given.ndim]:
        raise ShapeError(
            f"lens has shape {given.shape} and scores {scores.shape}; expected a number, or the leading axes of scores"
        )
    return np.array(given, np.int64).reshape(-1)  # a copy: the numbers that were checked are those that are used
