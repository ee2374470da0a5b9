"""Append: make the ids of sampled tokens known."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from pagecore.cache.sequences._sequences cimport Sequence, require
from pagecore.cache.state._state cimport CacheState, Held
from pagecore.index._integers cimport Integers, as_int64, as_integers
from pagecore.native.std cimport vector

import numpy as np

from pagecore.cache.sequences._sequences import as_list
from pagecore.errors import ShapeError, UnsupportedDtype


def append(CacheState state not None, sequences, ids, counts=None):
    """Append known ids: one for each sequence, a row of an array, or a list; see `PagedKVCache.append_tokens`."""
    cdef list listed = as_list(sequences)
    cdef Py_ssize_t count = len(listed)
    cdef vector[int32_t] flat
    cdef vector[int64_t] ends
    cdef list checked
    cdef int64_t begin = 0
    cdef Py_ssize_t i
    if isinstance(sequences, Sequence):
        ids = one_row(ids)
    if counts is None:
        read_ids(ids, count, flat, ends)
    else:
        read_counted(ids, counts, count, flat, ends)
    _guard = Held(state.lock)
    state.begin()
    checked = []
    for each in listed:
        checked.append(require(state, each, False))
    reserve_ids(checked, ends)
    for i in range(count):
        (<Sequence>checked[i]).append(flat.data() + begin, <int32_t>(ends[i] - begin))
        begin = ends[i]


cdef int reserve_ids(list sequences, const vector[int64_t]& ends) except -1:
    """Reserve room for the ids of each sequence; one that is listed several times needs room for all of its ids."""
    cdef int64_t begin = 0
    cdef Py_ssize_t i
    cdef dict total
    if len(set(sequences)) == len(sequences):
        for i in range(len(sequences)):
            (<Sequence>sequences[i]).reserve(ends[i] - begin)
            begin = ends[i]
        return 0
    total = {}
    for i in range(len(sequences)):
        total[sequences[i]] = total.get(sequences[i], 0) + ends[i] - begin
        begin = ends[i]
    for sequence, needed in total.items():
        (<Sequence>sequence).reserve(needed)
    return 0


cdef object one_row(object ids):
    """Return the ids of a sequence that is not in a list as the ids of a list of one sequence."""
    if isinstance(ids, (list, tuple)):
        return [ids] if len(ids) > 1 else ids
    if getattr(ids, "ndim", 1) > 1 or getattr(ids, "shape", None) == (0,):
        return ids
    return [ids]


cdef int read_ids(object ids, Py_ssize_t count, vector[int32_t]& flat, vector[int64_t]& ends) except -1:
    """Write the ids of `count` sequences to `flat`, one sequence after another, and the end of each to `ends`."""
    cdef Py_ssize_t i, width = 1
    cdef Integers given
    if isinstance(ids, (list, tuple)):
        if len(ids) != count:
            raise ShapeError(f"{len(ids)} ids are given for {count} sequences; give an id, or a list of ids, for each")
        for some in ids:
            if type(some) is int:
                flat.push_back(read_id(some))
            elif isinstance(some, (list, tuple)):
                for one in some:
                    flat.push_back(read_id(one))
            else:
                given = as_integers(some, "token id", ShapeError)
                for i in range(given.size):
                    flat.push_back(given.data[i])
            ends.push_back(<int64_t>flat.size())
        return 0
    if getattr(ids, "ndim", 1) == 2:
        ids = np.asarray(ids)
        if ids.shape[0] != count:
            raise ShapeError(f"ids has shape {ids.shape}; expected ({count}, k), k ids for each sequence")
        width = ids.shape[1]
        ids = ids.reshape(-1)
    given = as_integers(ids, "token id", ShapeError)
    if given.is_scalar:
        raise ShapeError(
            f"ids is one token id for a list of {count} sequences; give a list with an id, or a list of ids, for each"
        )
    if given.size != count * width:
        raise ShapeError(
            f"{given.size} ids are given for {count} sequences; give a list with an id, or a list of ids, for each"
        )
    flat.assign(given.data, given.data + given.size)
    for i in range(count):
        ends.push_back((i + 1) * width)
    return 0


cdef int read_counted(
    object ids, object counts, Py_ssize_t count, vector[int32_t]& flat, vector[int64_t]& ends
) except -1:
    """Write the first `counts[i]` ids of each row of an array to `flat`, and the end of each to `ends`."""
    cdef Integers taken = as_integers(counts, "count", ShapeError)
    cdef Integers given
    cdef Py_ssize_t i, width
    if isinstance(ids, (list, tuple)) or getattr(ids, "ndim", 0) != 2:
        raise ShapeError(f"counts are given, and ids is not an array [{count}, k]; leave counts out, or give an array")
    ids = np.asarray(ids)
    if ids.shape[0] != count or taken.is_scalar or taken.size != count:
        size = 1 if taken.is_scalar else taken.size
        raise ShapeError(f"ids has shape {ids.shape}, and there are {size} counts; expected {count} rows and counts")
    width = ids.shape[1]
    given = as_integers(ids.reshape(-1), "token id", ShapeError)
    for i in range(count):
        if not 0 <= taken.data[i] <= width:
            raise ShapeError(f"counts[{i}] is {taken.data[i]}; a row has {width} ids: give 0 to {width}")
    for i in range(count):
        flat.insert(flat.end(), given.data + i * width, given.data + i * width + taken.data[i])
        ends.push_back(<int64_t>flat.size())
    return 0


cdef int32_t read_id(object one) except? -1:
    cdef int64_t number
    if isinstance(one, bool):
        raise UnsupportedDtype("token id is bool; give an int")
    number = as_int64(one, "token id")
    if not -INT32_MAX - 1 <= number <= INT32_MAX:
        raise ShapeError(f"token id {number} is outside of int32; give {-INT32_MAX - 1} to {INT32_MAX}")
    return <int32_t>number
