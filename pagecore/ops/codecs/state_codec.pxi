"""quantize_state and dequantize_state: recurrent states as int8 codes with a scale for each key, for checkpoints."""

from libc.stdint cimport int8_t, int64_t

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT32, INT8, INT64, LAST_FLOAT, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.native.std cimport vector
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_aligned,
    check_place,
    check_result,
    check_writable,
    find_place,
    finished,
    new_result,
    note_written,
)
from pagecore.ops.arguments._overlap cimport check_apart
from pagecore.ops.cpu._cpu cimport convert_states as run_convert_states
from pagecore.ops.cuda.codecs._codecs cimport convert_states as launch_convert
from pagecore.ops.state_plane cimport StatePlane

from pagecore.errors import ShapeError, UnsupportedDtype


def quantize_state(state, *, stream=None):
    """Return the int8 codes and the scales of recurrent states, for checkpoints of a quarter or half of the bytes.

    The scale of a key is the largest magnitude of its column over 127, rounded to the dtype of the state. A code is the
    number over that scale, rounded to nearest even. Codes and scales on CUDA have the bits of the host.

    Parameters
    ----------
    state : array, [..., V, K]
        float32 or bfloat16, C-contiguous. The last two axes are values and keys, as SGLang and vLLM store the states of
        gated delta layers.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `state`.

    Returns
    -------
    codes : array, int8 [..., V, K]
    scales : array, [..., K]
        In the dtype of `state`; 0 for a key that is all zero. New arrays in the framework of `state`.

    Raises
    ------
    ShapeError
        `state` has fewer than two axes, or is not C-contiguous.
    UnsupportedDtype
        Another dtype.
    NotEnoughMemory
        The host or the device cannot allocate the result.

    Notes
    -----
    The format is that of SGLang's int8 checkpoints of linear-attention states (2026). A key with an infinity or NaN
    reads back as NaN.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> codes, scales = pagecore.quantize_state(np.array([[127, 1], [-3, 0.5]], np.float32))
    >>> codes.tolist(), scales.shape
    ([[127, 127], [-3, 64]], (2,))
    """
    cdef Place place
    cdef Tensor given = state_tensor(state, "state")
    find_place(&place, given, "state", state, stream)
    cdef int64_t shape[8]
    cdef int i, last = given.ndim - 1
    for i in range(given.ndim):
        shape[i] = given.shape_[i]
    cdef Tensor codes = new_result(given.ndim, shape, INT8, state, &place)
    shape[last - 1] = shape[last]
    cdef Tensor scales = new_result(last, shape, given.dtype_code, state, &place)
    if place.device_type != CPU:
        await_arrays((state,), &place)
    convert_whole(given, codes, scales, False, &place)
    return finished(codes, state, &place), finished(scales, state, &place)


def dequantize_state(codes, scales, *, out=None, stream=None):
    """Return the states of codes and scales: the inverse of `quantize_state`, but for rounding.

    Parameters
    ----------
    codes : array, int8 [..., V, K]
        C-contiguous, as is `scales`, and on the same device.
    scales : array, [..., K]
        float32 or bfloat16.
    out : array, [..., V, K], optional
        C-contiguous array for the states, in the dtype of `scales`; it is returned.
    stream : int or a stream, optional
        As in `quantize_state`.

    Returns
    -------
    array, [..., V, K]
        New, in the framework of `codes`, or `out`.

    Raises
    ------
    ShapeError
        Shapes do not match, or an array is not C-contiguous.
    UnsupportedDtype, UnsupportedOption, DeviceError
        Other dtypes, arrays on different devices, or `out` overlaps an input. After every error nothing has been
        written.
    NotEnoughMemory
        The host or the device cannot allocate the result.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> pagecore.dequantize_state(np.array([[127], [-64]], np.int8), np.array([0.5], np.float32)).tolist()
    [[63.5], [-32.0]]
    """
    cdef Place place
    cdef Tensor given = checked_codes(codes), factors = state_tensor(scales, "scales", 1)
    find_place(&place, given, "codes", codes, stream)
    check_place(factors, "scales", &place)
    check_scales(given, factors)
    cdef int64_t shape[8]
    cdef int i
    for i in range(given.ndim):
        shape[i] = given.shape_[i]
    cdef Tensor state
    if out is None:
        state = new_result(given.ndim, shape, factors.dtype_code, codes, &place)
    else:
        state = state_tensor(out, "out")
        check_place(state, "out", &place)
        check_result(state, "out", given.ndim, shape, factors.dtype_code)
        check_writable(state, "out")
        check_apart(state, "out", given, "codes")
        check_apart(state, "out", factors, "scales")
    if place.device_type != CPU:
        await_arrays((codes, scales, out), &place)
    convert_whole(state, given, factors, True, &place)
    return finished(state, codes, &place) if out is None else out


