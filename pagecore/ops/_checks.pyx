"""What the ops demand of their arguments before a kernel sees them: devices, dtypes, ranks, shapes and strides.

Every check reads C fields of a Tensor, so that a good call pays nanoseconds; only a refusal builds Python objects. What
the numbers inside index arrays may be, slots, block ids and lengths, the host kernels check themselves; what lies on a
CUDA device is not looked at here, as that would wait for it.
"""

from cpython.object cimport PyObject
from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, INT64_MAX, int64_t, uintptr_t

from pagecore.arrays._tensor cimport (
    Tensor,
    as_tensor,
    contiguous,
    last_axis_contiguous,
    new_tensor,
    size_of,
)
from pagecore.ops._overlap cimport check_own_elements

from sys import modules

import numpy as np

from pagecore.arrays import cuda, empty, like, results, streams
from pagecore.arrays.dtypes import DTYPES
from pagecore.arrays.refusals import brief
from pagecore.arrays.uploads import upload
from pagecore.errors import (
    DeviceError,
    NotEnoughMemory,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)

cdef extern from "Python.h":
    bint PyIndex_Check(object value)
    Py_ssize_t PyNumber_AsSsize_t(object value, PyObject* overflow) except? -1

cdef enum:
    INT32 = 7
    INT64 = 8
    BOOL = 9


cdef int find_place(Place* place, Tensor first, str name, object example, object stream) except -1:
    place.device_type = first.device_type
    place.device_id = first.device_id
    place.stream = 0
    place.name = <PyObject*>name
    if first.device_type != CPU:
        return find_stream(place, example, stream)
    if stream is not None:
        raise UnsupportedOption(
            f"stream is {brief(stream)}; host ops run at once in the calling thread: leave stream out"
        )
    return 0


cdef int find_stream(Place* place, object example, object stream) except -1:
    place.stream = streams.stream_handle(stream, example, place.device_id)
    return 0


cdef str device_of(const Place* place):
    return "cpu" if place == NULL or place.device_type == CPU else f"cuda:{place.device_id}"


cdef int check_place(Tensor tensor, str name, const Place* place) except -1:
    if tensor.device_type != place.device_type or tensor.device_id != place.device_id:
        raise DeviceError(
            f"{name} is on {tensor.device} and {<str>place.name} on {device_of(place)}; the arrays of a call must "
            f"be on one device: pass a copy of {name} on {device_of(place)}"
        )
    return 0


cdef Tensor new_at(int ndim, const int64_t* shape, int dtype_code, const Place* place):
    if place.device_type == CPU:
        return new_tensor(ndim, shape, dtype_code, False)
    return new_on_device(ndim, shape, dtype_code, place)


cdef Tensor new_on_device(int ndim, const int64_t* shape, int dtype_code, const Place* place):
    lengths = tuple([shape[i] for i in range(ndim)])
    return empty(lengths, DTYPES[dtype_code], device_of(place), stream=place.stream)


cdef Tensor new_result(int ndim, const int64_t* shape, int dtype_code, object example, const Place* place):
    if place.device_type == CPU:
        return new_tensor(ndim, shape, dtype_code, False)
    lengths = tuple([shape[i] for i in range(ndim)])
    return results.new_result(lengths, DTYPES[dtype_code], example, place.device_id, place.stream)


cdef object finished(Tensor result, object example, const Place* place):
    if place.device_type == CPU:
        return like(result, example)
    return results.finished_result(result, example, place.stream)


cdef int await_arrays(tuple arrays, const Place* place) except -1:
    """Only JAX keeps its streams to itself."""
    if "jax" not in modules:
        return 0
    for array in arrays:
        if isinstance(array, (list, tuple)):
            await_arrays(tuple(array), place)
        else:
            streams.await_producer(array, place.stream)
    return 0


cdef int note_written(Tensor tensor, const Place* place) except -1:
    streams.note_work(tensor, place.stream)
    return 0


cdef Tensor brought_to(Tensor tensor, str name, const Place* place):
    if place == NULL or place.device_type == tensor.device_type:
        return tensor
    return copied_to(tensor, name, place)


cdef Tensor copied_to(Tensor host, str name, const Place* place):
    if cuda.runtime().is_capturing(place.stream):
        raise UnsupportedOption(
            f"{name} is on the host and the stream is being captured: a graph would read memory that is gone; pass an "
            f"array on {device_of(place)}"
        )
    if not contiguous(host):
        host = as_tensor(np.ascontiguousarray(host.numpy()))
    cdef Tensor copied = new_at(host.ndim, host.shape_, host.dtype_code, place)
    if size_of(host) > 0:
        upload(
            <uintptr_t>host.data, size_of(host) * host.itemsize, <uintptr_t>copied.data, place.stream, place.device_id)
    return copied


