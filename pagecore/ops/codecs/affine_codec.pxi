"""Codes with a scale and a least number for each group of tokens or channels (KIVI), for quantize and dequantize."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, INT32, DType
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, tensor_of
from pagecore.arrays.views.array_view cimport ArrayView
from pagecore.ops.affine_codes cimport AffineCodes
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_aligned,
    check_place,
    find_place,
    finished,
    float_array,
    new_result,
    note_written,
    read_size,
)
from pagecore.ops.cpu._cpu cimport convert_affine as run_convert_affine
from pagecore.ops.cuda.codecs._codecs cimport AffineBlocks, convert_affine as launch_affine

from itertools import product

import numpy as np

from pagecore.arrays.dtypes.formats import SEALED_FORMATS
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption, shown

cdef enum:
    DEFAULT_GROUP_SIZE = 32

_ONE = (1, (0, 0, 0))  # an axis, and its strides in numbers, words and scales


cdef int64_t affine_bits(object name) except -1:
    return SEALED_FORMATS.get(name, 0) if isinstance(name, str) else 0


cdef int check_row_format(object format, object axis, object group_size) except -1:
    if axis is not None or group_size is not None:
        name = "group_size" if axis is None else "axis"
        raise UnsupportedOption(
            f"{name} is {shown(group_size if axis is None else axis)} and format is {shown(format)}; only "
            f"{' and '.join(SEALED_FORMATS)} take it"
        )
    return 0


cdef tuple quantize_groups(object x, str format, object scale, object axis, object group_size, object stream):
    cdef Place place
    cdef bint over_tokens = reads_tokens(axis)
    cdef Tensor numbers = float_array(x, "x")
    check_group_axes(numbers, "x", over_tokens)
    find_place(&place, numbers, "x", x, stream)
    check_no_factor(format, scale)
    cdef int64_t size = DEFAULT_GROUP_SIZE if group_size is None else read_size(group_size, "group_size", 1)
    cdef int64_t bits = affine_bits(format), in_word = 32 // bits
    cdef int last = numbers.ndim - 1, grouped = last - over_tokens, i
    cdef int64_t count = numbers.shape_[grouped]
    if count == 0 or count % size != 0 or count % in_word != 0:
        raise ShapeError(
            f"x has shape {numbers.shape}; format {format!r} needs a multiple of {size} along axis {grouped - last - 1}"
            f", the group size, and of {in_word}, the codes of a word"
        )
    cdef int64_t shape[9]
    for i in range(numbers.ndim):
        shape[i] = numbers.shape_[i]
    shape[grouped] = count // in_word
    cdef Tensor codes = new_result(numbers.ndim, shape, INT32, x, &place)
    shape[grouped] = count // size
    shape[grouped + 1] = 2
    shape[grouped + 2] = numbers.shape_[last]
    cdef Tensor scales = new_result(numbers.ndim + 1, shape, numbers.dtype_code, x, &place)
    if place.device_type == CPU:
        convert_groups(numbers, codes, scales, bits, size, over_tokens, False)
    else:
        await_arrays((x,), &place)
        convert_groups_on_device(numbers, codes, scales, bits, size, over_tokens, False, &place)
    return finished(codes, x, &place), finished(scales, x, &place)


cdef object dequantize_groups(
        object codes, str format, object scales, object scale, object axis, int dtype_code, object stream):
    cdef Place place
    cdef bint over_tokens = reads_tokens(axis)
    cdef Tensor words = any_tensor(codes, "codes")
    if words.dtype_code != INT32:
        raise UnsupportedDtype(f"codes is {words.dtype}; the codes of {format!r} are words of int32")
    check_group_axes(words, "codes", over_tokens)
    find_place(&place, words, "codes", codes, stream)
    check_no_factor(format, scale)
    if scales is None:
        raise UnsupportedOption(f"format {format!r} stores scales; pass them as scales")
    cdef Tensor plane = float_array(scales, "scales")
    check_place(plane, "scales", &place)
    cdef int64_t bits = affine_bits(format)
    cdef int last = words.ndim - 1, grouped = last - over_tokens, i
    cdef int64_t shape[8]
    for i in range(words.ndim):
        shape[i] = words.shape_[i]
    shape[grouped] *= 32 // bits
    cdef int64_t groups = check_group_scales(plane, words, grouped, shape[grouped], format)
    check_aligned(plane, "scales")
    cdef Tensor numbers = new_result(words.ndim, shape, dtype_code, codes, &place)
    if place.device_type == CPU:
        convert_groups(numbers, words, plane, bits, shape[grouped] // groups, over_tokens, True)
    else:
        await_arrays((codes, scales), &place)
        convert_groups_on_device(numbers, words, plane, bits, shape[grouped] // groups, over_tokens, True, &place)
    return finished(numbers, codes, &place)


# ---- arguments

cdef bint reads_tokens(object axis) except -1:
    """Return True if groups lie along the axis before the last."""
    if axis is None:
        return False
    if isinstance(axis, bool) or not isinstance(axis, int) or axis not in (-1, -2):
        raise UnsupportedOption(
            f"axis is {shown(axis)}; use -1 for groups of the numbers of a row (values), or -2 for groups of rows of "
            "each channel (keys)"
        )
    return axis == -2


cdef int check_group_axes(Tensor tensor, str name, bint over_tokens) except -1:
    cdef int least = 1 + over_tokens
    if not least <= tensor.ndim <= 7:  # the scales have one axis more, and an array up to 8
        raise ShapeError(
            f"{name} has shape {tensor.shape}; it must be [..., {'T, D' if over_tokens else 'D'}] of up to 7 axes")
    return check_aligned(tensor, name)


cdef int check_no_factor(str format, object scale) except -1:
    if scale is not None:
        raise UnsupportedOption(f"format {format!r} computes its scales and has no given factor; leave scale out")
    return 0


cdef int64_t check_group_scales(Tensor scales, Tensor words, int grouped, int64_t count, str format) except -1:
    """Return the number of groups along the axis `grouped`, which has `count` numbers."""
    cdef int64_t groups = scales.shape_[grouped] if scales.ndim == words.ndim + 1 else 0
    cdef bint fits = groups > 0 and count > 0 and count % groups == 0 and scales.shape_[grouped + 1] == 2
    cdef int i
    for i in range(words.ndim):
        if i != grouped:
            fits = fits and scales.shape_[i if i < grouped else i + 1] == words.shape_[i]
    if not fits:
        wanted = (*words.shape[:grouped], "groups", 2, *words.shape[grouped + 1:])
        raise ShapeError(
            f"scales has shape {scales.shape}; codes {words.shape} of {format!r} need [{', '.join(map(str, wanted))}] "
            f"with groups that divide {count}"
        )
    return groups


# ---- conversion

cdef int convert_groups(
        Tensor numbers, Tensor words, Tensor scales, int64_t bits, int64_t group, bint over_tokens,
        bint restores) except -1:
    """Convert whole arrays. Copies of arrays whose leading axes have no common stride outlive the call."""
    cdef AffineCodes codes
    cdef int kept = 1 + over_tokens
    cdef Tensor x = merged(numbers, kept), w = merged(words, kept), s = merged(scales, kept + 1)
    set_codes(&codes, x, w, s, bits, group, over_tokens)
    if over_tokens:
        codes.num_matrices, codes.numbers_matrix_stride = x.shape_[0], x.strides_[0]
        codes.words_matrix_stride, codes.scales_matrix_stride = w.strides_[0], s.strides_[0]
    else:
        set_lanes(&codes, (x.shape_[0], (x.strides_[0], w.strides_[0], s.strides_[0])))
    return run_convert_affine(codes, restores)


cdef int convert_groups_on_device(
        Tensor numbers, Tensor words, Tensor scales, int64_t bits, int64_t group, bint over_tokens, bint restores,
        const Place* place) except -1:
    """Launch the conversion; leading axes that the kernel cannot divide are launches of their own."""
    cdef AffineCodes codes
    cdef AffineBlocks blocks
    cdef Tensor each
    cdef int i
    axes = [
        (numbers.shape_[i], (numbers.strides_[i], words.strides_[i], scales.strides_[i]))
        for i in range(numbers.ndim - 1 - over_tokens)
    ]
    merged = merged_axes(axes)
    set_codes(&codes, numbers, words, scales, bits, group, over_tokens)
    if not over_tokens:
        set_lanes(&codes, merged.pop() if merged else _ONE)
    # The first of two axes, or the only one, has the blocks, which can be more than matrices.
    blocks.count, (blocks.numbers_stride, blocks.words_stride, blocks.scales_stride) = (
        merged.pop(-min(2, len(merged))) if merged else _ONE)
    codes.num_matrices, (codes.numbers_matrix_stride, codes.words_matrix_stride, codes.scales_matrix_stride) = (
        merged.pop() if merged else _ONE)
    for at in product(*[range(size) for size, _ in merged]):
        offsets = [sum([index * axis[1][i] for index, axis in zip(at, merged)]) for i in range(3)]
        codes.numbers, codes.words = numbers.data + <int64_t>offsets[0], words.data + <int64_t>offsets[1]
        codes.scales = scales.data + <int64_t>offsets[2]
        launch_affine(codes, blocks, restores, place)
    for each in ([numbers] if restores else [words, scales]):
        note_written(each, place)
    return 0


cdef int set_codes(
        AffineCodes* codes, Tensor x, Tensor w, Tensor s, int64_t bits, int64_t group, bint over_tokens) except -1:
    """Set what the last axes of numbers, words and scales determine; the numbers are one matrix."""
    cdef int grouped = x.ndim - 1 - over_tokens
    codes.numbers, codes.words, codes.scales = x.data, w.data, s.data
    codes.type, codes.scale_type = <DType>x.dtype_code, <DType>s.dtype_code
    codes.bits, codes.group, codes.num_entries, codes.num_matrices = bits, group, x.shape_[grouped], 1
    codes.entry_stride, codes.word_stride = x.strides_[grouped], w.strides_[grouped]
    codes.group_stride, codes.least_offset = s.strides_[grouped], s.strides_[grouped + 1]
    if over_tokens:
        set_lanes(codes, (x.shape_[grouped + 1], (
            x.strides_[grouped + 1], w.strides_[grouped + 1], s.strides_[grouped + 2])))
    return 0


cdef int set_lanes(AffineCodes* codes, tuple axis) except -1:
    codes.num_lanes, (codes.lane_stride, codes.word_lane_stride, codes.scale_lane_stride) = axis
    return 0


cdef Tensor merged(Tensor tensor, int kept):
    """Return the tensor with its leading axes, up to the last `kept`, as one; a copy if they have no common stride."""
    cdef int64_t stride = 0, count = 1
    cdef int i, first = tensor.ndim - kept
    for i in range(first - 1, -1, -1):
        if tensor.shape_[i] == 1:
            continue
        if count > 1 and tensor.strides_[i] != stride * count:
            whole = np.ascontiguousarray(tensor.numpy())
            return as_tensor(whole.reshape(-1, *whole.shape[first:]))
        if count == 1:
            stride = tensor.strides_[i]
        count *= tensor.shape_[i]
    cdef ArrayView view = tensor.view()
    view.ndim = 1 + kept
    view.shape[0], view.strides[0] = count, stride
    for i in range(kept):
        view.shape[1 + i], view.strides[1 + i] = tensor.shape_[first + i], tensor.strides_[first + i]
    return tensor_of(view, tensor.owner)
