"""Blocks that are converted between formats: the formats, factors and shapes of both sides, checked."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, UINT8
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.args cimport Cache, Format, cache_array
from pagecore.ops.arguments._arguments cimport (
    Place,
    StoredCache,
    check_length,
    divisors,
    given_factor,
    is_plain,
    native_cache,
    scale_numbers,
    scale_stride,
    stored_cache,
    viewed,
)
from pagecore.ops.cpu.codecs.conversions cimport BlockConversion, LatentConversion
from pagecore.ops.cpu.latent.latent cimport kPackedLatentDim, kPackedRopeDim
from pagecore.ops.cuda.codecs._codecs cimport DeviceConversions, Factors
from pagecore.ops.cuda.latent._latent cimport LatentPlaneSizes
from pagecore.ops.latent._latent cimport LatentPlanes, columns_of, latent_factor, latent_planes

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops.latent._latent import LATENT_ROW_BYTES as _ROW_BYTES


cdef class Conversions:
    def __cinit__(self):
        self.source_planes, self.target_planes, self.copied, self.kept = [], [], [], []
        self.on_device = DeviceConversions()

    cdef bint is_empty(self):
        return self.caches.empty() and self.latents.empty() and self.on_device.is_empty()


cdef bint has_packed_rows(Tensor latents) except -1:
    return latents.ndim == 3 and latents.dtype_code == UINT8 and latents.shape_[2] in _ROW_BYTES.values()


cdef bint are_latents(Tensor source, Tensor target) except -1:
    if not (has_packed_rows(source) or has_packed_rows(target)) or source.ndim != target.ndim:
        return False
    return source.dtype_code != target.dtype_code or source.shape_[2] != target.shape_[2]


cdef bint add_caches(
        Conversions conversions, object source, object source_scale, object target, object target_scale,
        const Place* place) except -1:
    cdef StoredCache sources, targets
    source_plane, source_factor = plane_and_factor(source_scale, "source_scale")
    target_plane, target_factor = plane_and_factor(target_scale, "target_scale")
    sources = stored_cache(source, source_plane, "source", place)
    targets = stored_cache(target, target_plane, "target", place)
    check_equal_rows(sources, targets)
    source_given = given_of(sources, source_plane, source_factor, "source")
    target_given = given_of(targets, target_plane, target_factor, "target")
    if place.device_type == CPU:
        add_on_host(conversions, sources, source_given, targets, target_given, place)
    else:
        add_on_device(conversions, sources, source_given, targets, target_given, place)
    if is_plain(sources) and is_plain(targets):
        return False
    if sources.plane is not None:
        conversions.source_planes.append(sources.plane)
    if targets.plane is not None:
        conversions.target_planes.append(targets.plane)
    return True


cdef int add_on_host(
        Conversions conversions, StoredCache sources, object source_given, StoredCache targets, object target_given,
        const Place* place) except -1:
    cdef Tensor source_factors = given_factors(sources, source_given, "source_scale", place)
    cdef Tensor target_factors = given_factors(targets, target_given, "target_scale", place)
    cdef BlockConversion conversion
    if is_plain(sources) and is_plain(targets):
        return 0
    conversion.source, conversion.target = native_cache(sources), native_cache(targets)
    if source_factors is not None:
        conversion.source_factors = <const float*>source_factors.data
    if target_factors is not None:
        conversion.target_factors = <const float*>target_factors.data
    conversion.copies = sources.format == targets.format and are_equal(source_factors, target_factors)
    conversions.caches.push_back(conversion)
    conversions.kept.append((sources, targets, source_factors, target_factors))
    return 0


cdef int add_on_device(
        Conversions conversions, StoredCache sources, object source_given, StoredCache targets, object target_given,
        const Place* place) except -1:
    cdef Factors source_factors, target_factors
    cdef int64_t heads = sources.codes.shape_[2]
    held = (
        device_factors(&source_factors, source_given, "source_scale", heads, place),
        device_factors(&target_factors, target_given, "target_scale", heads, place))
    if is_plain(sources) and is_plain(targets):
        return 0
    conversions.kept.append((sources, targets, held))
    cdef bint is_equal = held[0] is None and held[1] is None and source_factors.for_all == target_factors.for_all
    if sources.format == targets.format and (is_equal or source_given is target_given):
        conversions.copied.append((sources.codes, targets.codes))
        if sources.plane is not None:
            conversions.copied.append((whole_plane(sources.plane), whole_plane(targets.plane)))
        return 0
    return conversions.on_device.add(
        native_cache(sources), source_factors, native_cache(targets), target_factors, False)


cdef Tensor device_factors(Factors* factors, object given, str name, int64_t heads, const Place* place):
    cdef Tensor numbers = divisors(given, name, heads, place, &factors.for_all)
    factors.data = NULL
    factors.stride = scale_stride(numbers)
    if numbers is not None:
        factors.data = numbers.data
    return numbers


cdef Tensor whole_plane(Tensor plane):
    """Return a plane of scales with an axis of groups."""
    cdef ArrayView view = plane.view()
    if plane.ndim == 4:
        return plane
    view.ndim, view.shape[3], view.strides[3] = 4, 1, plane.itemsize
    return tensor_of(view, plane)


cdef tuple plane_and_factor(object scale, str name):
    """Return the two parts of a pair (plane, factor); (scale, None) for anything else."""
    if not (isinstance(scale, tuple) and len(scale) == 2):
        return scale, None
    cdef Tensor plane = viewed(scale[0], name) if not isinstance(scale[0], (int, float)) else None
    return scale if plane is not None and plane.ndim > 2 else (scale, None)


cdef object given_of(StoredCache cache, object scale, object factor, str label):
    """Return the given factor of a cache: a number, one for each head, or None."""
    if factor is not None and cache.format != Format.NVFP4:
        raise UnsupportedOption(
            f"{label}_scale is a pair (plane, factor), but {label}_cache is not nvfp4; pass the plane alone")
    if is_plain(cache) and scale is not None and not (isinstance(scale, (int, float)) and scale == 1):
        raise UnsupportedOption(f"{label}_scale is given, but {label}_cache has no format; leave it out")
    return given_factor(cache, scale, 1.0 if factor is None else factor, label)


cdef Tensor given_factors(StoredCache cache, object given, str name, const Place* place):
    """Return the given factors as contiguous float32, one for each head; None if all are 1."""
    cdef Tensor numbers = scale_numbers(given, name, cache.codes.shape_[2], True, place)
    return None if numbers is None else as_tensor(np.ascontiguousarray(numbers.numpy(), np.float32))


cdef bint are_equal(Tensor a, Tensor b) except -1:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a.numpy(), b.numpy()))


cdef int check_equal_rows(StoredCache source, StoredCache target) except -1:
    cdef int i
    for i in range(1, 3):
        if source.codes.shape_[i] != target.codes.shape_[i]:
            raise ShapeError(
                f"source_cache has shape {source.codes.shape} and target_cache {target.codes.shape}; block_size and kv "
                "heads must be equal")
    if source.dim != target.dim:
        raise ShapeError(
            f"source_cache has rows of {source.dim} numbers and target_cache of {target.dim}; the head_dim must be "
            "equal")
    return 0


cdef int add_latents(
        Conversions conversions, object source, object source_scale, object target, object target_scale,
        const Place* place) except -1:
    cdef LatentPlanes sources = latents_of(source, target, "source", place)
    cdef LatentPlanes targets = latents_of(target, source, "target", place)
    check_length(targets.latent, "target_cache", 1, sources.native.block_size, "the block_size of source_cache")
    cdef LatentConversion conversion
    conversion.source, conversion.target = sources.native, targets.native
    conversion.source_factor = <float>latent_factor(source_scale, "source_scale", sources)
    conversion.target_factor = <float>latent_factor(target_scale, "target_scale", targets)
    if sources.native.latent_dim + sources.native.rope_dim != targets.native.latent_dim + targets.native.rope_dim:
        raise ShapeError(
            f"source_cache has shape {sources.latent.shape} and target_cache {targets.latent.shape}; rows must have "
            "equally many numbers")
    if place.device_type != CPU:
        add_latents_on_device(conversions, sources, targets, conversion)
        return 0
    conversions.latents.push_back(conversion)
    conversions.kept.append((sources, targets))
    return 0


cdef int add_latents_on_device(
        Conversions conversions, LatentPlanes sources, LatentPlanes targets,
        const LatentConversion& conversion) except -1:
    cdef Factors source_factor, target_factor
    cdef LatentPlaneSizes source_sizes = sizes_of(sources), target_sizes = sizes_of(targets)
    conversions.kept.append((sources, targets))
    if sources.format == targets.format and conversion.source_factor == conversion.target_factor:
        conversions.copied.append((sources.latent, targets.latent))
        return 0
    if sources.format in _ROW_BYTES or targets.format in _ROW_BYTES:
        return conversions.on_device.add_latents(
            sources.latent, &source_sizes, conversion.source_factor, targets.latent, &target_sizes,
            conversion.target_factor)
    # Rows of numbers or of e4m3 codes are those of a cache of one head.
    source_factor.data = target_factor.data = NULL
    source_factor.stride = target_factor.stride = 1
    source_factor.for_all, target_factor.for_all = conversion.source_factor, conversion.target_factor
    return conversions.on_device.add(
        one_head_of(sources), source_factor, one_head_of(targets), target_factor, False)


cdef LatentPlaneSizes sizes_of(LatentPlanes planes) noexcept:
    cdef LatentPlaneSizes sizes
    sizes.format = <int>planes.native.format
    sizes.latent_dim, sizes.rope_dim = planes.native.latent_dim, planes.native.rope_dim
    return sizes


cdef Cache one_head_of(LatentPlanes planes):
    cdef Cache cache = cache_array(columns_of(planes.latent, 0, planes.latent.shape_[2]))
    cache.format = Format.E4M3 if planes.has_factor else Format.Plain
    return cache


cdef LatentPlanes latents_of(object array, object other, str name, const Place* place):
    """Return the planes of latents; a row of numbers is 512 and 64 of them if the other array has packed rows."""
    cdef Tensor view = viewed(other, "cache")
    cdef bint packed = view is not None and has_packed_rows(view)
    try:
        if packed:
            return latent_planes(array, None, None, kPackedLatentDim, kPackedRopeDim, place)
        return latent_planes(array, None, None, 0, -1, place)
    except (ShapeError, UnsupportedDtype, UnsupportedOption) as error:
        raise type(error)(f"{name}: {error}") from None
