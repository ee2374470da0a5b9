"""Checks of the arguments of gather, scatter, transfer and copy.

A single array is treated as a list of one. `many` is True if the caller passed a list, and selects the names in
messages. Only an error creates the name of an argument.
"""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    are_on_host,
    check_length,
    check_place,
    check_writable,
    find_place,
    given_indices,
    new_result,
    read_flag,
    to_device,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_own_elements, overlaps_elements, shares_memory
from pagecore.ops.cpu.calls._calls cimport check_sequences, total_tokens

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype

cdef class Sequences:
    """The index arguments of a gather or scatter; see _block_checks.pxd."""


cdef str label(str name, Py_ssize_t i, bint many):
    return f"{name}[{i}]" if many else name


cdef list matching_arrays(object arrays, str name, bint many, Py_ssize_t count, str others):
    cdef bint listed = isinstance(arrays, (list, tuple))
    if not many:
        if listed:
            raise ShapeError(f"{name} is a {type(arrays).__name__}; for one array as {others} it must be one array")
        return [arrays]
    if not listed:
        raise ShapeError(f"{name} is a {type(arrays).__name__}; for a list of {others} it must be a list")
    if len(arrays) != count:
        raise ShapeError(f"{name} has {len(arrays)} arrays for {count} {others}; it must have one for each")
    return list(arrays)


cdef list first_tensors(Place* place, list arrays, str argument, bint many, object stream):
    cdef list tensors = [any_tensor(arrays[i], label(argument, i, many)) for i in range(len(arrays))]
    if tensors:
        find_place(place, <Tensor>tensors[0], argument, arrays[0], stream)
    else:
        find_place(place, Tensor.__new__(Tensor), argument, None, stream)
    check_places(tensors, argument, many, place)
    return tensors


cdef list tensors_at(list arrays, str argument, bint many, const Place* place):
    cdef list tensors = [any_tensor(arrays[i], label(argument, i, many)) for i in range(len(arrays))]
    check_places(tensors, argument, many, place)
    return tensors


cdef int check_places(list tensors, str argument, bint many, const Place* place) except -1:
    cdef Tensor tensor
    cdef Py_ssize_t i
    for i in range(len(tensors)):
        tensor = <Tensor>tensors[i]
        if tensor.device_type != place.device_type or tensor.device_id != place.device_id:
            check_place(tensor, label(argument, i, many), place)
    return 0


cdef int check_paged(list tensors, str argument, bint many) except -1:
    cdef Tensor tensor
    cdef Py_ssize_t i
    cdef int64_t block_size
    for i in range(len(tensors)):
        tensor = <Tensor>tensors[i]
        if tensor.ndim < 2:
            raise ShapeError(
                f"{label(argument, i, many)} has shape {tensor.shape}; it must have at least 2 axes: [num_blocks, "
                "block_size, ...]"
            )
        block_size = (<Tensor>tensors[0]).shape_[1]
        if tensor.shape_[1] == 0:
            raise ShapeError(f"{label(argument, i, many)} has shape {tensor.shape}; block_size must be at least 1")
        if tensor.shape_[1] != block_size:
            raise ShapeError(
                f"{label(argument, i, many)} has blocks of {tensor.shape_[1]} tokens and {argument}[0] of "
                f"{block_size}; caches of one call must have one block_size"
            )
    return 0


cdef Sequences read_sequences(
        object block_table, object seq_lens, object rows, list caches, const Place* place):
    cdef Sequences batch = Sequences.__new__(Sequences)
    if isinstance(block_table, (list, tuple)) and len(block_table) == 0:
        block_table = np.zeros((0, 0), np.int32)
    cdef Tensor lens = given_indices(seq_lens, "seq_lens", 1, "[num_sequences]", place)
    cdef Tensor table = given_indices(block_table, "block_table", 2, "[num_sequences, max_blocks]", place)
    cdef Tensor picked = None
    cdef int64_t count = lens.shape_[0]
    if rows is None:
        check_length(table, "block_table", 0, count, "one row for each of seq_lens, or pass rows= to pick some")
    else:
        picked = given_indices(rows, "rows", 1, "[num_sequences]", place)
        check_length(picked, "rows", 0, count, "one for each of seq_lens")
    batch.num_tokens = batch.longest = UNKNOWN
    if lens.device_type == CPU:
        batch.num_tokens = 0
        if caches:
            batch.num_tokens = total_tokens(lens, table.shape_[1], (<Tensor>caches[0]).shape_[1])
        if place.device_type != CPU:
            batch.longest = max(lens.numpy().tolist(), default=0)
    batch.lens, batch.table, batch.rows = lens, table, picked
    return batch


