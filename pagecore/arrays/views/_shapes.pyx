"""Conversion of Python shapes, axes and indices to an ArrayView."""

from cpython.object cimport PyObject
from libc.stdint cimport INT64_MAX, int64_t

from pagecore.arrays.views.array_view cimport (
    ArrayView,
    checked_element_count,
    element_count,
    item_bytes,
    kMaxDims,
    try_reshape,
)

from itertools import islice

from pagecore.arrays.refusals import IndexOutOfRange
from pagecore.errors import ShapeError, UnsupportedOption, shown

cdef extern from "Python.h":
    bint PyIndex_Check(object value)
    Py_ssize_t PyNumber_AsSsize_t(object value, PyObject* overflow) except? -1
    int PySlice_Unpack(object index, Py_ssize_t* start, Py_ssize_t* stop, Py_ssize_t* step) except -1
    Py_ssize_t PySlice_AdjustIndices(Py_ssize_t length, Py_ssize_t* start, Py_ssize_t* stop, Py_ssize_t step)
    PyObject* PyExc_OverflowError


cdef int64_t read_integer(object number, str what) except? -1:
    try:
        if isinstance(number, bool):
            raise TypeError("a bool is not an integer")
        return PyNumber_AsSsize_t(number, PyExc_OverflowError)
    except MemoryError:
        raise
    except OverflowError as error:
        raise ShapeError(f"{what} is {shown(number)}; it must fit 64 bits") from error
    except Exception as error:
        raise ShapeError(f"{what} is {shown(number)}; it must be an integer") from error


cdef object axes_of(object number):
    """Return the number of axes of an array, 0 for another object."""
    try:
        return getattr(number, "ndim", 0)
    except Exception:
        return 0


cdef int read_integers(object numbers, int64_t* out, str what) except -1:
    """Write up to kMaxDims integers, from one integer or an iterable, to `out`; return their number."""
    cdef int count = 0
    cdef tuple items
    if PyIndex_Check(numbers) and axes_of(numbers) == 0:
        out[0] = read_integer(numbers, what)
        return 1
    if isinstance(numbers, (str, bytes, bytearray, dict, set, frozenset)):  # iterable, but not a sequence of lengths
        raise ShapeError(f"{what} is {shown(numbers)}; it must be an integer or a sequence of integers")
    try:
        items = tuple(islice(numbers, kMaxDims + 1))
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"{what} is {shown(numbers)}; it must be an integer or a sequence of integers") from error
    for item in items:
        if count == kMaxDims:
            raise ShapeError(f"{what} has more than {kMaxDims} entries; a tensor has at most {kMaxDims} axes")
        out[count] = read_integer(item, what)
        count += 1
    return count


cdef int apply_shape(ArrayView* view, object shape) except -1:
    """Reshape without a copy; one entry may be -1."""
    cdef int64_t wanted[8]
    cdef int ndim = read_integers(shape, wanted, "shape")
    cdef int64_t size = element_count(view.ndim, view.shape)
    cdef int unknown = -1, i
    for i in range(ndim):
        if wanted[i] == -1:
            if unknown >= 0:
                raise ShapeError(f"shape {shown(shape)} has more than one -1; only one length can be inferred")
            unknown = i
            wanted[i] = 1
    cdef int64_t known = checked_element_count(ndim, wanted, 1)
    if unknown >= 0:
        if known == 0 or size % known != 0:
            raise ShapeError(f"shape {shown(shape)} cannot hold {size} elements with any length for -1")
        wanted[unknown] = size // known
        known = size
    if known != size:
        raise ShapeError(f"shape {shown(shape)} has {known} elements, the tensor has {size}")
    checked_element_count(ndim, wanted, item_bytes(view[0]))
    if not try_reshape(view[0], ndim, wanted):
        raise ShapeError(f"shape {shown(shape)} needs a copy of these strides; copy first, e.g. t.numpy().copy()")
    return 0


