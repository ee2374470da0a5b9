"""gather_blocks, scatter_blocks, copy_blocks: check the arguments, call the kernel."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, await_arrays, finished, read_flag
from pagecore.ops.arguments._overlap cimport check_all_apart
from pagecore.ops.cpu.calls._calls cimport (
    check_copied,
    check_independent,
    copy_blocks as run_copy,
    gather_blocks as run_gather,
    scatter_blocks as run_scatter,
)
from pagecore.ops.cuda.moves._moves cimport (
    copy_blocks as launch_copy,
    gather_blocks as launch_gather,
    scatter_blocks as launch_scatter,
)
from pagecore.ops.index_checks._index_checks cimport (
    UNKNOWN,
    Sequences,
    check_index_apart,
    check_packed,
    check_paged,
    check_targets,
    debug_copied,
    debug_sequences,
    debugging,
    first_tensors,
    label,
    lowest_block,
    matching_arrays,
    packed_like,
    pair_ids,
    read_sequences,
    send_sequences,
    tensors_at,
)

from pagecore.errors import ShapeError, UnsupportedOption


cdef int check_known(Sequences batch, list caches) except -1:
    """Raise UnsupportedOption if a result cannot be allocated because its length is known on the device only."""
    if batch.num_tokens == UNKNOWN and caches:
        raise UnsupportedOption(
            f"seq_lens is on {batch.lens.device}; the host cannot sum it without waiting for the device: pass out=, or "
            "seq_lens on the host"
        )
    return 0


cdef int check_under_debug(
        Sequences batch, list caches, list packed, str argument, bint many, const Place* place) except -1:
    if not packed or not debugging():
        return 0
    name = label(argument, 0, many)
    return debug_sequences(caches, <Tensor>packed[0], name, batch.table, batch.lens, batch.rows, place)


cdef int check_indices_apart(list written, str name, bint many, Sequences batch) except -1:
    check_index_apart(written, name, many, batch.table, "block_table")
    check_index_apart(written, name, many, batch.lens, "seq_lens")
    return check_index_apart(written, name, many, batch.rows, "rows")


cdef int64_t longest(Sequences batch, list packed):
    """Return an upper bound of the tokens of a sequence."""
    if batch.longest != UNKNOWN or not packed:
        return batch.longest
    return (<Tensor>packed[0]).shape_[0]


def gather_blocks(cache, block_table, seq_lens, *, rows=None, null_block=True, out=None, stream=None):
    """Copy sequences from the blocks of a paged cache to a packed array, one sequence after another.

    All arrays are on one device, the host or CUDA; for CUDA arrays, lists and host arrays of integers are copied to the
    device. A call on CUDA with `out` and device integers is one launch for all caches of one memory layout, and does
    not wait.

    Parameters
    ----------
    cache : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Any dtype of `DType`, strides, and rank of at least 2. Caches of a list have one block_size, because they share
        the table; they may differ otherwise.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Block ids; see `null_block` for block 0. Entries past the length of a sequence are not read.
    seq_lens : integers, [B]
        Tokens of each sequence. If they are on CUDA, `out` is required: the host cannot sum them without waiting for
        the device.
    rows : integers, [B], optional
        Row of `block_table` for each sequence.
    null_block : bool
        Block 0 is the null block of the caches of pagecore: a hole, whose tokens are zeros. False reads block 0 as any
        other, from a cache of another library, where it holds tokens.
    out : array, [sum(seq_lens), ...], optional
        Array for the result; a list for a list of caches. Its dtype is that of the cache; or both are float32, float16
        or bfloat16, and numbers are rounded to nearest even. It must not share memory with a cache, and arrays of a
        list must not share memory with each other.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `cache`.

    Returns
    -------
    array, [sum(seq_lens), ...]
        A new C-contiguous array in the dtype and framework of the cache, or `out`; a list for a list of caches.

    Raises
    ------
    InvalidBlock, InvalidSequence
        A block or row is out of range. Integers in CUDA memory are checked under `debug` only; otherwise invalid blocks
        and rows are holes, and lengths are cut to the rows of the table and to `out`.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are not supported, or cannot be written.
    NotEnoughMemory
        The host or the device cannot allocate the result. After every error nothing has been written.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.arange(12, dtype=np.float32).reshape(4, 3, 1)  # 4 blocks of 3 tokens
    >>> pagecore.gather_blocks(cache, block_table=[[2, 1], [3, 0]], seq_lens=[5, 1])[:, 0]
    array([6., 7., 8., 3., 4., 9.], dtype=float32)
    """
    cdef bint many = isinstance(cache, (list, tuple))
    cdef int64_t lowest = lowest_block(null_block)
    cdef list examples = list(cache) if many else [cache]
    cdef Place place
    cdef list caches = first_tensors(&place, examples, "cache", many, stream)
    check_paged(caches, "cache", many)
    cdef Sequences batch = read_sequences(block_table, seq_lens, rows, caches, &place)
    cdef list packed, given
    cdef Py_ssize_t i
    if out is None:
        check_known(batch, caches)
        packed = [packed_like(<Tensor>caches[i], batch.num_tokens, examples[i], &place) for i in range(len(caches))]
        given = packed
    else:
        given = matching_arrays(out, "out", many, len(caches), "caches")
        packed = tensors_at(given, "out", many, &place)
        check_packed(packed, "out", caches, "cache", many, batch.num_tokens)
        check_targets(packed, "out", many)
        check_all_apart(packed, "out", caches, "cache", many)
        check_indices_apart(packed, "out", many, batch)
    if place.device_type == CPU:
        run_gather(caches, packed, batch.table, batch.lens, batch.rows, lowest)
    else:
        await_arrays((cache, block_table, seq_lens, rows), &place)
        send_sequences(batch, caches, &place)
        check_under_debug(batch, caches, packed, "out", many, &place)
        launch_gather(caches, packed, batch.table, batch.lens, batch.rows, longest(batch, packed), lowest, &place)
    if out is None:
        given = [finished(<Tensor>packed[i], examples[i], &place) for i in range(len(packed))]
    return given if many else given[0]


def scatter_blocks(values, cache, block_table, seq_lens, *, rows=None, null_block=True, stream=None):
    """Copy packed sequences to the blocks of a paged cache; the inverse of `gather_blocks`, with its rules for devices.

    Parameters
    ----------
    values : array, [sum(seq_lens), ...], or list or tuple of arrays
        One array for each cache. Its dtype is that of the cache; or both are float32, float16 or bfloat16, and numbers
        are rounded to nearest even. It must not share memory with a cache.
    cache : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Written in place; as in `gather_blocks`. Caches of a list must not share memory with each other.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Block ids; see `null_block` for block 0. If two sequences write to one block, the host keeps the later one, and
        CUDA keeps either or a mixture of both.
    seq_lens : integers, [B]
        Tokens of each sequence. Slots past them are not written.
    rows : integers, [B], optional
        Row of `block_table` for each sequence.
    null_block : bool
        Block 0 is the null block of the caches of pagecore: a hole, whose tokens are skipped. False writes to block 0
        as to any other, in a cache of another library, where it holds tokens.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `cache`.

    Raises
    ------
    InvalidBlock, InvalidSequence
        A block or row is out of range. Integers in CUDA memory are checked under `debug` only; otherwise tokens of
        invalid blocks and rows are skipped, and lengths are cut to the rows of the table and to `values`.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other, are not supported, or cannot be written. After every error nothing has been
        written.
    """
    cdef bint many = isinstance(cache, (list, tuple))
    cdef int64_t lowest = lowest_block(null_block)
    cdef Place place
    cdef list caches = first_tensors(&place, list(cache) if many else [cache], "cache", many, stream)
    check_paged(caches, "cache", many)
    cdef Sequences batch = read_sequences(block_table, seq_lens, rows, caches, &place)
    cdef list listed = matching_arrays(values, "values", many, len(caches), "caches")
    cdef list packed = tensors_at(listed, "values", many, &place)
    check_packed(packed, "values", caches, "cache", many, batch.num_tokens)
    check_targets(caches, "cache", many)
    check_all_apart(caches, "cache", packed, "values", many)
    check_indices_apart(caches, "cache", many, batch)
    if place.device_type == CPU:
        run_scatter(packed, caches, batch.table, batch.lens, batch.rows, lowest)
    else:
        await_arrays((values, block_table, seq_lens, rows), &place)
        send_sequences(batch, caches, &place)
        check_under_debug(batch, caches, packed, "values", many, &place)
        launch_scatter(packed, caches, batch.table, batch.lens, batch.rows, longest(batch, packed), lowest, &place)


def copy_blocks(caches, pairs, *, independent=False, stream=None):
    """Copy whole blocks inside caches, in order, as copy-on-write does before a shared block is written.

    All arrays are on one device, the host or CUDA; `pairs` may be on the host, as in `transfer_blocks`. A call on CUDA
    makes one launch for all caches of one memory layout and up to 128 pairs from the host without common blocks, or any
    number of pairs in CUDA memory. It neither allocates nor waits.

    Parameters
    ----------
    caches : array, or list or tuple of arrays, [num_blocks, ...]
        Changed in place; any dtype, rank and strides. Caches of a list must not share memory with each other.
    pairs : integers, [n, 2]
        (source, target) block ids, the same for every cache. A pair reads what earlier pairs wrote. A pair that copies
        a block to itself is skipped.
    independent : bool
        The caller's claim that no block is a target twice, or both a source and a target. A source may repeat, and
        skipped pairs do not count. Pairs in CUDA memory are then copied in parallel by the whole device; without the
        claim a few threads copy them one after another. The claim is checked for pairs on the host and under `debug`;
        otherwise a false claim leaves blocks that mix old and new bytes.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `caches`.

    Raises
    ------
    InvalidBlock
        A source or target is outside of a cache. Pairs in CUDA memory are checked under `debug` only; otherwise such
        pairs are skipped.
    UnsupportedOption
        `independent` is claimed for pairs that are not.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays are not supported or cannot be written. After every error nothing has been copied.
    """
    cdef bint many = isinstance(caches, (list, tuple)), is_independent = read_flag(independent, "independent")
    cdef Place place
    cdef list planes = first_tensors(&place, list(caches) if many else [caches], "caches", many, stream)
    cdef Tensor plane
    cdef Py_ssize_t i
    for i in range(len(planes)):
        plane = <Tensor>planes[i]
        if plane.ndim == 0:
            raise ShapeError(f"{label('caches', i, many)} has no axes; its first axis must count blocks")
    check_targets(planes, "caches", many)
    check_all_apart(planes, "caches", [], "", many)
    cdef Tensor ids = pair_ids(pairs, &place)
    if ids is None:
        return
    if is_independent and ids.device_type == CPU:
        check_independent(ids, True)
    check_index_apart(planes, "caches", many, ids, "pairs")
    if place.device_type == CPU:
        run_copy(planes, ids)
        return
    await_arrays((pairs,), &place)
    if ids.device_type == CPU:
        check_copied(planes, ids)
    elif debugging():
        debug_copied(planes, ids, is_independent, &place)
    launch_copy(planes, ids, is_independent, &place)
