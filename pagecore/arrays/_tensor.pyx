"""Tensor: an address, a shape, strides, a dtype, a device, and what keeps the memory alive."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy

from pagecore.arrays._memory cimport Allocation, allocate
from pagecore.arrays._shapes cimport apply_axes, apply_index, apply_shape
from pagecore.arrays.array_view cimport (
    ArrayView,
    check_layout,
    checked_element_count,
    element_count,
    is_contiguous,
    item_bytes,
    set_contiguous_strides,
)

import numpy as np

from pagecore.arrays.dtypes import DTYPES, as_dtype
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption

cdef extern from "pagecore/arrays/numpy_array.hpp" namespace "pagecore" nogil:
    cdef struct NumPyArray:
        char* data
        int ndim
        Py_ssize_t* shape
        Py_ssize_t* strides
        PyObject* descr
        int flags

    const int kNumPyWriteable

cdef enum:
    CPU = 1
    CUDA = 2

cdef type _ndarray = np.ndarray
cdef tuple _dtypes = DTYPES
# NumPy keeps one object for each native dtype: its identity finds the code without a call.
cdef tuple _numpy_dtypes = tuple(dtype.numpy for dtype in DTYPES)


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Tensor:
    """A view of memory that belongs to no framework.

    Made by `empty`, `zeros`, `as_tensor` and `strided`, and by indexing: a view owns the allocation, not its parent.
    Tensors compare by identity.
    """

    def __cinit__(self):
        # A tensor of no elements: what Tensor.__new__ gives must be safe too.
        self.ndim = 1
        self.itemsize = 4
        self.strides_[0] = 4
        self.device_type = CPU

    def __init__(self):
        raise UnsupportedOption("a Tensor is not made by its class; use empty(), zeros(), as_tensor() or strided()")

    cdef ArrayView view(self) noexcept:
        cdef ArrayView view
        view.data = self.data
        view.ndim = self.ndim
        memcpy(view.shape, self.shape_, sizeof(self.shape_))
        memcpy(view.strides, self.strides_, sizeof(self.strides_))
        view.dtype = self.dtype_code
        view.device_type = self.device_type
        view.device_id = self.device_id
        view.readonly = self.readonly
        return view

    @property
    def shape(self):
        """Length of each axis."""
        return tuple(self.shape_[i] for i in range(self.ndim))

    @property
    def strides(self):
        """Bytes from one element to the next along each axis."""
        return tuple(self.strides_[i] for i in range(self.ndim))

    @property
    def ndim(self):
        """Number of axes, at most 8."""
        return self.ndim

    @property
    def size(self):
        """Number of elements."""
        return size_of(self)

    @property
    def itemsize(self):
        """Bytes of one element."""
        return self.itemsize

    @property
    def nbytes(self):
        """Bytes of all elements, without the gaps that strides leave."""
        return size_of(self) * self.itemsize

    @property
    def dtype(self):
        """The DType."""
        return _dtypes[self.dtype_code]

    @property
    def device(self):
        """``"cpu"`` or ``"cuda:0"``."""
        return "cpu" if self.device_type == CPU else f"cuda:{self.device_id}"

    @property
    def pointer(self):
        """Address of element 0."""
        return <uintptr_t>self.data

    @property
    def readonly(self):
        """Whether writing is refused."""
        return bool(self.readonly)

    def __repr__(self):
        mode = ", readonly" if self.readonly else ""
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device}{mode})"

    def __getitem__(self, index):
        cdef ArrayView view = self.view()
        apply_index(&view, index)
        return tensor_of(view, self.owner)

    def reshape(self, *shape):
        """Return a view of another shape over the same elements in row-major order; one length may be -1.

        Raises
        ------
        ShapeError
            The number of elements differs, or the strides would need a copy.
        """
        cdef ArrayView view = self.view()
        apply_shape(&view, shape[0] if len(shape) == 1 else shape)
        return tensor_of(view, self.owner)

    def transpose(self, *axes):
        """Return a view with the axes permuted; reversed when none are given."""
        cdef ArrayView view = self.view()
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = (axes[0],) if axes[0] is None else tuple(axes[0])
        apply_axes(&view, axes if axes and axes[0] is not None else None)
        return tensor_of(view, self.owner)


cdef Tensor tensor_of(const ArrayView& view, object owner):
    cdef Tensor tensor = Tensor.__new__(Tensor)
    tensor.data = view.data
    tensor.ndim = view.ndim
    memcpy(tensor.shape_, view.shape, sizeof(tensor.shape_))
    memcpy(tensor.strides_, view.strides, sizeof(tensor.strides_))
    tensor.dtype_code = view.dtype
    tensor.itemsize = item_bytes(view)
    tensor.device_type = view.device_type
    tensor.device_id = view.device_id
    tensor.readonly = view.readonly
    tensor.owner = owner
    return tensor


cdef Tensor view_of(
    Tensor base, char* data, int ndim, const int64_t* shape, const int64_t* strides_bytes, int dtype_code
):
    cdef ArrayView view = base.view()
    cdef int i
    view.data = data
    view.ndim = ndim
    for i in range(ndim):
        view.shape[i] = shape[i]
        view.strides[i] = strides_bytes[i]
    view.dtype = dtype_code
    return tensor_of(view, base.owner)


cdef Tensor new_tensor(int ndim, const int64_t* shape, int dtype_code, bint zeroed):
    cdef ArrayView view
    cdef int i
    view.dtype = dtype_code
    cdef int64_t size = checked_element_count(ndim, shape, item_bytes(view))
    view.ndim = ndim
    for i in range(ndim):
        view.shape[i] = shape[i]
    set_contiguous_strides(view)
    cdef Allocation memory = allocate(<size_t>(size * item_bytes(view)), zeroed)
    view.data = memory.memory.data()
    return tensor_of(view, memory)


cdef bint last_axis_contiguous(Tensor tensor) noexcept:
    cdef int last = tensor.ndim - 1
    return last < 0 or tensor.shape_[last] <= 1 or tensor.strides_[last] == tensor.itemsize


cdef bint contiguous(Tensor tensor) noexcept:
    return is_contiguous(tensor.view())


cdef int64_t size_of(Tensor tensor) noexcept:
    return element_count(tensor.ndim, tensor.shape_)


cdef Tensor tensor_of_numpy(object array):
    cdef NumPyArray* head = <NumPyArray*><PyObject*>array
    cdef ArrayView view
    cdef int i
    if head.ndim > MAX_NDIM:
        raise ShapeError(f"the array has {head.ndim} axes; a tensor has at most {MAX_NDIM}")
    view.data = head.data
    view.ndim = head.ndim
    for i in range(head.ndim):
        view.shape[i] = head.shape[i]
        view.strides[i] = head.strides[i]
    view.dtype = numpy_dtype_code(<object>head.descr)
    view.readonly = not head.flags & kNumPyWriteable
    check_layout(view)
    return tensor_of(view, array)


cdef int numpy_dtype_code(object dtype) except -1:
    cdef int code
    for code in range(len(_numpy_dtypes)):
        if <PyObject*>dtype == <PyObject*>_numpy_dtypes[code]:
            return code
    return as_dtype(dtype).code


cpdef Tensor as_tensor(object obj):
    """Return a zero-copy view of an array."""
    if type(obj) is Tensor:
        return <Tensor>obj
    if isinstance(obj, _ndarray):
        return tensor_of_numpy(obj)
    raise UnsupportedDtype(f"{type(obj).__name__} is no array")
