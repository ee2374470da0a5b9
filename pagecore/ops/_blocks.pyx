"""gather_blocks, scatter_blocks, transfer_blocks, copy_blocks: check the arguments and call the kernel."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays._tensor cimport Tensor, new_tensor, size_of
from pagecore.arrays.array_view cimport Extent, checked_extent
from pagecore.ops._checks cimport (
    LAST_FLOAT,
    check_aligned,
    check_length,
    check_no_stream,
    check_writable,
    host_tensor,
    index_tensor,
)
from pagecore.ops.cpu._cpu cimport (
    copy_blocks as run_copy,
    gather_blocks as run_gather,
    scatter_blocks as run_scatter,
    total_tokens,
    transfer_blocks as run_transfer,
)

import numpy as np

from pagecore.arrays import like
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption

cdef enum:
    OVERLAP_WORK = 100_000  # steps of NumPy's search for a common byte; what takes more counts as shared


def gather_blocks(cache, block_table, seq_lens, *, rows=None, out=None, stream=None):
    """Copy sequences out of the blocks of a paged cache: contiguous, one after another, packed.

    Parameters
    ----------
    cache : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Any dtype, rank of at least 2, and strides. Caches of a list share the table, and so their block_size; whatever
        else they have may differ.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Block ids. The null block 0 is a hole, whose tokens are zeros. Entries past a sequence's length are not looked
        at.
    seq_lens : integers, [B]
        Tokens of each sequence.
    rows : integers, [B], optional
        The row of `block_table` of each sequence.
    out : array, [sum(seq_lens), ...], optional
        Takes the result; for a list of caches a list. Its dtype is the cache's, or else both are of float32, float16
        and bfloat16: then numbers are rounded to nearest even. It must not share memory with a cache.
    stream : None
        For CUDA arrays only.

    Returns
    -------
    array, [sum(seq_lens), ...]
        A new C-contiguous array in the dtype and framework of the cache, or `out`; for a list of caches a list.

    Raises
    ------
    InvalidBlock, InvalidSequence
        A block or row out of range.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays that do not fit each other, are not served or cannot be written. In every case nothing has been written.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.arange(12, dtype=np.float32).reshape(4, 3, 1)  # 4 blocks of 3 tokens
    >>> pagecore.gather_blocks(cache, block_table=[[2, 1], [3, 0]], seq_lens=[5, 1])[:, 0]
    array([6., 7., 8., 3., 4., 9.], dtype=float32)
    """
    check_no_stream(stream)
    cdef bint many = isinstance(cache, (list, tuple))
    cdef list caches = paged_arrays(cache, "cache", many)
    cdef Sequences batch = Sequences(block_table, seq_lens, rows, caches)
    cdef list packed = []
    cdef Tensor array
    if out is None:
        for array in caches:
            packed.append(packed_like(array, batch.num_tokens))
        given = [like(tensor, example) for tensor, example in zip(packed, cache if many else (cache,))]
    else:
        given = given_arrays(out, "out", many, len(caches), "caches")
        packed = [host_tensor(each, label("out", i, many)) for i, each in enumerate(given)]
        check_packed(packed, "out", caches, "cache", many, batch.num_tokens)
        check_targets(packed, "out", many)
        check_apart(caches, "cache", packed, "out", many)
    if caches:
        run_gather(caches, packed, batch.table, batch.lens, batch.picked)
    return given if many else given[0]


def scatter_blocks(values, cache, block_table, seq_lens, *, rows=None, stream=None):
    """Copy packed sequences into the blocks of a paged cache: the inverse of `gather_blocks`.

    Parameters
    ----------
    values : array, [sum(seq_lens), ...], or list or tuple of arrays
        One for each cache. Its dtype is the cache's, or else both are of float32, float16 and bfloat16: then numbers
        are rounded to nearest even. It must not share memory with a cache.
    cache : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Written in place; as in `gather_blocks`.
    block_table : integers, [B, max_blocks], or [more, max_blocks] with `rows`
        Block ids. Tokens in the null block 0, a hole, are skipped. Of two sequences that hold the same block, the later
        one stays.
    seq_lens : integers, [B]
        Tokens of each sequence. Slots past them keep what they hold.
    rows : integers, [B], optional
        The row of `block_table` of each sequence.
    stream : None
        For CUDA arrays only.

    Raises
    ------
    InvalidBlock, InvalidSequence
        A block or row out of range.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays that do not fit each other, are not served or cannot be written. In every case nothing has been written.
    """
    check_no_stream(stream)
    cdef bint many = isinstance(cache, (list, tuple))
    cdef list caches = paged_arrays(cache, "cache", many)
    cdef Sequences batch = Sequences(block_table, seq_lens, rows, caches)
    given = given_arrays(values, "values", many, len(caches), "caches")
    cdef list packed = [host_tensor(each, label("values", i, many)) for i, each in enumerate(given)]
    check_packed(packed, "values", caches, "cache", many, batch.num_tokens)
    check_targets(caches, "cache", many)
    check_apart(packed, "values", caches, "cache", many)
    if caches:
        run_scatter(packed, caches, batch.table, batch.lens, batch.picked)


def transfer_blocks(source_caches, target_caches, pairs, *, stream=None):
    """Copy whole blocks from caches into other caches, whatever their layouts, dtypes and numbers of blocks.

    Parameters
    ----------
    source_caches : array, [num_blocks, block_size, ...], or list or tuple of arrays
        Any dtype, rank of at least 2, and strides.
    target_caches : array, or list or tuple of as many arrays
        Written in place, each from the source beside it, whose axes after the first it must have. Its dtype is the
        source's, or else both are of float32, float16 and bfloat16: then numbers are rounded to nearest even. No target
        may share memory with a source: `copy_blocks` copies inside a cache.
    pairs : integers, [n, 2]
        (source block, target block), the same for every cache; copied in order, so that of equal targets the later one
        stays. Neither may be the null block 0.
    stream : None
        For CUDA arrays only.

    Raises
    ------
    InvalidBlock
        A block that some cache does not have, or the null block.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays that do not fit each other, are not served or cannot be written. In every case nothing has been copied.
    """
    check_no_stream(stream)
    cdef bint many = isinstance(source_caches, (list, tuple))
    cdef list sources = paged_arrays(source_caches, "source_caches", many)
    given = given_arrays(target_caches, "target_caches", many, len(sources), "source_caches")
    cdef list targets = paged_arrays(given, "target_caches", True) if many else paged_arrays(
        given[0], "target_caches", False)
    cdef Tensor source, target
    cdef int axis
    for i, (source, target) in enumerate(zip(sources, targets)):
        name = label("target_caches", i, many)
        other = label("source_caches", i, many)
        check_axes(target, name, source, other, 1, source.ndim)
        check_cast(source, other, target, name)
    check_targets(targets, "target_caches", many)
    check_apart(sources, "source_caches", targets, "target_caches", many)
    ids = pair_ids(pairs)
    if ids is not None:
        run_transfer(sources, targets, ids)


def copy_blocks(caches, pairs, *, stream=None):
    """Copy whole blocks inside caches, in the order given: what runs before a shared block is written.

    Parameters
    ----------
    caches : array, or list or tuple of arrays, [num_blocks, ...]
        Each is copied in place; any dtype, rank and strides.
    pairs : integers, [n, 2]
        (source, target) block ids, the same for every cache. A later pair sees what earlier ones wrote.
    stream : None
        For CUDA arrays only.

    Raises
    ------
    InvalidBlock
        A source or target that some cache does not have.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays that are not served or cannot be written. In every case nothing has been copied.
    """
    check_no_stream(stream)
    cdef list planes = []
    cdef Tensor plane
    cdef bint many = isinstance(caches, (list, tuple))
    for i, cache in enumerate(caches if many else (caches,)):
        name = f"caches[{i}]" if many else "caches"
        plane = host_tensor(cache, name)
        if plane.ndim == 0:
            raise ShapeError(f"{name} has no axes; its first axis must count blocks")
        check_writable(plane, name)
        check_aligned(plane, name)
        planes.append(plane)
    ids = pair_ids(pairs)
    if ids is not None:
        run_copy(planes, ids)


cdef str label(str name, Py_ssize_t i, bint many):
    return f"{name}[{i}]" if many else name


cdef object given_arrays(object arrays, str name, bint many, Py_ssize_t count, str others):
    """The arrays of an argument that goes with a list, or with one array."""
    cdef bint listed = isinstance(arrays, (list, tuple))
    if not many:
        if listed:
            raise ShapeError(f"{name} is a {type(arrays).__name__}; beside one array it must be one array")
        return [arrays]
    if not listed:
        raise ShapeError(f"{name} is a {type(arrays).__name__}; beside a list of {others} it must be a list")
    if len(arrays) != count:
        raise ShapeError(f"{name} has {len(arrays)} arrays for {count} {others}; it must have one for each")
    return list(arrays)


cdef list paged_arrays(object caches, str argument, bint many):
    """Caches of any dtype, all of one block_size."""
    cdef list arrays = []
    cdef Tensor array
    cdef int64_t block_size = 0
    for i, cache in enumerate(caches if many else (caches,)):
        name = label(argument, i, many)
        array = host_tensor(cache, name)
        if array.ndim < 2:
            raise ShapeError(f"{name} has shape {array.shape}; it must have at least 2 axes: [num_blocks, block_size, ...]")
        if array.shape_[1] == 0:
            raise ShapeError(f"{name} has shape {array.shape}; axis 1, block_size, must have at least 1 element")
        if i > 0 and array.shape_[1] != block_size:
            raise ShapeError(f"{name} has blocks of {array.shape_[1]} tokens and {argument}[0] of {block_size}; caches "
                             "of one call must have one block_size")
        block_size = array.shape_[1]
        arrays.append(array)
    return arrays


cdef class Sequences:
    """The index arguments of a gather or scatter."""
    cdef Tensor table
    cdef Tensor lens
    cdef Tensor picked
    cdef int64_t num_tokens

    def __init__(self, block_table, seq_lens, rows, list caches):
        if isinstance(block_table, (list, tuple)) and len(block_table) == 0:
            block_table = np.zeros((0, 0), np.int32)
        self.lens = index_tensor(seq_lens, "seq_lens", 1, "[num_sequences]")
        self.table = index_tensor(block_table, "block_table", 2, "[num_sequences, max_blocks]")
        cdef int64_t count = self.lens.shape_[0]
        if rows is None:
            check_length(self.table, "block_table", 0, count, "one row for each of seq_lens, or pass rows= to pick some")
        else:
            self.picked = index_tensor(rows, "rows", 1, "[num_sequences]")
            check_length(self.picked, "rows", 0, count, "one for each of seq_lens")
        cdef int64_t block_size = (<Tensor>caches[0]).shape_[1] if caches else 1
        self.num_tokens = total_tokens(self.lens, self.table.shape_[1], block_size) if caches else 0


cdef Tensor packed_like(Tensor cache, int64_t num_tokens):
    cdef int64_t shape[8]
    cdef int i
    shape[0] = num_tokens
    for i in range(2, cache.ndim):
        shape[i - 1] = cache.shape_[i]
    return new_tensor(cache.ndim - 1, shape, cache.dtype_code, False)


cdef int check_packed(
        list packed, str argument, list caches, str caches_argument, bint many, int64_t num_tokens) except -1:
    cdef Tensor array, cache
    for i, (array, cache) in enumerate(zip(packed, caches)):
        name, other = label(argument, i, many), label(caches_argument, i, many)
        if array.ndim != cache.ndim - 1:
            raise ShapeError(f"{name} has shape {array.shape}; beside {other} of shape {cache.shape} it must have "
                             f"{cache.ndim - 1} axes: [sum(seq_lens), ...]")
        check_length(array, name, 0, num_tokens, "the sum of seq_lens")
        check_axes(array, name, cache, other, 2, cache.ndim)
        check_cast(cache, other, array, name)
    return 0


cdef int check_axes(Tensor array, str name, Tensor cache, str other, int first, int last) except -1:
    """That the last axes are the cache's from `first` on."""
    cdef int i, shift = cache.ndim - array.ndim
    if array.ndim < cache.ndim - first:
        raise ShapeError(f"{name} has shape {array.shape} beside {other} of shape {cache.shape}; too few axes")
    for i in range(first, last):
        if array.shape_[i - shift] != cache.shape_[i]:
            raise ShapeError(f"{name} has shape {array.shape} and {other} {cache.shape}; axis {i - shift} must have "
                             f"length {cache.shape_[i]}")
    return 0


