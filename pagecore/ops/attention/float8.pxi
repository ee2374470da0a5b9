"""float8 queries and outputs of attention: their scales, and the conversions around a call.

Queries in float8 become rows of 16 or 32 bits before the kernel runs, which rounds nothing. An output in float8 is
rounded once, from float32: by the kernel on CUDA, and from an array of the call on the host.
"""

from libc.math cimport isfinite
from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT8_E4M3FN, FLOAT8_E5M2, LAST_FLOAT, DType
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, new_tensor, size_of
from pagecore.ops.args cimport Format
from pagecore.ops.arguments._arguments cimport (
    Place,
    StoredCache,
    any_tensor,
    check_last_axis,
    check_rank,
    checked_scales,
    finite_number,
    float_tensor,
    is_plain,
    new_result,
)
from pagecore.ops.codecs._codecs cimport convert_rows
from pagecore.ops.cpu._cpu cimport dequantize as run_dequantize, quantize as run_quantize
from pagecore.ops.cpu.args cimport Codec

import numpy as np

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.arrays.tensors.results import lasts_for_graphs
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.arguments._arguments import unlisted_dtype

# The inverse of a smaller scale may overflow float32.
cdef double smallest_scale = np.finfo(np.float32).tiny
cdef int FLOAT16 = DTYPES.index("float16")
cdef str QUERIES = "float32, float16, bfloat16, float8_e4m3fn and float8_e5m2 are supported: convert it"


cdef bint is_float8(Tensor tensor) noexcept:
    return tensor.dtype_code == FLOAT8_E4M3FN or tensor.dtype_code == FLOAT8_E5M2


cdef bint is_half(StoredCache cache) noexcept:
    return is_plain(cache) and cache.codes.dtype_code == FLOAT16


cdef Tensor query_tensor(object query):
    """Return a view of [num_tokens, num_query_heads, head_dim] in a float dtype, or in float8."""
    cdef str axes = "[num_tokens, num_query_heads, head_dim]"
    cdef Tensor tensor
    cdef int axis
    try:
        tensor = any_tensor(query, "query")
    except UnsupportedDtype:
        dtype = unlisted_dtype(query)
        if dtype is None:
            raise
        raise UnsupportedDtype(f"query is {dtype[:80]}; {QUERIES}") from None
    if tensor.dtype_code <= LAST_FLOAT:
        return float_tensor(tensor, "query", 3, 1, axes)
    if not is_float8(tensor):
        raise UnsupportedDtype(f"query is {tensor.dtype}; {QUERIES}")
    check_rank(tensor, "query", 3, axes)
    for axis in range(1, 3):
        if tensor.shape_[axis] == 0:
            raise ShapeError(f"query has shape {tensor.shape}, {axes}; axis {axis} must have at least 1 element")
    check_last_axis(tensor, "query")
    return tensor


cdef int output_dtype(Tensor out, object output_scale, Tensor query, StoredCache keys, StoredCache values) except -1:
    """Return the code of the dtype that the output has, or must have."""
    cdef int default = query.dtype_code
    if is_float8(query):
        default = FLOAT16 if is_half(keys) and is_half(values) else LAST_FLOAT  # bfloat16
    if out is None:
        return default if output_scale is None else FLOAT8_E4M3FN
    cdef int given = out.dtype_code
    if given == FLOAT8_E4M3FN:
        return given
    if output_scale is not None:
        raise UnsupportedOption(
            f"output_scale is given and out is {DTYPES[given]}; only an output in float8_e4m3fn has a scale: leave "
            "output_scale out, or pass an array of that dtype"
        )
    return given if is_float8(query) and given <= LAST_FLOAT else default


cdef int compute_dtype(Tensor query, StoredCache keys, int output) noexcept:
    """Return the dtype of the query rows that kernels read: of a float8 query, one that suits output and cache."""
    if not is_float8(query):
        return query.dtype_code
    if output <= LAST_FLOAT:
        return output
    return keys.codes.dtype_code if is_plain(keys) else LAST_FLOAT


# ---- scales

cdef Tensor read_query_scale(object scale, Tensor query, int64_t num_kv_heads, double* factor, const Place* place):
    """Multiply `factor` by one number, or return numbers of heads; None if there are none."""
    cdef float number
    if scale is None:
        return None
    if not is_float8(query):
        raise UnsupportedOption(
            f"query_scale is given and query is {query.dtype}; only a float8 query has a scale: leave query_scale out, "
            "or multiply scale by it"
        )
    cdef Tensor numbers = positive_scales(scale, "query_scale", num_kv_heads, &number, place)
    factor[0] = finite_number(factor[0] * number, "scale times query_scale")
    return numbers