cdef Tensor any_tensor(object array, str name):
    """A view of any array; errors of as_tensor are raised with the argument's name."""
    if type(array) is Tensor:
        return <Tensor>array
    try:
        return as_tensor(array)
    except PagecoreError as error:
        error.args = (f"{name}: {error}", *error.args[1:])
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name}: the {type(array).__name__} cannot be viewed: {brief(error)}") from error


cdef Tensor float_tensor(object array, str name, int ndim, int first_full, str axes):
    cdef Tensor tensor = float_array(array, name)
    cdef int i
    check_rank(tensor, name, ndim, axes)
    for i in range(first_full, ndim):
        if tensor.shape_[i] == 0:
            raise ShapeError(f"{name} has shape {tensor.shape}, {axes}; axis {i} must have at least 1 element")
    check_last_axis(tensor, name)
    check_aligned(tensor, name)
    return tensor


cdef str dtype_name(object array):
    """The dtype of an array if pagecore has no such dtype; None for anything else."""
    try:
        name = str(array.dtype).rpartition(".")[2]
    except Exception:
        return None
    return None if name in DTYPES else name


cdef object no_float(str name, object dtype):
    return UnsupportedDtype(f"{name} is {str(dtype)[:80]}; float32, float16 and bfloat16 are served: convert it")


cpdef Tensor float_array(object array, str name):
    """Return a view of float32, float16 or bfloat16 of any rank; errors name the argument."""
    cdef Tensor tensor
    try:
        tensor = any_tensor(array, name)
    except UnsupportedDtype:
        dtype = dtype_name(array)
        if dtype is None:
            raise
        raise no_float(name, dtype) from None
    if tensor.dtype_code > LAST_FLOAT:
        raise no_float(name, tensor.dtype)
    return tensor


cdef Tensor cache_tensor(object array, str name):
    return float_tensor(array, name, 4, 1, "[num_blocks, block_size, num_kv_heads, head_dim]")


cdef Tensor viewed(object array, str name):
    """The array without a copy; None for lists and for dtypes that no Tensor has."""
    if isinstance(array, (list, tuple)):
        return None
    try:
        return any_tensor(array, name)
    except UnsupportedDtype:
        return None


cdef int check_reachable(Tensor tensor, str name, const Place* place) except -1:
    """That an array on a CUDA device, which a call can use but not copy, is on the call's."""
    if place == NULL:
        raise DeviceError(f"{name} is on {tensor.device} and is read by the host: pass a copy there")
    return check_place(tensor, name, place)


cdef Tensor index_tensor(object array, str name, int ndim, str axes, const Place* place):
    return brought_to(given_indices(array, name, ndim, axes, place), name, place)


cdef Tensor given_indices(object array, str name, int ndim, str axes, const Place* place):
    """Lists, other integers and tables without a contiguous last axis are copied on the host; the rest is viewed."""
    cdef Tensor tensor = viewed(array, name)
    if tensor is not None and tensor.device_type != CPU:
        check_reachable(tensor, name, place)
        return device_indices(tensor, name, ndim, axes)
    if tensor is None or not INT32 <= tensor.dtype_code <= INT64:
        tensor = copy_integers(array, name)
    check_rank(tensor, name, ndim, axes)
    if ndim > 1 and not last_axis_contiguous(tensor) or not is_aligned(tensor):
        tensor = copy_integers(tensor, name)
    return tensor


cdef Tensor device_indices(Tensor tensor, str name, int ndim, str axes):
    """As they are: to copy them would take a kernel and memory that the caller can plan better."""
    if not INT32 <= tensor.dtype_code <= INT64:
        raise UnsupportedDtype(f"{name} is {tensor.dtype} on {tensor.device}; there it must be int32 or int64")
    check_rank(tensor, name, ndim, axes)
    if ndim > 1:
        check_last_axis(tensor, name)
    check_aligned(tensor, name)
    return tensor


cdef Tensor copy_integers(object array, str name):
    try:
        values = np.asarray(array.numpy() if type(array) is Tensor else array)
    except MemoryError:
        raise NotEnoughMemory(f"{name}: the host has no memory for a copy as an array of integers") from None
    except Exception as error:
        raise ShapeError(f"{name} is not an array of integers: {brief(error)}") from None
    if values.size == 0:
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{name} holds {values.dtype}; it must hold integers that fit 64 bits")
    if values.dtype.kind == "u" and values.max(initial=0) > INT64_MAX:
        raise ShapeError(f"{name} holds {values.max()}; it must fit int64")
    return as_tensor(np.array(values, dtype=np.int64, order="C"))


cdef Tensor head_numbers(object array, str name, int64_t num_heads, const Place* place):
    return brought_numbers(numbers_of_heads(array, name, num_heads, place), name, place)


