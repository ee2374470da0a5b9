"""Options and per-head numbers: scales, sinks, slopes, sizes, flags."""

from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, int64_t

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, CPU, FLOAT32
from pagecore.arrays.tensors._tensor cimport Tensor, new_tensor, size_of, tensor_of

from operator import index

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown

# A score divided by a smaller cap may overflow float32.
cdef double smallest_softcap = 1e-30
SMALLEST_SOFTCAP = smallest_softcap


# ---- numbers of heads

cdef Tensor head_numbers(object array, str name, int64_t num_heads, const Place* place):
    return numbers_to_device(numbers_of_heads(array, name, num_heads, place), name, place)


cdef Tensor numbers_to_device(Tensor tensor, str name, const Place* place):
    """Copy host numbers to the device of the call, as float32."""
    if tensor is None or place.device_type == tensor.device_type:
        return tensor
    return to_device(tensor if tensor.dtype_code == FLOAT32 else copy_numbers(tensor, name), name, place)


cdef Tensor numbers_of_heads(object array, str name, int64_t num_heads, const Place* place):
    cdef Tensor tensor = given_numbers(array, name, place)
    check_heads(tensor, name, num_heads)
    return tensor


cdef int check_heads(Tensor tensor, str name, int64_t num_heads) except -1:
    if tensor.ndim != 1 or tensor.shape_[0] != num_heads:
        raise ShapeError(f"{name} has shape {tensor.shape}; it must be [{num_heads}], one number for each head")
    return 0


cdef Tensor given_numbers(object array, str name, const Place* place):
    """Return the numbers where the caller has them: on the host or on the device of the call."""
    cdef Tensor tensor = viewed(array, name)
    if tensor is not None and tensor.device_type != CPU:
        check_reachable(tensor, name, place)
        if tensor.dtype_code != FLOAT32:
            raise UnsupportedDtype(f"{name} is {tensor.dtype} on {tensor.device}; it must be float32 there: convert it")
        check_last_axis(tensor, name)
        check_aligned(tensor, name)
    elif tensor is None or tensor.dtype_code > LAST_FLOAT or not is_aligned(tensor):
        tensor = copy_numbers(array, name)
    return tensor


cdef Tensor copy_numbers(object array, str name):
    """Return a copy of numbers of any dtype as contiguous float32."""
    try:
        if isinstance(array, (list, tuple)) and any([is_bool(each) for each in array]):
            raise TypeError("a bool is not a number")
        values = np.asarray(array.numpy() if type(array) is Tensor else array)
        if values.dtype.kind not in "iufV" or values.dtype.names is not None:
            raise TypeError(f"{values.dtype} is not supported")
        with np.errstate(all="ignore", over="raise"):
            numbers = np.array(values, dtype=np.float32, order="C")
    except MemoryError:
        raise
    except FloatingPointError as error:
        largest = values.flat[np.nanargmax(np.abs(values))]
        raise UnsupportedOption(f"{name} holds {largest}; it must be finite as a float32") from error
    except Exception as error:
        raise UnsupportedDtype(f"{name} must be numbers that float32 can hold: {shown(error)}") from error
    return any_tensor(numbers, name)


# ---- scales

cdef Tensor scale_numbers(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place):
    return numbers_to_device(checked_scales(scale, name, num_kv_heads, divides, place), name, place)


cdef Tensor divisors(object scale, str name, int64_t num_kv_heads, const Place* place, float* divisor):
    divisor[0] = 1.0
    if scale is None:
        return None
    if is_one_number(scale, name):
        divisor[0] = checked_scale(scale, name, True)
        return None
    return scale_numbers(scale, name, num_kv_heads, True, place)


cdef bint is_one_number(object scale, str name) except -1:
    """Return True if the host can read `scale` as one number. A number on a device is not read: that would wait."""
    if isinstance(scale, (float, int)):
        return True
    try:
        if getattr(scale, "ndim", 1) != 0:
            return False
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name}: the {type(scale).__name__} cannot be read: {shown(error)}") from error
    cdef Tensor tensor = viewed(scale, name)
    return tensor is None or tensor.device_type == CPU


