"""Rows of the packed latent formats, for quantize and dequantize."""

from pagecore.arrays.dtypes.codes cimport UINT8, DType
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.cpu._cpu cimport convert_latent_rows as run_convert_latents
from pagecore.ops.cpu.codecs.conversions cimport LatentConversion
from pagecore.ops.cpu.latent.latent cimport LatentCache, LatentFormat, kFp8RowBytes, kPackedLatentDim, kPackedRopeDim

from pagecore.ops.latent._latent import LATENT_ROW_BYTES as _ROW_BYTES


cdef bint is_latent_format(object name) except -1:
    return isinstance(name, str) and name in _ROW_BYTES


cdef LatentCache cache_of(Tensor rows) noexcept:
    """Return rows [n, row] as a cache of n blocks of one token."""
    cdef LatentCache cache
    cache.latent, cache.block_stride, cache.num_blocks = rows.data, rows.strides_[0], rows.shape_[0]
    cache.rope, cache.rope_block_stride = rows.data, rows.strides_[0]
    cache.block_size, cache.latent_dim, cache.rope_dim = 1, kPackedLatentDim, kPackedRopeDim
    if rows.dtype_code == UINT8:
        cache.format = (
            LatentFormat.Fp8DsMla if rows.shape_[1] == kFp8RowBytes else LatentFormat.Nvfp4DsMla)
        return cache
    cache.type = <DType>rows.dtype_code
    cache.rope = rows.data + kPackedLatentDim * rows.itemsize
    return cache


cdef int convert_latents(Tensor source, Tensor target) except -1:
    cdef LatentConversion rows
    rows.source, rows.target = cache_of(source), cache_of(target)
    return run_convert_latents(rows)