cdef int send_sequences(Sequences batch, list caches, const Place* place) except -1:
    if are_on_host((batch.lens, batch.table, batch.rows)):
        check_sequences(caches, batch.num_tokens, batch.table, batch.lens, batch.rows)
    batch.lens = to_device(batch.lens, "seq_lens", place)
    batch.table = to_device(batch.table, "block_table", place)
    batch.rows = None if batch.rows is None else to_device(batch.rows, "rows", place)
    return 0


cdef int64_t lowest_block(object null_block) except -1:
    return 1 if read_flag(null_block, "null_block") else 0


cdef Tensor packed_like(Tensor cache, int64_t num_tokens, object example, const Place* place):
    cdef int64_t shape[8]
    cdef int i
    shape[0] = num_tokens
    for i in range(2, cache.ndim):
        shape[i - 1] = cache.shape_[i]
    return new_result(cache.ndim - 1, shape, cache.dtype_code, example, place)


cdef int check_packed(list packed, str argument, list caches, str others, bint many, int64_t num_tokens) except -1:
    cdef Tensor array, cache
    cdef Py_ssize_t i
    for i in range(len(packed)):
        array, cache = <Tensor>packed[i], <Tensor>caches[i]
        check_axes(array, argument, cache, others, i, many, 2)
        if num_tokens == UNKNOWN:
            check_length(array, label(argument, i, many), 0, (<Tensor>packed[0]).shape_[0], f"as {argument}[0] has")
        else:
            check_length(array, label(argument, i, many), 0, num_tokens, "the sum of seq_lens")
        check_cast(array, argument, cache, others, i, many)
    return 0


cdef int check_axes(Tensor array, str argument, Tensor cache, str others, Py_ssize_t i, bint many, int first) except -1:
    cdef int axis
    cdef bint fits = array.ndim - 1 == cache.ndim - first
    for axis in range(first, cache.ndim):
        fits = fits and array.shape_[axis - first + 1] == cache.shape_[axis]
    if not fits:
        raise ShapeError(
            f"{label(argument, i, many)} has shape {array.shape} and {label(others, i, many)} {cache.shape}; it must "
            f"have {cache.ndim - first + 1} axes, the last of which are {cache.shape[first:]}"
        )
    return 0


cdef int check_cast(Tensor a, str argument, Tensor b, str others, Py_ssize_t i, bint many) except -1:
    if a.dtype_code != b.dtype_code and (a.dtype_code > LAST_FLOAT or b.dtype_code > LAST_FLOAT):
        raise UnsupportedDtype(
            f"{label(argument, i, many)} is {a.dtype} and {label(others, i, many)} {b.dtype}; only float32, float16 "
            "and bfloat16 are cast to each other: pass an array of the same dtype; transfer_blocks converts "
            "between caches of different formats, with source_scales= and target_scales="
        )
    return 0


cdef int check_targets(list tensors, str argument, bint many) except -1:
    """Check arrays that are written: writable, and no two elements share memory."""
    cdef Tensor tensor
    cdef Py_ssize_t i
    for i in range(len(tensors)):
        tensor = <Tensor>tensors[i]
        if tensor.readonly:
            check_writable(tensor, label(argument, i, many))
        if overlaps_elements(tensor):
            check_own_elements(tensor, label(argument, i, many))
    return 0


cdef int check_index_apart(list written, str name, bint many, Tensor indices, str other_name) except -1:
    cdef Py_ssize_t i
    if indices is None:
        return 0
    for i in range(len(written)):
        if shares_memory(<Tensor>written[i], indices):
            check_apart(<Tensor>written[i], label(name, i, many), indices, other_name)
    return 0


cdef Tensor pair_ids(object pairs, const Place* place):
    if isinstance(pairs, (list, tuple)) and len(pairs) == 0:
        return None
    cdef Tensor ids = given_indices(pairs, "pairs", 2, "[n, 2] of (source, target)", place)
    check_length(ids, "pairs", 1, 2, "(source, target)")
    return ids