cdef Tensor score_factors(double scale, Tensor key_scales, Tensor query_scales):
    """Return products of numbers of heads, None for ones; raise UnsupportedOption if they or the scale overflow."""
    cdef Tensor products = product_of(key_scales, query_scales)
    if products is None:
        return None
    for head, number in enumerate(products.numpy().tolist()):
        if not isfinite(<float>number) or not isfinite(<float>(scale * number)):
            raise UnsupportedOption(
                f"the product of scale, query_scale and key_scale is {scale * number} for head {head}; it must be "
                "finite as a float32"
            )
    return products


cdef Tensor read_output_scale(object scale, double* factor, const Place* place):
    """Set `factor` to the inverse of one number, or return an array of one number, which is on CUDA."""
    cdef float number = 1.0
    cdef Tensor numbers = None if scale is None else positive_scales(scale, "output_scale", 1, &number, place)
    factor[0] = 1.0 / number
    return numbers


cdef Tensor positive_scales(object scale, str name, int64_t num_heads, float* number, const Place* place):
    """Return numbers of heads, or set `number` if all heads have the same; numbers on CUDA are not read."""
    number[0] = 1.0
    if isinstance(scale, (float, int)):
        number[0] = <float>finite_number(scale, name)
        check_positive(number[0], name)
        return None
    cdef Tensor scales = checked_scales(scale, name, num_heads, False, place)
    if scales is None or scales.device_type != CPU:  # all are 1, or on the device
        return scales
    values = scales.numpy().astype(np.float32)
    check_positive(values.min(), name)
    if values.min() == values.max():
        number[0] = values[0]
        return None
    return scales


cdef int check_positive(float number, str name) except -1:
    if not number >= smallest_scale:
        raise UnsupportedOption(f"{name} holds {number}; as a float32 it must be {smallest_scale:.3g} or more")
    return 0


cdef Tensor product_of(Tensor a, Tensor b):
    """Return the products of numbers of heads on the host; None means ones."""
    if a is None or b is None:
        return b if a is None else a
    with np.errstate(all="ignore"):
        return as_tensor(a.numpy().astype(np.float32) * b.numpy().astype(np.float32))


# ---- conversions

cdef Tensor widened(Tensor codes, int dtype_code, object example, const Place* place):
    """Return a float8 query in a float dtype that holds every code; a query in that dtype itself."""
    cdef Tensor numbers
    if codes.dtype_code == dtype_code:
        return codes
    if place.device_type == CPU:
        numbers = new_tensor(3, codes.shape_, dtype_code, False)
        convert_on_host(numbers, codes, NULL, False)
        return numbers
    if runtime().is_capturing(place.stream) and not lasts_for_graphs(example):
        raise DeviceError(
            f"stream {place.stream:#x} is being captured, and a call with a float8 query frees its converted rows when "
            "it returns, before the graph runs: capture the call with torch tensors, or pass the query in bfloat16"
        )
    numbers = new_result(3, codes.shape_, dtype_code, example, place)
    if size_of(numbers) > 0:
        convert_rows(format_of_codes(codes), numbers, codes, None, None, False, False, place)
    return numbers


cdef int narrow(Tensor numbers, Tensor codes, double factor) except -1:
    """Write float32 numbers times a factor as float8 codes, on the host."""
    cdef float divisor = <float>(1.0 / factor)
    return convert_on_host(numbers, codes, &divisor, True)


cdef Format format_of_codes(Tensor codes) noexcept:
    return Format.E4M3 if codes.dtype_code == FLOAT8_E4M3FN else Format.E5M2


cdef int convert_on_host(Tensor numbers, Tensor codes, const float* divisor, bint quantizes) except -1:
    """Convert contiguous numbers to codes of any strides, or back."""
    cdef Codec codec
    cdef int64_t num_tokens = codes.shape_[0], num_heads = codes.shape_[1], step = codes.strides_[1], token
    cdef bint follows = num_tokens == 1 or num_heads == 1 or codes.strides_[0] == num_heads * step
    if size_of(numbers) == 0:
        return 0
    codec.format, codec.type = format_of_codes(codes), <DType>numbers.dtype_code
    codec.dim, codec.numbers_stride = codes.shape_[2], numbers.strides_[1]
    codec.codes_stride = codes.strides_[0] if num_heads == 1 else step
    codec.num_rows = num_tokens * num_heads if follows else num_heads
    if divisor != NULL:
        codec.factors, codec.num_factors = divisor, 1
    for token in range(1 if follows else num_tokens):
        codec.numbers = numbers.data + token * numbers.strides_[0]
        codec.codes = codes.data + token * codes.strides_[0]
        if quantizes:
            run_quantize(codec)
        else:
            run_dequantize(codec)
    return 0