cdef int apply_axes(ArrayView* view, object axes) except -1:
    """Permute the axes; None reverses them."""
    cdef ArrayView old = view[0]
    cdef int64_t order[8]
    cdef int i, count, seen = 0
    cdef int64_t axis
    if axes is None:
        count = old.ndim
        for i in range(count):
            order[i] = count - 1 - i
    else:
        count = read_integers(axes, order, "axes")
    if count != old.ndim:
        raise ShapeError(f"{count} axes are given for a tensor of {old.ndim}")
    for i in range(count):
        axis = order[i] + old.ndim if order[i] < 0 else order[i]
        if axis < 0 or axis >= old.ndim or seen >> axis & 1:
            raise ShapeError(f"axes {shown(axes)} are not a permutation of the {old.ndim} axes")
        seen |= 1 << axis
        view.shape[i] = old.shape[axis]
        view.strides[i] = old.strides[axis]
    return 0


cdef int apply_integer(ArrayView* view, int axis, object number) except -1:
    cdef int64_t length = view.shape[axis], index
    try:
        index = PyNumber_AsSsize_t(number, PyExc_OverflowError)
    except OverflowError:
        index = INT64_MAX
    except MemoryError:
        raise
    except Exception as error:
        raise UnsupportedOption(f"{shown(number)} is not an integer index: {shown(error)}") from error
    if index < -length or index >= length:
        raise IndexOutOfRange(f"index {shown(number)} is outside axis {axis} of length {length}")
    view.data += (index + length if index < 0 else index) * view.strides[axis]
    return 0


cdef int apply_slice(ArrayView* view, int axis, object span) except -1:
    cdef Py_ssize_t start, stop, step, length
    try:
        PySlice_Unpack(span, &start, &stop, &step)
    except MemoryError:
        raise
    except Exception as error:
        raise ShapeError(f"{shown(span)} is not a slice of integers with a step: {shown(error)}") from error
    length = PySlice_AdjustIndices(view.shape[axis], &start, &stop, step)
    if length > 0:
        view.data += start * view.strides[axis]
    view.shape[axis] = length
    if length > 1:  # otherwise the step is unused, and the product could overflow
        view.strides[axis] *= step
    return 0


cdef int apply_index(ArrayView* view, object index) except -1:
    """Apply basic indexing: integers, slices, one Ellipsis and None."""
    cdef tuple parts = index if type(index) is tuple else (index,)
    cdef ArrayView old = view[0]
    cdef ArrayView rest
    cdef int used = 0, ellipses = 0, axis = 0, kept = 0, _i
    for part in parts:
        if part is Ellipsis:
            ellipses += 1
        elif part is not None:
            if not (isinstance(part, slice) or is_integer(part)):
                raise UnsupportedOption(
                    f"a tensor is indexed by integers, slices, ... and None, which give views, not by {shown(part)}; "
                    "index t.numpy() for a copy"
                )
            used += 1
    if ellipses > 1:
        raise UnsupportedOption("an index can hold one Ellipsis only")
    if used > old.ndim:
        raise IndexOutOfRange(f"{used} indices are given for a tensor of {old.ndim} axes")
    # Indices are applied to `rest`, axis by axis. Axes that remain are written to `view`.
    rest = old
    for part in parts if ellipses else (*parts, Ellipsis):
        if part is None:
            kept = keep_axis(view, kept, 1, item_bytes(old))
        elif part is Ellipsis:
            for _i in range(old.ndim - used):
                kept = keep_axis(view, kept, rest.shape[axis], rest.strides[axis])
                axis += 1
        elif isinstance(part, slice):
            apply_slice(&rest, axis, part)
            kept = keep_axis(view, kept, rest.shape[axis], rest.strides[axis])
            axis += 1
        else:
            apply_integer(&rest, axis, part)
            axis += 1
    view.ndim = kept
    view.data = rest.data
    return 0


cdef bint is_integer(object part):
    return PyIndex_Check(part) and not isinstance(part, bool) and axes_of(part) == 0


cdef int keep_axis(ArrayView* view, int kept, int64_t length, int64_t stride) except -1:
    if kept == kMaxDims:
        raise ShapeError(f"the view would have more than {kMaxDims} axes, which is the limit of a tensor")
    view.shape[kept] = length
    view.strides[kept] = stride
    return kept + 1