def convert_slots(list planes not None, pairs, bint restores, stream=None):
    """Convert slots of planes of states to slots of their codes and scales, or with `restores` back.

    On CUDA the work is submitted to `stream`; the launches carry the pairs.

    Parameters
    ----------
    planes : list of (Tensor, Tensor, Tensor)
        States ``[slots, ..., V, K]``, int8 codes ``[other slots, ..., V, K]`` and scales ``[other slots, ..., K]``. The
        caller has made codes and scales for the states: on one device, each slot contiguous, apart from each other.
    pairs : int64 ndarray, [n, 2]
        Slot of the state and slot of the codes; in range, and no slot that is written occurs twice.
    restores : bool
    stream : int or a stream, optional
    """
    cdef Tensor listed = any_tensor(pairs, "pairs")
    if listed.dtype_code != INT64 or listed.ndim != 2 or listed.shape_[1] != 2:
        raise ShapeError(f"pairs is {listed.dtype} {listed.shape}; it must be int64 [n, 2]")
    cdef vector[StatePlane] converted
    cdef Place place
    for state, codes, scales in planes:
        converted.push_back(plane_of(state, codes, scales, 1))
    if not planes:
        return
    find_place(&place, <Tensor>planes[0][0], "state", planes[0][0], stream)
    convert_planes(converted, <const int64_t*>listed.data, listed.shape_[0], restores, &place)
    if place.device_type != CPU:
        for state, codes, scales in planes:
            note_all_written(state, codes, scales, restores, &place)


cdef Tensor state_tensor(object array, str name, int least=2):
    cdef Tensor tensor = any_tensor(array, name)
    if tensor.dtype_code != FLOAT32 and tensor.dtype_code != LAST_FLOAT:
        raise UnsupportedDtype(f"{name} is {tensor.dtype}; it must be float32 or bfloat16")
    return contiguous(tensor, name, least)


cdef Tensor checked_codes(object array):
    cdef Tensor tensor = any_tensor(array, "codes")
    if tensor.dtype_code != INT8:
        raise UnsupportedDtype(f"codes is {tensor.dtype}; it must be int8")
    return contiguous(tensor, "codes", 2)


cdef Tensor contiguous(Tensor tensor, str name, int least):
    cdef int64_t stride = tensor.itemsize
    cdef int i
    if tensor.ndim < least:
        raise ShapeError(f"{name} has shape {tensor.shape}; it must be [..., {'V, K' if least == 2 else 'K'}]")
    for i in range(tensor.ndim):
        if tensor.shape_[i] == 0:  # without elements, strides say nothing
            return tensor
    for i in range(tensor.ndim - 1, -1, -1):
        if tensor.shape_[i] > 1 and tensor.strides_[i] != stride:
            raise ShapeError(f"{name} has strides {tensor.strides}; pass a C-contiguous array")
        stride *= tensor.shape_[i]
    check_aligned(tensor, name)
    return tensor


cdef int check_scales(Tensor codes, Tensor scales) except -1:
    cdef bint fits = scales.ndim == codes.ndim - 1 and scales.shape_[scales.ndim - 1] == codes.shape_[codes.ndim - 1]
    cdef int i
    for i in range(codes.ndim - 2):
        fits = fits and scales.shape_[i] == codes.shape_[i]
    if not fits:
        raise ShapeError(
            f"scales has shape {scales.shape}; codes {codes.shape} need {(*codes.shape[:-2], codes.shape[-1])}"
        )
    return 0


cdef StatePlane plane_of(Tensor state, Tensor codes, Tensor scales, int first) noexcept:
    """Return the plane of arrays whose axes before `first`, 0 or 1 of them, count slots."""
    cdef StatePlane plane
    cdef int i, last = state.ndim - 1
    plane.state, plane.codes, plane.scales = state.data, <int8_t*>codes.data, scales.data
    plane.type = <DType>state.dtype_code
    plane.num_values, plane.num_keys = state.shape_[last - 1], state.shape_[last]
    plane.num_matrices = 1
    for i in range(first, last - 1):
        plane.num_matrices *= state.shape_[i]
    plane.state_stride = plane.codes_stride = plane.scales_stride = 0
    if first == 1:
        plane.state_stride, plane.codes_stride = state.strides_[0], codes.strides_[0]
        plane.scales_stride = scales.strides_[0]
    return plane


cdef int convert_whole(Tensor state, Tensor codes, Tensor scales, bint restores, const Place* place) except -1:
    cdef vector[StatePlane] planes
    cdef int64_t pair[2]
    planes.push_back(plane_of(state, codes, scales, 0))
    pair[0] = pair[1] = 0
    convert_planes(planes, pair, 1, restores, place)
    return note_all_written(state, codes, scales, restores, place) if place.device_type != CPU else 0


cdef int convert_planes(
        const vector[StatePlane]& planes, const int64_t* pairs, int64_t count, bint restores,
        const Place* place) except -1:
    cdef int64_t num_threads
    cdef size_t i
    if place.device_type != CPU:
        return launch_convert(planes, pairs, count, restores, place)
    num_threads = threads_of_a_call()
    with nogil:
        for i in range(planes.size()):
            run_convert_states(planes[i], pairs, count, num_threads, restores)
    return 0


cdef int note_all_written(
        Tensor state, Tensor codes, Tensor scales, bint restores, const Place* place) except -1:
    if restores:
        return note_written(state, place)
    note_written(codes, place)
    return note_written(scales, place)
