"""Checks of arrays: dtype, rank, shape, strides, alignment. Errors name the argument.

A check reads C fields of a Tensor, so that it costs nanoseconds when the array is good. Only an error creates Python
objects. Contents are not checked here: host kernels check index arrays themselves, and reading device memory would
wait for the device.
"""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport FLOAT32, LAST_FLOAT, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor
from pagecore.ops.arguments._overlap cimport check_own_elements

from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption, shown


cdef Tensor foreign_tensor(object array, str name):
    try:
        return as_tensor(array)
    except PagecoreError as error:
        error.args = (f"{name}: {error}", *error.args[1:])
        raise
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{name}: the {type(array).__name__} cannot be viewed: {shown(error)}") from error


# Dtypes of torch whose elements are stored codes.
STORED_AS_BYTES = ("float4_e2m1fn_x2", "float8_e8m0fnu")
cdef str FLOATS = "float32, float16 and bfloat16 are supported: convert it"
cdef str STORED = (
    "a cache is float32, float16 or bfloat16, or holds the codes of a format in float8_e4m3fn, float8_e5m2, int8 or "
    "uint8"
)


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


cpdef str unlisted_dtype(object array):
    """Return the name of an array's dtype if the dtype table lacks it, else None."""
    try:
        name = str(array.dtype).rpartition(".")[2]
    except Exception:
        return None
    return None if name in DTYPES else name


cdef object unsupported(str name, object dtype, str supported):
    return UnsupportedDtype(f"{name} is {str(dtype)[:80]}; {supported}")


cpdef Tensor float_array(object array, str name):
    """Return a view of a float32, float16 or bfloat16 array of any rank; errors name the argument."""
    cdef Tensor tensor = listed_tensor(array, name, FLOATS)
    if tensor.dtype_code > LAST_FLOAT:
        raise unsupported(name, tensor.dtype, FLOATS)
    return tensor


cdef Tensor float32_array(object array, str name, str origin):
    cdef Tensor tensor
    try:
        tensor = any_tensor(array, name)
        if tensor.dtype_code == FLOAT32:
            return tensor
        dtype = tensor.dtype
    except UnsupportedDtype:
        dtype = unlisted_dtype(array)
        if dtype is None:
            raise
    raise unsupported(name, dtype, f"it must be float32, as returned by {origin}: convert it")


cdef Tensor stored_array(object array, str name):
    cdef Tensor tensor = listed_tensor(array, name, STORED)
    if tensor.dtype_code > UINT8:
        raise unsupported(name, tensor.dtype, STORED)
    return tensor


cdef Tensor listed_tensor(object array, str name, str supported):
    """Return a view of an array; a dtype that the table lacks is an error that lists the supported ones."""
    try:
        return any_tensor(array, name)
    except UnsupportedDtype:
        dtype = unlisted_dtype(array)
        if dtype is None:
            raise
        if dtype in STORED_AS_BYTES:
            raise UnsupportedDtype(f"{name} is {dtype}; pass it viewed as uint8, the dtype of its bytes here") from None
        raise unsupported(name, dtype, supported) from None


cdef int refuse_rank(Tensor tensor, str name, int ndim, str axes) except -1:
    raise ShapeError(f"{name} has shape {tensor.shape}; it must have {ndim} axes: {axes}")


cdef int refuse_length(Tensor tensor, str name, int axis, int64_t expected, str reason) except -1:
    raise ShapeError(f"{name} has shape {tensor.shape}; axis {axis} must have length {expected}: {reason}")


cdef int refuse_alignment(Tensor tensor, str name) except -1:
    raise ShapeError(
        f"{name} has strides {tensor.strides} bytes at address {<uintptr_t>tensor.data:#x}; all must be multiples "
        f"of {tensor.itemsize}, the bytes of a {tensor.dtype}: pass a copy"
    )


cdef int refuse_last_axis(Tensor tensor, str name) except -1:
    raise ShapeError(
        f"{name} has shape {tensor.shape} and strides {tensor.strides} bytes; the last axis must be contiguous "
        f"({tensor.itemsize} bytes): pass a copy"
    )


cdef int check_result(Tensor result, str name, int ndim, const int64_t* shape, int dtype_code) except -1:
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
        raise UnsupportedOption(
            f"{name} is read-only and the call writes to it: pass a writable array; for arrays of JAX, which are not, "
            "call the functions of pagecore.interop.jax"
        )
    return 0
