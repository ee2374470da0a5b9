"""Planes of a latent cache: their formats, and checks of shape, dtype and alignment."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport LAST_FLOAT, DType, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.args cimport TokenArray
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    check_aligned,
    check_last_axis,
    check_length,
    check_place,
    check_rank,
    finite_number,
    float_tensor,
)
from pagecore.ops.cpu.latent.latent cimport (
    LatentCache,
    LatentFormat,
    kFp8RowBytes,
    kLatentWidthMax,
    kNvfp4RowBytes,
    kPackedLatentDim,
    kPackedRopeDim,
    latent_row_width,
)

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown

cdef extern from "pagecore/arrays/dtypes/dtype.hpp" nogil:
    enum:
        E4M3_CODE "static_cast<int>(pagecore::DType::F8E4M3FN)"

# Bytes of the rows of packed formats, which hold latent, rope and scales.
LATENT_ROW_BYTES = {"fp8_ds_mla": kFp8RowBytes, "nvfp4_ds_mla": kNvfp4RowBytes}
# Names of formats of latent caches.
LATENT_FORMATS = ("float8_e4m3fn", *LATENT_ROW_BYTES)
# Numbers of a row of a packed format: latent and rope.
PACKED_LATENT_DIMS = (kPackedLatentDim, kPackedRopeDim)
# Kernels read vectors of a packed row.
cdef int64_t ROW_ALIGNMENT = 16


cdef class LatentPlanes:
    pass


cdef LatentPlanes latent_planes(
        object latent_cache, object rope_cache, object format, int64_t latent_dim, int64_t rope_dim,
        const Place* place):
    cdef LatentPlanes planes = LatentPlanes.__new__(LatentPlanes)
    cdef LatentCache native
    cdef bint whole = rope_dim < 0
    planes.latent = plane(latent_cache, "latent_cache", place)
    planes.rope = None if rope_cache is None else plane(rope_cache, "rope_cache", place, "; pass None without rope")
    planes.format = format_of(planes.latent, format)
    planes.has_factor = planes.format == "float8_e4m3fn"
    native.num_blocks, native.block_size = planes.latent.shape_[0], planes.latent.shape_[1]
    native.block_stride, native.token_stride = planes.latent.strides_[0], planes.latent.strides_[1]
    native.latent = planes.latent.data
    if planes.format in LATENT_ROW_BYTES:
        check_packed(planes, latent_dim, rope_dim)
        native.format = LatentFormat.Fp8DsMla if planes.format == "fp8_ds_mla" else LatentFormat.Nvfp4DsMla
        native.latent_dim, native.rope_dim = kPackedLatentDim, kPackedRopeDim
        native.rope, native.rope_block_stride, native.rope_token_stride = (
            native.latent, native.block_stride, native.token_stride)
        planes.native = native
        return planes
    native.format = LatentFormat.E4M3 if planes.has_factor else LatentFormat.Plain
    native.type = <DType>planes.latent.dtype_code
    native.latent_dim = planes.latent.shape_[2] if whole else latent_dim
    native.rope_dim = rope_dim
    if planes.rope is None:
        native.rope_dim = 0 if whole else rope_dim
        check_length(
            planes.latent, "latent_cache", 2, native.latent_dim + native.rope_dim,
            "latent_dim + rope_dim without rope_cache")
        native.rope = native.latent + native.latent_dim * planes.latent.itemsize
        native.rope_block_stride, native.rope_token_stride = native.block_stride, native.token_stride
    else:
        native.rope_dim = planes.rope.shape_[2] if whole else rope_dim
        check_rope(planes, native.latent_dim, native.rope_dim)
        native.rope = planes.rope.data
        native.rope_block_stride, native.rope_token_stride = planes.rope.strides_[0], planes.rope.strides_[1]
    if latent_row_width(native) > kLatentWidthMax:
        raise ShapeError(
            f"a row has {native.latent_dim} latent and {native.rope_dim} rope numbers; padded they must not exceed "
            f"{kLatentWidthMax}: split the rows among caches"
        )
    planes.native = native
    return planes


cdef Tensor plane(object array, str name, const Place* place, str remedy=""):
    cdef Tensor tensor = any_tensor(array, name)
    check_place(tensor, name, place)
    check_rank(tensor, name, 3, "[num_blocks, block_size, dim]")
    if tensor.shape_[1] == 0 or tensor.shape_[2] == 0:
        raise ShapeError(f"{name} has shape {tensor.shape}; block_size and dim must be at least 1{remedy}")
    check_last_axis(tensor, name)
    check_aligned(tensor, name)
    return tensor


cdef str format_of(Tensor latent, object format):
    """Return the format of a plane by its dtype and width, "" for plain numbers; refuse another `format`."""
    cdef str found = None
    if format is not None and not (isinstance(format, str) and format in LATENT_FORMATS):
        raise UnsupportedOption(f"format is {shown(format)}; use one of {', '.join(LATENT_FORMATS)}, or None")
    if latent.dtype_code <= LAST_FLOAT:
        found = ""
    elif latent.dtype_code == E4M3_CODE:
        found = "float8_e4m3fn"
    elif latent.dtype_code == UINT8:
        for name, num_bytes in LATENT_ROW_BYTES.items():
            if latent.shape_[2] == num_bytes:
                found = name
        if found is None:
            raise ShapeError(
                f"latent_cache is uint8 with rows of {latent.shape_[2]} bytes; a row of fp8_ds_mla has {kFp8RowBytes} "
                f"and one of nvfp4_ds_mla {kNvfp4RowBytes}; view bytes that are float8 codes as float8_e4m3fn"
            )
    else:
        raise UnsupportedDtype(
            f"latent_cache is {latent.dtype}; use float32, float16, bfloat16 or float8_e4m3fn, or uint8 for the rows "
            "of fp8_ds_mla and nvfp4_ds_mla"
        )
    if format is not None and format != found:
        stored = found or f"plain {latent.dtype}"
        raise UnsupportedOption(f"format is {format!r}, but latent_cache is {stored} by its dtype; leave format out")
    return found


cdef int check_packed(LatentPlanes planes, int64_t latent_dim, int64_t rope_dim) except -1:
    cdef Tensor latent = planes.latent
    if planes.rope is not None:
        raise UnsupportedOption(f"rope_cache is given, but a row of {planes.format} holds rope as well; leave it out")
    if rope_dim >= 0 and (latent_dim != kPackedLatentDim or rope_dim != kPackedRopeDim):
        raise ShapeError(
            f"a row has {latent_dim} latent and {rope_dim} rope numbers; {planes.format} stores {kPackedLatentDim} "
            f"and {kPackedRopeDim}"
        )
    if (<int64_t>latent.data | latent.strides_[0] | latent.strides_[1]) % ROW_ALIGNMENT:
        raise ShapeError(
            f"latent_cache has strides {latent.strides} bytes at address {<uintptr_t>latent.data:#x}; rows of "
            f"{planes.format} must start at multiples of {ROW_ALIGNMENT} bytes: pass a copy, or pad the plane"
        )
    return 0


cdef int check_rope(LatentPlanes planes, int64_t latent_dim, int64_t rope_dim) except -1:
    cdef Tensor latent = planes.latent, rope = planes.rope
    check_length(latent, "latent_cache", 2, latent_dim, "latent_dim, with rope_cache for the rest")
    check_length(rope, "rope_cache", 2, rope_dim, "rope_dim")
    check_length(rope, "rope_cache", 0, latent.shape_[0], "the blocks of latent_cache")
    check_length(rope, "rope_cache", 1, latent.shape_[1], "the block_size of latent_cache")
    if rope.dtype_code != latent.dtype_code:
        raise UnsupportedDtype(f"latent_cache is {latent.dtype} and rope_cache {rope.dtype}; both must have one dtype")
    return 0


cdef Tensor rope_part(object array, str name, str axes, Tensor latent, const Place* place):
    cdef ArrayView none = latent.view()
    cdef Tensor given
    none.shape[latent.ndim - 1] = 0
    if array is not None:
        given = float_tensor(array, name, latent.ndim, latent.ndim, axes)
        check_place(given, name, place)
        if given.shape != tuple([none.shape[i] for i in range(none.ndim)]) or given.dtype_code != latent.dtype_code:
            return given
    return tensor_of(none, latent)  # an array without numbers may have no address


cdef double latent_factor(object scale, str name, LatentPlanes planes) except? -1.0:
    if scale is None:
        return 1.0
    cdef double factor = finite_number(scale, name)
    if not <float>factor > 0.0:
        raise UnsupportedOption(f"{name} is {factor}; expected a number that is finite and above 0 as a float32")
    if factor != 1.0 and not planes.has_factor:
        stored = planes.format or "plain numbers"
        raise UnsupportedOption(f"{name} is {factor}, but a cache of {stored} takes no factor; leave it out")
    return factor


cdef TokenArray one_head(Tensor rows) noexcept:
    cdef TokenArray tokens
    tokens.data = rows.data
    tokens.type = <DType>rows.dtype_code
    tokens.num_tokens, tokens.num_heads, tokens.dim = rows.shape_[0], 1, rows.shape_[rows.ndim - 1]
    tokens.token_stride = tokens.head_stride = rows.strides_[0]
    return tokens


cdef Tensor columns_of(Tensor tensor, int64_t begin, int64_t count):
    cdef ArrayView view = tensor.view()
    cdef int last = tensor.ndim - 1
    view.data += begin * tensor.itemsize
    view.ndim = tensor.ndim + 1
    view.shape[last], view.strides[last] = 1, count * tensor.itemsize
    view.shape[last + 1], view.strides[last + 1] = count, tensor.itemsize
    return tensor_of(view, tensor)
