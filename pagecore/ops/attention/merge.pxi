"""merge_attention, merge_attention_parts: join attention over disjoint sets of keys."""

from pagecore.arrays.dtypes.codes cimport BOOL, CPU, FLOAT32
from pagecore.arrays.tensors._tensor cimport Tensor
from pagecore.ops.arguments._arguments cimport (
    Place,
    any_tensor,
    await_arrays,
    check_aligned,
    check_length,
    check_place,
    check_rank,
    check_result,
    find_place,
    finished,
    float32_array,
    float_tensor,
    given_indices,
    new_result,
    to_device,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_apart_or_same
from pagecore.ops.cpu.calls._calls cimport check_parts, merge as run_merge, merge_many as run_merge_many
from pagecore.ops.cuda.moves._moves cimport merge as launch_merge, merge_many as launch_merge_many
from pagecore.ops.index_checks._index_checks cimport debug_parts, debugging

import numpy as np

from pagecore.errors import ShapeError, UnsupportedDtype, shown


def merge_attention(out_a, lse_a, out_b, lse_b, *, mask=None, out=None, lse=None, stream=None):
    """Join attention over two disjoint sets of keys into attention over both.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``. A part
    whose lse is -inf, or +inf, which FlashAttention and FlashMLA report for a query without keys, is ignored, including
    NaN in its output; two such parts give 0 and -inf. Sinks must be in one part only. All arrays are on one device, the
    host or CUDA.

    Parameters
    ----------
    out_a, out_b : array, [T, H, D]
        float32, float16 or bfloat16, both of one dtype.
    lse_a, lse_b : array, [T, H]
        float32, natural logarithm, any strides. Multiply an lse of FlashInfer, a binary logarithm, by ln 2.
    mask : array or list of bool, [T], optional
        False for tokens whose result is a copy of the first part, whatever its lse: all bits of output and lse. The
        output of the second part is not read there.
    out, lse : array, optional
        Arrays for the results, [T, H, D] in the dtype of `out_a` and float32 [T, H]; they are returned. `out` may be
        `out_a` or `out_b` itself, and `lse` may be `lse_a` or `lse_b` itself; otherwise they must not overlap any input
        or each other.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `out_a`.

    Returns
    -------
    out, lse : array
        In the framework of `out_a`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other or are not supported. Nothing has been written.
    NotEnoughMemory
        The host or the device cannot allocate a result. Nothing has been written.

    Notes
    -----
    The merge of split softmaxes is from Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    cdef Place place
    cdef Tensor a = float_tensor(out_a, "out_a", 3, 2, "[num_tokens, num_heads, head_dim]")
    find_place(&place, a, "out_a", out_a, stream)
    cdef Tensor b = float_tensor(out_b, "out_b", 3, 2, "[num_tokens, num_heads, head_dim]")
    check_place(b, "out_b", &place)
    if b.dtype_code != a.dtype_code:
        raise UnsupportedDtype(f"out_a is {a.dtype} and out_b {b.dtype}; both must have one dtype")
    cdef int i
    for i in range(3):
        check_length(b, "out_b", i, a.shape_[i], "as out_a has")
    cdef Tensor weight_a = lse_tensor(lse_a, "lse_a", a, &place)
    cdef Tensor weight_b = lse_tensor(lse_b, "lse_b", a, &place)
    cdef Tensor given_out = None if out is None else any_tensor(out, "out")
    cdef Tensor result = float_result(given_out, "out", a.shape_, a.dtype_code, out_a, &place)
    cdef Tensor weight = lse_result(lse, a.shape_, out_a, &place)
    cdef Tensor bits = None if mask is None else token_mask(mask, a.shape_[0], &place)
    if lse is not None:
        check_apart_or_same(weight, "lse", weight_a, "lse_a")
        check_apart_or_same(weight, "lse", weight_b, "lse_b")
        check_apart(weight, "lse", a, "out_a")
        check_apart(weight, "lse", b, "out_b")
        check_apart(weight, "lse", result, "out")
        check_apart(weight, "lse", bits, "mask")
    if out is not None:
        check_apart_or_same(result, "out", a, "out_a")
        check_apart_or_same(result, "out", b, "out_b")
        check_apart(result, "out", weight_a, "lse_a")
        check_apart(result, "out", weight_b, "lse_b")
        check_apart(result, "out", bits, "mask")
    if place.device_type == CPU:
        run_merge(a, weight_a, b, weight_b, bits, result, weight)
    else:
        await_arrays((out_a, lse_a, out_b, lse_b, mask), &place)
        bits = None if bits is None else to_device(bits, "mask", &place)
        launch_merge(a, weight_a, b, weight_b, bits, result, weight, &place)
    return (
        finished(result, out_a, &place) if out is None else out,
        finished(weight, out_a, &place) if lse is None else lse,
    )


def merge_attention_parts(outs, lses, cu_parts=None, *, out=None, lse=None, stream=None):
    """Join attention over any number of disjoint sets of keys into attention over all of them.

    The rules are those of `merge_attention`, whose result for two parts has the same bits, but for those of NaN: a part
    whose lse is -inf or +inf is ignored, including NaN in its output. A token without parts, or whose parts are all
    ignored, gets 0 and -inf. Sinks must be in one part only. All arrays are on one device, the host or CUDA.

    Parameters
    ----------
    outs : array, [T, N, H, D], or [P, H, D] with `cu_parts`
        float32, float16 or bfloat16. N and P may be 0; on CUDA they are at most 2^31 - 2^16.
    lses : array, [T, N, H], or [P, H] with `cu_parts`
        float32, natural logarithm, any strides. Multiply an lse of FlashInfer, a binary logarithm, by ln 2.
    cu_parts : integers, [T + 1], optional
        The parts of token t are ``cu_parts[t]`` to ``cu_parts[t + 1] - 1``. It starts at 0, never decreases, and ends
        at P or before. In CUDA memory its contents are checked under `debug` only; entries past P count as P.
    out, lse : array, optional
        Arrays for the results, [T, H, D] in the dtype of `outs` and float32 [T, H]; they are returned. They must not
        overlap any input or each other.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `outs`.

    Returns
    -------
    out, lse : array
        In the framework of `outs`.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption, DeviceError
        Arrays do not match each other or are not supported. Nothing has been written.
    NotEnoughMemory
        The host or the device cannot allocate a result. Nothing has been written.

    Notes
    -----
    FlashInfer has this operation as `merge_states`, and with `cu_parts` as the last step of cascade attention.

    Examples
    --------
    >>> import numpy as np
    >>> outs = np.asarray([[[[1.0, 0.0]], [[0.0, 2.0]], [[9.0, 9.0]]]], np.float32)  # 1 token, 3 parts, 1 head
    >>> lses = np.asarray([[[0.0], [0.0], [-np.inf]]], np.float32)
    >>> out, lse = merge_attention_parts(outs, lses)
    >>> out.tolist(), round(float(lse[0, 0]), 4)
    ([[[0.5, 1.0]]], 0.6931)
    """
    cdef Place place
    cdef Tensor parts, weights, cu = None, given_out, result, weight
    cdef int64_t shape[3]
    if cu_parts is None:
        parts = float_tensor(outs, "outs", 4, 3, "[num_tokens, num_parts, num_heads, head_dim]")
        find_place(&place, parts, "outs", outs, stream)
        weights = lses_tensor(lses, parts, "[num_tokens, num_parts, num_heads]", &place)
        shape[0], shape[1], shape[2] = parts.shape_[0], parts.shape_[2], parts.shape_[3]
    else:
        parts = float_tensor(outs, "outs", 3, 2, "[num_parts, num_heads, head_dim] with cu_parts")
        find_place(&place, parts, "outs", outs, stream)
        weights = lses_tensor(lses, parts, "[num_parts, num_heads] with cu_parts", &place)
        cu = given_indices(cu_parts, "cu_parts", 1, "[num_tokens + 1]", &place)
        if cu.shape_[0] == 0:
            raise ShapeError(
                "cu_parts is empty; it must have one entry more than there are tokens, the first of them 0"
            )
        if cu.device_type == CPU:
            check_parts(cu, parts.shape_[0])
        shape[0], shape[1], shape[2] = cu.shape_[0] - 1, parts.shape_[1], parts.shape_[2]
    given_out = None if out is None else any_tensor(out, "out")
    result = float_result(given_out, "out", shape, parts.dtype_code, outs, &place)
    weight = lse_result(lse, shape, outs, &place)
    for written, name in ((result, "out"), (weight, "lse")):
        check_apart(written, name, parts, "outs")
        check_apart(written, name, weights, "lses")
        check_apart(written, name, cu, "cu_parts")
    check_apart(weight, "lse", result, "out")
    if place.device_type == CPU:
        run_merge_many(parts, weights, cu, result, weight)
    else:
        await_arrays((outs, lses, cu_parts), &place)
        if cu is not None and cu.device_type != CPU and debugging():
            debug_parts(cu, parts.shape_[0], &place)
        cu = None if cu is None else to_device(cu, "cu_parts", &place)
        launch_merge_many(parts, weights, cu, result, weight, &place)
    return (
        finished(result, outs, &place) if out is None else out,
        finished(weight, outs, &place) if lse is None else lse,
    )


cdef Tensor token_mask(object array, int64_t num_tokens, const Place* place):
    """Return a mask of tokens where the caller has it."""
    if isinstance(array, (list, tuple)):
        try:
            array = np.asarray(array) if array else np.zeros(0, np.bool_)
        except MemoryError:
            raise
        except Exception as error:
            raise ShapeError(f"mask is not an array of bool: {shown(error)}") from error
    cdef Tensor mask = any_tensor(array, "mask")
    if mask.device_type != CPU:
        check_place(mask, "mask", place)
    if mask.dtype_code != BOOL:
        raise UnsupportedDtype(f"mask is {mask.dtype}; it must be bool, True where both parts count: pass mask != 0")
    check_rank(mask, "mask", 1, "[num_tokens]")
    check_length(mask, "mask", 0, num_tokens, "as the outputs have")
    return mask


cdef Tensor lse_result(object lse, const int64_t* shape, object example, const Place* place):
    """Return the array of the caller if it fits, or a new array if `lse` is None."""
    if lse is None:
        return new_result(2, shape, FLOAT32, example, place)
    cdef Tensor weight = float32_array(lse, "lse", "paged_attention")
    check_place(weight, "lse", place)
    check_result(weight, "lse", 2, shape, FLOAT32)
    return weight


cdef Tensor lse_tensor(object array, str name, Tensor of_out, const Place* place):
    cdef Tensor lse = lse_input(array, name, place)
    check_rank(lse, name, 2, "[num_tokens, num_heads]")
    check_length(lse, name, 0, of_out.shape_[0], "as the outputs have")
    check_length(lse, name, 1, of_out.shape_[1], "as the outputs have")
    return lse


cdef Tensor lses_tensor(object array, Tensor outs, str axes, const Place* place):
    cdef Tensor lses = lse_input(array, "lses", place)
    cdef int i
    check_rank(lses, "lses", outs.ndim - 1, axes)
    for i in range(lses.ndim):
        check_length(lses, "lses", i, outs.shape_[i], "as outs has")
    return lses


cdef Tensor lse_input(object array, str name, const Place* place):
    cdef Tensor lse = float32_array(array, name, "paged_attention")
    check_place(lse, name, place)
    check_aligned(lse, name)
    return lse
