"""merge_attention: join attention over two sets of keys."""

from pagecore.arrays.dtypes.codes cimport CPU, FLOAT32
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
    float_tensor,
    new_result,
)
from pagecore.ops.arguments._overlap cimport check_apart, check_apart_or_same
from pagecore.ops.cpu.calls._calls cimport merge as run_merge
from pagecore.ops.cuda.moves._moves cimport merge as launch_merge

from pagecore.errors import UnsupportedDtype


def merge_attention(out_a, lse_a, out_b, lse_b, *, out=None, lse=None, stream=None):
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
    cdef Tensor result = float_result(out, "out", a.shape_, a.dtype_code, out_a, &place)
    cdef Tensor weight
    if lse is None:
        weight = new_result(2, a.shape_, FLOAT32, out_a, &place)
    else:
        weight = any_tensor(lse, "lse")
        check_place(weight, "lse", &place)
        check_result(weight, "lse", 2, a.shape_, FLOAT32)
        check_apart_or_same(weight, "lse", weight_a, "lse_a")
        check_apart_or_same(weight, "lse", weight_b, "lse_b")
        check_apart(weight, "lse", a, "out_a")
        check_apart(weight, "lse", b, "out_b")
        check_apart(weight, "lse", result, "out")
    if out is not None:
        check_apart_or_same(result, "out", a, "out_a")
        check_apart_or_same(result, "out", b, "out_b")
        check_apart(result, "out", weight_a, "lse_a")
        check_apart(result, "out", weight_b, "lse_b")
    if place.device_type == CPU:
        run_merge(a, weight_a, b, weight_b, result, weight)
    else:
        await_arrays((out_a, lse_a, out_b, lse_b), &place)
        launch_merge(a, weight_a, b, weight_b, result, weight, &place)
    return (
        finished(result, out_a, &place) if out is None else out,
        finished(weight, out_a, &place) if lse is None else lse,
    )


cdef Tensor lse_tensor(object array, str name, Tensor of_out, const Place* place):
    cdef Tensor lse = any_tensor(array, name)
    check_place(lse, name, place)
    if lse.dtype_code != FLOAT32:
        raise UnsupportedDtype(f"{name} is {lse.dtype}; it must be float32, as returned by paged_attention")
    check_rank(lse, name, 2, "[num_tokens, num_heads]")
    check_length(lse, name, 0, of_out.shape_[0], "as the outputs have")
    check_length(lse, name, 1, of_out.shape_[1], "as the outputs have")
    check_aligned(lse, name)
    return lse
