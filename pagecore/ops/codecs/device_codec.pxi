"""quantize and dequantize on CUDA: rows of any strides as blocks of tokens and heads, converted block by block."""

from itertools import product

from libc.stdint cimport int64_t

from pagecore.arrays.tensors._tensor cimport Tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.args cimport Cache, Format, cache_array
from pagecore.ops.arguments._arguments cimport Place, divisors, note_written, scale_stride
from pagecore.ops.cpu.latent.latent cimport kPackedLatentDim, kPackedRopeDim
from pagecore.ops.cuda.codecs._codecs cimport DeviceConversions, Factors
from pagecore.ops.cuda.latent._latent cimport LatentPlaneSizes


cdef int convert_rows(
        Format kind, Tensor numbers, Tensor codes, Tensor scales, object factor, bint is_4over6, bint quantizes,
        const Place* place) except -1:
    cdef Factors given, none
    cdef Cache plain, coded
    cdef Tensor scale_part
    cdef int64_t heads = numbers.shape_[numbers.ndim - 2] if numbers.ndim > 1 else 1
    cdef Tensor factors = divisors(factor, "scale", heads, place, &given.for_all)
    given.data = none.data = NULL
    none.for_all = 1.0
    given.stride, none.stride = scale_stride(factors), 1
    if factors is not None:
        given.data = factors.data
    tensors = [numbers, codes] if scales is None else [numbers, codes, scales]
    for parts in blocks_of(tensors, True):
        plain, coded = cache_array(parts[0]), cache_array(parts[1])
        coded.dim, coded.format = plain.dim, kind
        if scales is not None:
            scale_part = parts[2]
            coded.scales.data = scale_part.data
            coded.scales.block_stride, coded.scales.token_stride = scale_part.strides_[0], scale_part.strides_[1]
            coded.scales.head_stride = scale_part.strides_[2]
        conversions = DeviceConversions()
        if quantizes:
            (<DeviceConversions>conversions).add(plain, none, coded, given, is_4over6)
        else:
            (<DeviceConversions>conversions).add(coded, given, plain, none, False)
        (<DeviceConversions>conversions).prepare_all((<Tensor>parts[0]).shape_[0], place)
        (<DeviceConversions>conversions).launch(place)
    for tensor in ([codes, scales] if quantizes else [numbers]):
        if tensor is not None:
            note_written(tensor, place)
    return 0


cdef int convert_latents_on_device(
        Tensor source, int source_format, Tensor target, int target_format, const Place* place) except -1:
    cdef LatentPlaneSizes of_source, of_target
    of_source.format, of_target.format = source_format, target_format
    of_source.latent_dim = of_target.latent_dim = kPackedLatentDim
    of_source.rope_dim = of_target.rope_dim = kPackedRopeDim
    for parts in blocks_of([source, target], False):
        conversions = DeviceConversions()
        (<DeviceConversions>conversions).add_latents(parts[0], &of_source, 1.0, parts[1], &of_target, 1.0)
        (<DeviceConversions>conversions).prepare_all((<Tensor>parts[0]).shape_[0], place)
        (<DeviceConversions>conversions).launch(place)
    return note_written(target, place)


cdef list blocks_of(list tensors, bint has_heads):
    """Return views [blocks, tokens, heads, last axis], or without heads, which together cover tensors of equal axes.

    Axes that follow each other in every tensor are merged, so that most calls are one launch.
    """
    cdef Tensor first = tensors[0]
    cdef int lead = first.ndim - 1
    axes = [(first.shape_[i], tuple([(<Tensor>each).strides_[i] for each in tensors])) for i in range(lead)]
    zeros = tuple([0 for _ in tensors])
    head = axes.pop() if has_heads and axes else (1, zeros)
    merged = merged_axes(axes)
    while len(merged) < 2:
        merged.insert(0, (1, zeros))
    outer, inner = merged[:-2], merged[-2:]
    if has_heads:
        inner.append(head)
    views = []
    for place in product(*[range(size) for size, _ in outer]):
        views.append([
            view_of(tensors[i], sum([at * axis[1][i] for at, axis in zip(place, outer)]),
                    [axis[0] for axis in inner], [axis[1][i] for axis in inner])
            for i in range(len(tensors))
        ])
    return views


cdef list merged_axes(list axes):
    """Return axes (size, strides) without those of size 1, and with those merged that follow each other."""
    merged = []  # outermost first
    for size, strides in reversed(axes):
        if size == 1:
            continue
        if merged and all(step == merged[0][0] * inner for step, inner in zip(strides, merged[0][1])):
            merged[0] = (size * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (size, strides))
    return merged


cdef Tensor view_of(Tensor tensor, int64_t offset, list shape, list strides):
    cdef ArrayView view = tensor.view()
    cdef int i, count = len(shape), last = tensor.ndim - 1
    view.data += offset
    view.ndim = count + 1
    view.shape[count], view.strides[count] = tensor.shape_[last], tensor.itemsize
    for i in range(count):
        view.shape[i], view.strides[i] = shape[i], strides[i]
    return tensor_of(view, tensor)