cdef Tensor brought_numbers(Tensor tensor, str name, const Place* place):
    """What the host has, as float32 where the call runs on CUDA."""
    if tensor is None or place.device_type == tensor.device_type:
        return tensor
    return copied_to(tensor if tensor.dtype_code == FLOAT32 else copy_numbers(tensor, name), name, place)


cdef Tensor numbers_of_heads(object array, str name, int64_t num_heads, const Place* place):
    """Where they are: on the host or on the device of the call."""
    cdef Tensor tensor = viewed(array, name)
    if tensor is not None and tensor.device_type != CPU:
        check_reachable(tensor, name, place)
        if tensor.dtype_code != FLOAT32:
            raise UnsupportedDtype(f"{name} is {tensor.dtype} on {tensor.device}; there it must be float32: convert it")
        check_last_axis(tensor, name)
        check_aligned(tensor, name)
    elif tensor is None or tensor.dtype_code > LAST_FLOAT or not is_aligned(tensor):
        tensor = copy_numbers(array, name)
    if tensor.ndim != 1 or tensor.shape_[0] != num_heads:
        raise ShapeError(f"{name} has shape {tensor.shape}; it must be [{num_heads}], one number for each head")
    return tensor


cdef Tensor copy_numbers(object array, str name):
    """Numbers of any kind as contiguous float32."""
    try:
        values = np.asarray(array.numpy() if type(array) is Tensor else array)
        if values.dtype.kind not in "iufV" or values.dtype.names is not None:
            raise TypeError(f"{values.dtype} is not served")
        values = np.array(values, dtype=np.float32, order="C")
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedDtype(f"{name} must be numbers that float32 can hold: {brief(error)}") from None
    return as_tensor(values)


cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place):
    return brought_numbers(checked_scales(scale, name, num_kv_heads, divides, place), name, place)


cdef bint is_one_number(object scale, str name) except -1:
    """Whether the host can read it as a number; what is on a device it could, too, but would wait for it."""
    if isinstance(scale, (float, int)):
        return True
    try:
        if getattr(scale, "ndim", 1) != 0:
            return False
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name}: the {type(scale).__name__} cannot be read: {brief(error)}") from error
    cdef Tensor tensor = viewed(scale, name)
    return tensor is None or tensor.device_type == CPU


cdef Tensor checked_scales(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place):
    """Where they are given."""
    cdef Tensor tensor
    cdef double value
    cdef int64_t i
    if scale is None:
        return None
    if is_one_number(scale, name):
        value = checked_scale(scale, name, divides)
        if value == 1.0:
            return None
        tensor = new_tensor(1, &num_kv_heads, FLOAT32, False)
        for i in range(num_kv_heads):
            (<float*>tensor.data)[i] = <float>value
        return tensor
    tensor = numbers_of_heads(scale, name, num_kv_heads, place)
    if tensor.device_type == CPU:
        for each in tensor.numpy().tolist():
            check_scale(each, name, divides)
    return tensor


cdef double checked_scale(object scale, str name, bint divides) except? -1:
    cdef double value = finite_number(scale, name)
    check_scale(value, name, divides)
    return value


cdef int check_scale(double value, str name, bint divides) except -1:
    if not isfinite(<float>value) or divides and <float>value == 0.0:
        limit = "finite, and not 0 to be divided by" if divides else "finite"
        raise UnsupportedOption(f"{name} holds {value}; as a float32 it must be {limit}")
    return 0


cdef Tensor divisors(object scale, str name, int64_t num_kv_heads, const Place* place, float* divisor):
    divisor[0] = 1.0
    if scale is None:
        return None
    if is_one_number(scale, name):
        divisor[0] = checked_scale(scale, name, True)
        return None
    return scale_numbers(scale, name, num_kv_heads, True, place)


cdef Tensor flat_mask(object array, const Place* place):
    cdef Tensor tensor
    if isinstance(array, (list, tuple)):
        try:
            array = np.asarray(array) if array else np.zeros(0, np.bool_)
        except MemoryError:
            raise
        except Exception as error:
            raise ShapeError(f"mask is not an array of bool: {brief(error)}") from None
    tensor = any_tensor(array, "mask")
    if tensor.device_type != CPU:
        check_reachable(tensor, "mask", place)
    if tensor.dtype_code != BOOL:
        raise UnsupportedDtype(f"mask is {tensor.dtype}; it must be bool, True where a query attends: pass mask != 0")
    check_rank(tensor, "mask", 1, "flat, [query_len, seq_len] of every sequence in order")
    check_last_axis(tensor, "mask")
    return brought_to(tensor, "mask", place)


