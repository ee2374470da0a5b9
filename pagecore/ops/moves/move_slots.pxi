"""move_slots: check the arguments, move tokens between slots of the same caches."""

from libc.stdint cimport int64_t
from libcpp.unordered_set cimport unordered_set

from pagecore.arrays.dtypes.codes cimport CPU
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport Place, await_arrays, index_tensor
from pagecore.ops.arguments._overlap cimport check_all_apart
from pagecore.ops.index_checks._index_checks cimport check_targets, first_tensors, label

import numpy as np

from pagecore.errors import InvalidBlock, ShapeError


def move_slots(caches, source, target, *, stream=None):
    """Move tokens from slots to other slots of the same caches, one after the other.

    Move i copies slot ``source[i]`` to slot ``target[i]`` of every cache, after move i - 1: a later move reads what an
    earlier one has written. The bytes of a source stay until they are overwritten.

    Parameters
    ----------
    caches : array, or list of arrays, [num_blocks, block_size, ...]
        Any dtypes; equal numbers of blocks and block sizes, all on one device. They must not overlap each other.
    source, target : integers, [n]
        Slots: block * block_size + offset. On the host, also for caches on CUDA.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work; by default the current stream of the framework of `caches`.

    Raises
    ------
    InvalidBlock
        A slot is outside of the caches.
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays are not supported or cannot be written. After every error nothing was moved.
    NotEnoughMemory
        The device has no memory for the slots.

    Notes
    -----
    A step with a tree of drafts moves the accepted tokens together: `PagedKVCache.commit` with `accepted_path`.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> cache = np.arange(8).reshape(2, 4)  # 2 blocks of 4 tokens
    >>> pagecore.move_slots(cache, [3, 6], [2, 3])
    >>> cache.tolist()
    [[0, 1, 3, 6], [4, 5, 6, 7]]
    """
    cdef bint many = isinstance(caches, (list, tuple))
    cdef Place place
    cdef list planes = first_tensors(&place, list(caches) if many else [caches], "caches", many, stream)
    cdef Tensor first, plane
    cdef Py_ssize_t i
    cdef const int64_t[::1] sources, targets
    if not planes:
        return
    first = <Tensor>planes[0]
    for i in range(len(planes)):
        plane = <Tensor>planes[i]
        if plane.ndim < 2:
            raise ShapeError(f"{label('caches', i, many)} has shape {plane.shape}; it must be [num_blocks, block_size, "
                             "...]")
        if plane.shape_[0] != first.shape_[0] or plane.shape_[1] != first.shape_[1]:
            raise ShapeError(
                f"{label('caches', i, many)} has shape {plane.shape}; expected {first.shape_[0]} blocks of "
                f"{first.shape_[1]} tokens, as the first cache has"
            )
    check_targets(planes, "caches", many)
    check_all_apart(planes, "caches", [], "", many)
    sources = slot_array(source, "source", first)
    targets = slot_array(target, "target", first)
    if sources.shape[0] != targets.shape[0]:
        raise ShapeError(f"source has {sources.shape[0]} slots and target {targets.shape[0]}; give one for each")
    if sources.shape[0] == 0:
        return
    if place.device_type != CPU:
        await_arrays(tuple(caches) if many else (caches,), &place)
    run_moves(planes, sources, targets, place.stream)


cdef object slot_array(object slots, str name, Tensor cache):
    cdef Tensor tensor = index_tensor(slots, name, 1, "[num_slots]", NULL)
    array = np.array(tensor.numpy(), np.int64)
    num_slots = cache.shape_[0] * cache.shape_[1]
    # Two comparisons: if an operand of a chained one raises, Cython frees the result before it twice.
    if array.size and (array.min() < 0 or array.max() >= num_slots):
        wrong = int(np.argmax((array < 0) | (array >= num_slots)))
        raise InvalidBlock(f"{name}[{wrong}] is {array[wrong]}; the caches have slots 0 to {num_slots - 1}")
    return array


cdef int run_moves(list planes, const int64_t[::1] sources, const int64_t[::1] targets, size_t stream) except -1:
    """Run the moves in parts, each of which reads nothing that it writes."""
    cdef unordered_set[int64_t] written
    cdef SlotMoves moves
    cdef Py_ssize_t i, begin = 0
    cdef list parts = []
    for i in range(sources.shape[0] + 1):
        if i < sources.shape[0] and written.count(sources[i]) == 0:
            written.insert(targets[i])
            continue
        moves = SlotMoves(planes, [], stream)
        moves.reserve(i - begin)
        parts.append(moves)
        while begin < i:
            moves.add(sources[begin], targets[begin])
            begin += 1
        written.clear()
        if i < sources.shape[0]:
            written.insert(targets[i])
    for part in parts:
        (<SlotMoves>part).run()
        (<SlotMoves>part).finish()
    return 0