cdef Tensor checked_scales(object scale, str name, int64_t num_kv_heads, bint divides, const Place* place):
    """Return the scales where the caller has them; None if they are all 1."""
    cdef Tensor tensor
    if scale is None:
        return None
    if is_one_number(scale, name):
        return repeated_scale(checked_scale(scale, name, divides), num_kv_heads)
    tensor = given_numbers(scale, name, place)
    if tensor.ndim < 2 and size_of(tensor) == 1:  # a factor of a layer in vLLM
        if tensor.device_type == CPU:
            return repeated_scale(checked_scale(tensor.numpy()[0], name, divides), num_kv_heads)
        return repeated_number(tensor, num_kv_heads)
    check_heads(tensor, name, num_kv_heads)
    if tensor.device_type == CPU:
        for each in tensor.numpy().tolist():
            check_scale(each, name, divides)
    return tensor


cdef Tensor repeated_scale(double value, int64_t num_kv_heads):
    """Return one scale for each head; None for 1."""
    cdef int64_t i
    if value == 1.0:
        return None
    cdef Tensor tensor = new_tensor(1, &num_kv_heads, FLOAT32, False)
    for i in range(num_kv_heads):
        (<float*>tensor.data)[i] = <float>value
    return tensor


cdef Tensor repeated_number(Tensor number, int64_t num_heads):
    """Return a view of one number for each head."""
    cdef ArrayView view = number.view()
    view.ndim, view.shape[0], view.strides[0] = 1, num_heads, 0
    return tensor_of(view, number)


cdef int scale_stride(Tensor scales) noexcept:
    return 0 if scales is not None and scales.strides_[0] == 0 else 1


cdef double checked_scale(object scale, str name, bint divides) except? -1:
    cdef double value = finite_number(scale, name)
    check_scale(value, name, divides)
    return value


cdef int check_scale(double value, str name, bint divides) except -1:
    if not isfinite(<float>value) or divides and <float>value == 0.0:
        limit = "finite, and not 0 to be divided by" if divides else "finite"
        raise UnsupportedOption(f"{name} holds {value}; as a float32 it must be {limit}")
    return 0


# ---- options

cdef double finite_number(object number, str name) except? -1:
    cdef double value = 0.0
    cdef bint refused
    try:
        refused = is_bool(number)
        if not refused:
            value = number
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name} is {shown(number)}; it must be a number: {shown(error)}") from error
    if refused:
        raise UnsupportedOption(f"{name} is {shown(number)}; it must be a number, not a bool")
    if not isfinite(<float>value):
        raise UnsupportedOption(f"{name} is {value}; it must be finite as a float32")
    return value


cdef bint is_bool(object number) except -1:
    """Return True for bools of Python, and for arrays of no axes that hold one."""
    if isinstance(number, (float, int)):
        return isinstance(number, bool)
    return str(getattr(number, "dtype", "")).removeprefix("torch.") == "bool"


cdef int64_t read_size(object value, str name, int64_t least) except -1:
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is not an integer")
        number = index(value)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"{name} is {shown(value)}; it must be a whole number") from error
    if not least <= number <= INT32_MAX:
        raise ShapeError(f"{name} is {shown(number)}; it must be {least} to {INT32_MAX}")
    return number


cdef int read_choice(object value, str name, tuple options) except -1:
    if not isinstance(value, str) or value not in options:
        raise UnsupportedOption(f"{name} is {shown(value)}; use {' or '.join([repr(each) for each in options])}")
    return options.index(value)


cdef double read_softcap(object softcap) except? -1:
    cdef double cap = finite_number(softcap, "softcap")
    if cap < 0.0:
        raise UnsupportedOption(f"softcap is {cap}; it must be at least 0, where 0 disables it")
    if cap != 0.0 and cap < smallest_softcap:
        raise UnsupportedOption(f"softcap is {cap}; it must be at least {smallest_softcap}, or 0 for no cap")
    return cap


cdef bint read_flag(object value, str name) except -1:
    cause = None
    if value is True or value is False:
        return value
    try:
        if isinstance(value, int) or getattr(value, "ndim", None) == 0:
            number = value if isinstance(value, int) else value.item()
            if isinstance(number, int) and 0 <= number <= 1:  # a bool, or the 0 or 1 of a config
                return number
    except MemoryError:
        raise
    except Exception as error:
        cause = error
    raise UnsupportedOption(f"{name} is {shown(value)}; it must be True or False") from cause