cdef double finite_number(object number, str name) except? -1:
    cdef double value
    try:
        value = number
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name} is {brief(number)}; it must be a number: {brief(error)}") from None
    if not isfinite(<float>value):
        raise UnsupportedOption(f"{name} is {value}; it must be finite, also as a float32")
    return value


cdef bint read_flag(object value, str name) except -1:
    if value is True or value is False:
        return value
    try:
        if isinstance(value, (int, np.bool_)) or getattr(value, "ndim", None) == 0:
            return bool(value)
    except Exception:
        pass
    raise UnsupportedOption(f"{name} is {brief(value)}; it must be True or False")


cdef Py_ssize_t clipped(object number, object window) except? -1:
    try:
        return PyNumber_AsSsize_t(number, NULL)
    except MemoryError:
        raise
    except Exception:  # an array of several numbers says that it is an index
        raise UnsupportedOption(f"window is {brief(window)}; it counts keys and must hold integers or None") from None


cdef int64_t read_side(object number, object window) except? -1:
    """One side of a window; -1 where it has no bound, which is also what no sequence can reach."""
    cdef int64_t side
    if number is None:
        return -1
    if not PyIndex_Check(number):
        raise UnsupportedOption(f"window is {brief(window)}; it counts keys and must hold integers or None")
    side = clipped(number, window)
    if side < -1:
        raise UnsupportedOption(f"window is {brief(window)}; a side must be at least 0, or None or -1 for no bound")
    return side if side < INT32_MAX else -1


cdef int read_window(object window, int64_t* left, int64_t* right) except -1:
    """W is (W - 1, no bound): W keys, the query's own included."""
    left[0] = right[0] = -1
    if window is None:
        return 0
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise UnsupportedOption(f"window is {brief(window)}; it must be a number of keys, or (left, right)")
        left[0] = read_side(window[0], window)
        right[0] = read_side(window[1], window)
        return 0
    if PyIndex_Check(window) and clipped(window, window) < 1:
        raise UnsupportedOption(f"window is {brief(window)}; it must be at least 1, the query's own key, or None")
    left[0] = read_side(window, window)
    left[0] -= left[0] > 0
    return 0


cdef int check_caches(Tensor key_cache, Tensor value_cache) except -1:
    cdef int i
    for i in range(3):
        if key_cache.shape_[i] != value_cache.shape_[i]:
            raise ShapeError(
                f"key_cache has shape {key_cache.shape} and value_cache {value_cache.shape}; blocks, block_size and kv "
                "heads must be equal, only head_dim may differ"
            )
    return 0


cdef int check_rank(Tensor tensor, str name, int ndim, str axes) except -1:
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} has shape {tensor.shape}; it must have {ndim} axes: {axes}")
    return 0


cdef int check_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1:
    if tensor.shape_[axis] != expected:
        raise ShapeError(f"{name} has shape {tensor.shape}; axis {axis} must have length {expected}: {reason}")
    return 0


cdef bint is_aligned(Tensor tensor) noexcept:
    """Whether all elements start at multiples of their size."""
    cdef int64_t bits = <int64_t><uintptr_t>tensor.data
    cdef int i
    for i in range(tensor.ndim):
        bits |= tensor.strides_[i]
    return not bits & (tensor.itemsize - 1)


cdef int check_aligned(Tensor tensor, str name) except -1:
    if not is_aligned(tensor):
        raise ShapeError(
            f"{name} has strides {tensor.strides} bytes at address {<uintptr_t>tensor.data:#x}; all must be multiples "
            f"of {tensor.itemsize}, the bytes of a {tensor.dtype}: pass a copy"
        )
    return 0


cdef int check_last_axis(Tensor tensor, str name) except -1:
    if not last_axis_contiguous(tensor) and size_of(tensor) > 0:
        raise ShapeError(
            f"{name} has shape {tensor.shape} and strides {tensor.strides} bytes; the last axis must be contiguous "
            f"({tensor.itemsize} bytes): pass a copy"
        )
    return 0


cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1:
    """An array of the caller's that takes a result: exactly this shape and dtype, writable, each element its own."""
    cdef int i
    cdef bint fits = result.ndim == ndim
    for i in range(ndim):
        fits = fits and result.shape_[i] == shape[i]
    if not fits:
        raise ShapeError(f"{name} has shape {result.shape}; it must be {tuple([shape[i] for i in range(ndim)])}")
    if result.dtype_code != dtype_code:
        raise UnsupportedDtype(f"{name} is {result.dtype}; it must be {DTYPES[dtype_code]}")
    check_writable(result, name)
    check_own_elements(result, name)
    return check_aligned(result, name)


cdef int check_writable(Tensor tensor, str name) except -1:
    if tensor.readonly:
        raise UnsupportedOption(f"{name} is read-only and would be written: pass a writable array")
    return 0
