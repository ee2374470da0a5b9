"""hadamard: rows of numbers times orthogonal matrices of 1 and -1, which spread outliers over a row."""

from libc.stdint cimport int64_t

from pagecore.arrays.dtypes.codes cimport CPU, DType
from pagecore.arrays.tensors._tensor cimport Tensor, size_of
from pagecore.ops.arguments._arguments cimport (
    Place,
    await_arrays,
    check_place,
    check_result,
    check_writable,
    find_place,
    finished,
    float_array,
    new_result,
    note_written,
)
from pagecore.ops.arguments._overlap cimport check_apart_or_same
from pagecore.ops.cpu._cpu cimport hadamard as run_hadamard
from pagecore.ops.cuda.codecs._codecs cimport hadamard as launch_hadamard
from pagecore.ops.hadamard_rows cimport HadamardRows, hadamard_block, kHadamardMax, kHadamardMin

from pagecore.errors import ShapeError


def hadamard(x, *, out=None, stream=None):
    """Return rows times orthonormal Hadamard matrices: the fast Walsh-Hadamard transform of the last axis.

    A row of D numbers consists of blocks of B, the largest power of two that divides D, up to 256. Each block is
    multiplied by the symmetric matrix of Sylvester, whose entries are ``B ** -0.5`` and ``-B ** -0.5``. The transform
    is its own inverse, and keeps scalar products: those of transformed queries with transformed keys are the scores of
    the rows themselves. A channel of large numbers becomes B channels of moderate ones, which a format of few bits
    stores with a smaller error; see docs/formats.md.

    Parameters
    ----------
    x : array, [..., D]
        float32, float16 or bfloat16, on the host or CUDA. D is a multiple of 8. The last axis is contiguous; other
        strides are free.
    out : array, [..., D], optional
        For the result, in the dtype of `x`, with strides as free as those of `x`. It may be `x` itself, and shares no
        other memory with it.
    stream : int or a stream, optional
        For CUDA arrays, the stream of the work: a handle or an object with ``__cuda_stream__``. By default the current
        stream of the framework of `x`.

    Returns
    -------
    array, [..., D]
        `out`, or a new C-contiguous array in the framework of `x`. Sums are float32 and rounded once to the dtype, to
        nearest even. A number can be as large as the norm of its block, ``B ** 0.5`` times the largest number there: in
        float16 a block with a norm above 65504 can have infinities. A block with an infinity or NaN has no finite
        number. Every instruction set, and CUDA, gives the same bits.

    Raises
    ------
    ShapeError
        D is not a multiple of 8, or `out` has another shape.
    UnsupportedDtype, UnsupportedOption, DeviceError
        Other dtypes, arrays on different devices, or `out` overlaps `x` but is another array. After every error
        nothing has been written.
    NotEnoughMemory
        The host or the device cannot allocate the result.

    Notes
    -----
    D of 64, 128 and 256 is one block; 80 is 5 blocks of 16, 96 3 of 32, 192 3 of 64, and 512 2 of 256. There are no
    random signs, unlike in QuIP#: keys and queries are multiplied when they are computed, so that checkpoints need not
    know the matrix.

    Rotations of keys: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.

    Examples
    --------
    >>> import numpy as np, pagecore
    >>> key = np.zeros((2, 16), np.float32)
    >>> key[:, 3] = 8
    >>> pagecore.hadamard(key)[0, :8]
    array([ 2., -2., -2.,  2.,  2., -2., -2.,  2.], dtype=float32)
    >>> bool((pagecore.hadamard(pagecore.hadamard(key)) == key).all())
    True
    """
    return rotate_rows(x, "x", out, stream)


def rotation_block(int64_t dim):
    """Return the numbers of a block of a row of `dim`; 0 if `hadamard` does not serve the dim."""
    return hadamard_block(dim) if dim > 0 and dim % kHadamardMin == 0 else 0


def rotate_rows(array, str name not None, out, stream):
    """Return the result of `hadamard` for an argument of another name, for messages."""
    cdef Place place
    cdef Tensor source = float_array(array, name), target
    check_rows(source, name)
    find_place(&place, source, name, array, stream)
    cdef int last = source.ndim - 1
    if rotation_block(source.shape_[last]) == 0:
        raise ShapeError(
            f"{name} has shape {source.shape}; the last axis must be a multiple of {kHadamardMin}, so that rows "
            f"consist of blocks of {kHadamardMin} to {kHadamardMax} numbers: pad the rows with zeros"
        )
    if out is None:
        target = new_result(source.ndim, source.shape_, source.dtype_code, array, &place)
    else:
        target = float_array(out, "out")
        check_place(target, "out", &place)
        check_result(target, "out", source.ndim, source.shape_, source.dtype_code)
        check_rows(target, "out")
        check_writable(target, "out")
        check_apart_or_same(target, "out", source, name)
    if place.device_type != CPU:
        await_arrays((array, out), &place)
    transform_all(source, target, &place)
    return finished(target, array, &place) if out is None else out


cdef int transform_all(Tensor source, Tensor target, const Place* place) except -1:
    """Transform rows of any strides: two axes a call, which most arrays have once their axes are merged."""
    cdef HadamardRows rows
    cdef int64_t shape[8]
    cdef int64_t strides[8], others[8]  # of source and target
    cdef int i, count = 0, last = source.ndim - 1
    if size_of(source) == 0:
        return 0
    for i in range(last):
        if source.shape_[i] == 1:
            continue
        if (
            count > 0
            and strides[count - 1] == source.shape_[i] * source.strides_[i]
            and others[count - 1] == source.shape_[i] * target.strides_[i]
        ):
            shape[count - 1] *= source.shape_[i]
            strides[count - 1], others[count - 1] = source.strides_[i], target.strides_[i]
            continue
        shape[count], strides[count], others[count] = source.shape_[i], source.strides_[i], target.strides_[i]
        count += 1
    while count < 2:  # axes of one row
        shape[count], strides[count], others[count] = 1, 0, 0
        count += 1
    rows.type, rows.dim = <DType>source.dtype_code, source.shape_[last]
    rows.outer, rows.inner = shape[count - 2], shape[count - 1]
    rows.source_outer_stride, rows.source_inner_stride = strides[count - 2], strides[count - 1]
    rows.target_outer_stride, rows.target_inner_stride = others[count - 2], others[count - 1]
    transform_axes(rows, source.data, target.data, count - 2, shape, strides, others, place)
    return note_written(target, place) if place.device_type != CPU else 0


cdef int transform_axes(
        HadamardRows rows, const char* source, char* target, int num_axes, const int64_t* shape,
        const int64_t* strides, const int64_t* others, const Place* place) except -1:
    """Call the kernel for each index of the first `num_axes` axes."""
    cdef int64_t i
    if num_axes > 0:
        for i in range(shape[0]):
            transform_axes(
                rows, source + i * strides[0], target + i * others[0], num_axes - 1, shape + 1, strides + 1,
                others + 1, place)
        return 0
    rows.source, rows.target = source, target
    return run_hadamard(rows) if place.device_type == CPU else launch_hadamard(rows, place)
