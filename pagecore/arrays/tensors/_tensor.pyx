"""Tensor: an address, a shape, strides, a dtype, a device, and the owner of the memory."""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_F_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    Py_buffer,
)
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy

from pagecore.arrays.dtypes.codes cimport CPU, kDTypes
from pagecore.arrays.exchange._exchange cimport Span, export_capsule, span_of
from pagecore.arrays.views._shapes cimport apply_axes, apply_index, apply_shape
from pagecore.arrays.views.array_view cimport ArrayView

import numpy as np

from pagecore.arrays.dtypes.dtype import DTYPES
from pagecore.arrays.exchange import foreign
from pagecore.arrays.refusals import ExportRefused
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption, shown

include "making.pxi"
include "viewing.pxi"

cdef type _ndarray = np.ndarray
cdef tuple _dtypes = DTYPES


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Tensor:
    """A strided view of memory on the host or a CUDA device, independent of any framework.

    `empty`, `zeros`, `as_tensor`, `strided` and indexing return tensors. Each holds a reference to the allocation, not
    to the tensor that it was indexed from. Tensors compare by identity.
    """

    def __cinit__(self):
        # Tensor.__new__ alone returns a valid tensor without elements.
        self.ndim = 1
        self.itemsize = 4
        self.strides_[0] = 4
        self.device_type = CPU

    def __init__(self):
        raise UnsupportedOption("Tensor() cannot be called; use empty(), zeros(), as_tensor() or strided()")

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
    def allocation(self):
        """The owner of the memory: an allocation of pagecore, or the array that the tensor views."""
        return self.owner

    @property
    def readonly(self):
        """True if the memory must not be written."""
        return bool(self.readonly)

    def __repr__(self):
        mode = ", readonly" if self.readonly else ""
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device}{mode})"

    def __getitem__(self, index):
        cdef ArrayView view = self.view()
        apply_index(&view, index)
        return tensor_of(view, self.owner)

    def __setitem__(self, index, value):
        foreign.assign(self[index], value, as_tensor)

    def __len__(self):
        if self.ndim == 0:
            raise ShapeError("a tensor without axes has no length; read its value with .item()")
        return self.shape_[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        return bool(self.item())

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
        if len(axes) <= 1:
            apply_axes(&view, axes[0] if axes else None)
        else:
            apply_axes(&view, axes)
        return tensor_of(view, self.owner)

    def numpy(self):
        """Return an ndarray over the same memory, with dtypes of ml_dtypes for bfloat16 and float8.

        Raises
        ------
        DeviceError
            The tensor is on a CUDA device.
        """
        if self.device_type != CPU:
            raise DeviceError(f"the tensor is on {self.device}, which NumPy cannot read; use .cupy()")
        cdef Py_ssize_t offset
        cdef Span span = span_of(self.view(), self.owner, &offset)
        return _ndarray(self.shape, self.dtype.numpy, span, offset, self.strides)

    def cupy(self):
        """Return a CuPy array over the same CUDA memory (unsigned integers for bfloat16 and float8).

        Raises
        ------
        DeviceError
            The tensor is on the host, or CuPy is not installed.
        """
        return foreign.cupy_view(self)

    def item(self):
        """Return the only element as a Python number; raise ShapeError unless there is exactly one."""
        return foreign.item(self)

    def tolist(self):
        """Return the elements as nested lists of Python numbers."""
        return foreign.tolist(self)

    def __array__(self, dtype=None, copy=None):
        return foreign.as_array(self, dtype, copy)

    @property
    def __array_interface__(self):
        return foreign.array_interface(self)

    @property
    def __cuda_array_interface__(self):
        return foreign.cuda_array_interface(self)

    def __dlpack_device__(self):
        return (self.device_type, self.device_id)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a DLPack capsule over the same memory, as the array API specifies.

        Raises
        ------
        ExportRefused
            Another device is requested, a stream for host memory, a copy of CUDA memory, a read-only tensor by a
            consumer older than DLPack 1.0, or strides are not multiples of the item size. Also a BufferError.
        """
        if dl_device is not None and not is_device(dl_device, self.device_type, self.device_id):
            raise ExportRefused(
                f"the tensor is on {self.device}, not on DLPack device {shown(dl_device)}; copy it there"
            )
        if copy is not None and copy is not True and copy is not False:
            raise ExportRefused(f"copy is {shown(copy)}; it must be True, False or None")
        if self.device_type != CPU:
            if copy:
                raise ExportRefused("only host memory can be copied by export; copy the CUDA tensor in its framework")
            foreign.order_streams(self.owner, stream)
        elif stream is not None:
            raise ExportRefused(f"stream is {shown(stream)}; host memory has no streams: pass None")
        if copy:
            owned = copy_of(self)
            return export_capsule(owned.view(), owned.owner, max_version, True)
        return export_capsule(self.view(), self.owner, max_version, False)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef const char* format = kDTypes[self.dtype_code].format
        if self.device_type != CPU or format == NULL:
            raise ExportRefused(f"the buffer protocol cannot describe {self.dtype} on {self.device}; use DLPack")
        if flags & PyBUF_WRITABLE and self.readonly:
            raise ExportRefused("the tensor is read-only; copy it first, e.g. t.numpy().copy()")
        if needs_contiguous(flags) and not contiguous(self):
            raise ExportRefused("the tensor is not contiguous; copy it first, e.g. t.numpy().copy()")
        buffer.buf = self.data
        buffer.obj = self
        buffer.len = size_of(self) * self.itemsize
        buffer.itemsize = self.itemsize
        buffer.readonly = self.readonly
        buffer.ndim = self.ndim
        buffer.format = <char*>format if flags & PyBUF_FORMAT else NULL
        buffer.shape = <Py_ssize_t*>self.shape_ if flags & PyBUF_ND else NULL
        buffer.strides = <Py_ssize_t*>self.strides_ if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL


cdef bint is_device(object device, int device_type, int device_id):
    """Return True if `device`, a DLPack pair (type, number), is the given one; its type may be an enum."""
    try:
        kind, number = device
        return bool(int(kind) == device_type and int(number) == device_id)
    except Exception:
        return False


cdef bint needs_contiguous(int flags) noexcept:
    cdef int kind
    for kind in (PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_ANY_CONTIGUOUS):
        if flags & kind == kind:
            return True
    return flags & PyBUF_STRIDES != PyBUF_STRIDES


cdef Tensor copy_of(Tensor tensor):
    """Return a C-contiguous host copy."""
    cdef Tensor copied = new_tensor(tensor.ndim, tensor.shape_, tensor.dtype_code, False)
    copied.numpy()[...] = tensor.numpy()
    return copied
