"""quantize_state and dequantize_state: recurrent states as int8 codes with a scale for each key, for checkpoints."""

from libc.stdint cimport int8_t, int64_t

from pagecore.arrays._tensor cimport Tensor
from pagecore.arrays.codes cimport CPU, FLOAT32, INT8, INT64, LAST_FLOAT, DType
from pagecore.ops._checks cimport any_tensor, check_aligned, check_result, check_writable
from pagecore.ops._overlap cimport check_apart
from pagecore.ops._place cimport Place, find_place, finished, new_result
from pagecore.ops._threads cimport threads_of_a_call
from pagecore.ops.cpu._cpu cimport convert_states
from pagecore.ops.cpu.state_codec cimport StatePlane

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption


def quantize_state(state):
    """Return the int8 codes and the scales of recurrent states, for checkpoints of a quarter or half of the bytes.

    The scale of a key is the largest magnitude of its column over 127, rounded to the dtype of the state. A code is the
    number over that scale, rounded to nearest even.

    Parameters
    ----------
    state : array, [..., V, K]
        float32 or bfloat16 on the host, C-contiguous. The last two axes are values and keys, as SGLang and vLLM store
        the states of gated delta layers.

    Returns
    -------
    codes : array, int8 [..., V, K]
    scales : array, [..., K]
        In the dtype of `state`; 0 for a key that is all zero. New arrays in the framework of `state`.

    Raises
    ------
    ShapeError
        `state` has fewer than two axes, or is not C-contiguous.
    UnsupportedDtype, UnsupportedOption
        Another dtype, or an array on CUDA.
    NotEnoughMemory
        The host cannot allocate the result.

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
    find_place(&place, given, "state", state, None)
    cdef int64_t shape[8]
    cdef int i, last = given.ndim - 1
    for i in range(given.ndim):
        shape[i] = given.shape_[i]
    cdef Tensor codes = new_result(given.ndim, shape, INT8, state, &place)
    shape[last - 1] = shape[last]
    cdef Tensor scales = new_result(last, shape, given.dtype_code, state, &place)
    convert_whole(given, codes, scales, False)
    return finished(codes, state, &place), finished(scales, state, &place)


def dequantize_state(codes, scales, *, out=None):
    """Return the states of codes and scales: the inverse of `quantize_state`, but for rounding.

    Parameters
    ----------
    codes : array, int8 [..., V, K]
        On the host, C-contiguous, as is `scales`.
    scales : array, [..., K]
        float32 or bfloat16.
    out : array, [..., V, K], optional
        C-contiguous array for the states, in the dtype of `scales`; it is returned.

    Returns
    -------
    array, [..., V, K]
        New, in the framework of `codes`, or `out`.

    Raises
    ------
    ShapeError
        Shapes do not match, or an array is not C-contiguous.
    UnsupportedDtype, UnsupportedOption
        Other dtypes, an array on CUDA, or `out` overlaps an input. After every error nothing has been written.
    NotEnoughMemory
        The host cannot allocate the result.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> pagecore.dequantize_state(np.array([[127], [-64]], np.int8), np.array([0.5], np.float32)).tolist()
    [[63.5], [-32.0]]
    """
    cdef Place place
    cdef Tensor given = checked_codes(codes), factors = state_tensor(scales, "scales", 1)
    check_scales(given, factors)
    find_place(&place, given, "codes", codes, None)
    cdef int64_t shape[8]
    cdef int i
    for i in range(given.ndim):
        shape[i] = given.shape_[i]
    cdef Tensor state
    if out is None:
        state = new_result(given.ndim, shape, factors.dtype_code, codes, &place)
    else:
        state = state_tensor(out, "out")
        check_result(state, "out", given.ndim, shape, factors.dtype_code)
        check_writable(state, "out")
        check_apart(state, "out", given, "codes")
        check_apart(state, "out", factors, "scales")
    convert_whole(state, given, factors, True)
    return finished(state, codes, &place) if out is None else out


def convert_slots(Tensor state not None, Tensor codes not None, Tensor scales not None, pairs, bint restores):
    """Convert slots of a plane of states to slots of its codes and scales, or with `restores` back.

    Parameters
    ----------
    state : Tensor, [slots, ..., V, K]
    codes, scales : Tensor, int8 [other slots, ..., V, K] and [other slots, ..., K]
        The caller has made them for `state`: contiguous, on the host, apart from each other.
    pairs : int64 ndarray, [n, 2]
        Slot of the state and slot of the codes; in range, and no slot that is written occurs twice.
    restores : bool
    """
    cdef Tensor listed = any_tensor(pairs, "pairs")
    if listed.dtype_code != INT64 or listed.ndim != 2 or listed.shape_[1] != 2:
        raise ShapeError(f"pairs is {listed.dtype} {listed.shape}; it must be int64 [n, 2]")
    cdef StatePlane plane = plane_of(state, codes, scales, 1)
    cdef int64_t num_threads = threads_of_a_call()
    cdef const int64_t* first = <const int64_t*>listed.data
    cdef int64_t count = listed.shape_[0]
    with nogil:
        convert_states(plane, first, count, num_threads, restores)


cdef Tensor state_tensor(object array, str name, int least=2):
    cdef Tensor tensor = any_tensor(array, name)
    if tensor.device_type != CPU:
        raise UnsupportedOption(f"{name} is on {tensor.device}; int8 states are converted on the host: copy it there")
    if tensor.dtype_code != FLOAT32 and tensor.dtype_code != LAST_FLOAT:
        raise UnsupportedDtype(f"{name} is {tensor.dtype}; it must be float32 or bfloat16")
    return contiguous(tensor, name, least)


cdef Tensor checked_codes(object array):
    cdef Tensor tensor = any_tensor(array, "codes")
    if tensor.device_type != CPU:
        raise UnsupportedOption(f"codes is on {tensor.device}; int8 states are converted on the host: copy it there")
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
    """Return the plane of arrays whose axes before `first` count slots."""
    cdef StatePlane plane
    cdef int i, last = state.ndim - 1
    plane.state, plane.codes, plane.scales = state.data, <int8_t*>codes.data, scales.data
    plane.type = <DType>state.dtype_code
    plane.num_values, plane.num_keys = state.shape_[last - 1], state.shape_[last]
    plane.num_matrices = 1
    for i in range(first, last - 1):
        plane.num_matrices *= state.shape_[i]
    cdef int64_t size = plane.num_matrices * plane.num_values * plane.num_keys
    plane.state_stride, plane.codes_stride = size * state.itemsize, size
    plane.scales_stride = plane.num_matrices * plane.num_keys * state.itemsize
    return plane


cdef int convert_whole(Tensor state, Tensor codes, Tensor scales, bint restores) except -1:
    cdef StatePlane plane = plane_of(state, codes, scales, 0)
    cdef int64_t num_threads = threads_of_a_call()
    cdef int64_t pair[2]
    pair[0] = pair[1] = 0
    with nogil:
        convert_states(plane, pair, 1, num_threads, restores)
    return 0