cdef int check_cast(Tensor a, str name_a, Tensor b, str name_b) except -1:
    if a.dtype_code != b.dtype_code and (a.dtype_code > LAST_FLOAT or b.dtype_code > LAST_FLOAT):
        raise UnsupportedDtype(f"{name_a} is {a.dtype} and {name_b} {b.dtype}; only float32, float16 and bfloat16 are cast "
                               "to each other: pass an array of the same dtype")
    return 0


cdef int check_targets(list arrays, str argument, bint many) except -1:
    """Arrays that are written: writable, and no element twice."""
    cdef Tensor array
    cdef int axis
    for i, array in enumerate(arrays):
        check_writable(array, label(argument, i, many))
        for axis in range(array.ndim):
            if array.shape_[axis] > 1 and array.strides_[axis] == 0 and size_of(array) > 0:
                raise ShapeError(f"{label(argument, i, many)} has strides {array.strides} bytes; with 0, elements "
                                 "overwrite each other: pass an array of its own memory")
    return 0


cdef int check_apart(list sources, str source_argument, list targets, str target_argument, bint many) except -1:
    """That no target shares memory with any source, not only with the one beside it."""
    cdef Tensor source, target
    cdef Extent reads, writes
    for i, target in enumerate(targets):
        writes = checked_extent(target.view())
        for j, source in enumerate(sources):
            reads = checked_extent(source.view())
            if source.data + reads.high <= target.data + writes.low or target.data + writes.high <= source.data + reads.low:
                continue
            if share_memory(source, target):
                raise UnsupportedOption(f"{label(target_argument, i, many)} shares memory with "
                                        f"{label(source_argument, j, many)}; pass arrays that do not overlap")
    return 0


cdef bint share_memory(Tensor a, Tensor b) except -1:
    """Exactly: planes that are interleaved span the same bytes and share none."""
    try:
        return np.shares_memory(a.numpy(), b.numpy(), max_work=OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


cdef Tensor pair_ids(object pairs):
    """None where there are none."""
    if isinstance(pairs, (list, tuple)) and len(pairs) == 0:
        return None
    cdef Tensor ids = index_tensor(pairs, "pairs", 2, "[n, 2] of (source, target)")
    check_length(ids, "pairs", 1, 2, "(source, target)")
    return ids
