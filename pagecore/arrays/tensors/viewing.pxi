"""Views of arrays of others: NumPy, DLPack, array interfaces, and the buffer protocol."""

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.object cimport PyObject, PyObject_TypeCheck, PyTypeObject
from cpython.pycapsule cimport PyCapsule_CheckExact
from libc.stdint cimport uintptr_t

from pagecore.arrays.dtypes.codes cimport CUDA
from pagecore.arrays.exchange._exchange cimport (
    Exchange,
    exchange_of,
    import_buffer,
    import_capsule,
    import_exchange,
    import_producer,
)
from pagecore.arrays.views._shapes cimport read_integers
from pagecore.arrays.views.array_view cimport (
    ArrayView,
    check_layout,
    checked_element_count,
    item_bytes,
    kMaxDims,
    set_contiguous_strides,
)

import numpy as np

from pagecore.arrays.dtypes.dtype import DTYPES, as_dtype
from pagecore.arrays.exchange import foreign
from pagecore.arrays.refusals import ExportRefused
from pagecore.errors import PagecoreError, ShapeError, shown

cdef extern from "pagecore/arrays/tensors/numpy_array.hpp" namespace "pagecore" nogil:
    cdef struct NumPyArray:
        char* data
        int ndim
        Py_ssize_t* shape
        Py_ssize_t* strides
        PyObject* descr
        int flags

    const int kNumPyWriteable

# NumPy has one object for each native dtype, so identity finds the code without a call.
cdef tuple _numpy_dtypes = tuple(dtype.numpy for dtype in DTYPES)


cpdef Tensor as_tensor(object obj):
    """Return a zero-copy view of an array.

    Parameters
    ----------
    obj : Tensor, numpy.ndarray, torch.Tensor, jax.Array, cupy.ndarray, any DLPack producer, a DLPack capsule, an
        object with an array interface, or one with the buffer protocol
        Up to 8 axes and a dtype of the table. A Tensor is returned as it is.

    Returns
    -------
    Tensor
        A view of the same memory, which it keeps alive. It is read-only if the source is; JAX arrays always are. CUDA
        memory is viewed without waiting for its streams. A later change of the memory of the source (``tensor.data =``
        in torch, ``resize`` in NumPy) does not change the view.

    Raises
    ------
    UnsupportedDtype
        The dtype is not in the table, or `obj` (a list, a number, None) has no memory to view.
    ShapeError, DeviceError
        More than 8 axes or sizes past 2^63; a device other than the host and CUDA.
    UnsupportedOption
        A view would silently lose gradients or a mask, or the producer fails to export (then also a BufferError).
    """
    cdef ArrayView view
    cdef Exchange exchange
    if type(obj) is Tensor:
        return <Tensor>obj
    if type(obj) is _ndarray:
        return tensor_of_numpy(obj)
    exchange = exchange_of(type(obj))
    if exchange is not None:
        owner = import_exchange(obj, exchange, &view)
        return tensor_of(view, owner)
    try:
        return foreign_tensor(obj)
    except (PagecoreError, MemoryError):
        raise
    except Exception as error:
        raise ExportRefused(f"the {type(obj).__name__} cannot be viewed: {shown(error)}") from error


cdef Tensor foreign_tensor(object obj):
    cdef ArrayView view
    if PyObject_TypeCheck(obj, <PyTypeObject*>_ndarray):  # isinstance would accept a false __class__
        return tensor_of_numpy(foreign.without_mask(obj))
    if PyCapsule_CheckExact(obj):
        owner = import_capsule(obj, &view)
        return tensor_of(view, owner)
    if isinstance(obj, (np.generic, type)):
        raise foreign.not_viewable(obj)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        owner = import_producer(obj, &view)
        return tensor_of(view, owner)
    if hasattr(obj, "__cuda_array_interface__"):
        return tensor_at(foreign.read_cuda_interface(obj), obj)
    if hasattr(obj, "__array_interface__"):
        return tensor_of_numpy(foreign.numpy_without_copy(obj))
    if PyObject_CheckBuffer(obj):
        owner = import_buffer(obj, &view)
        return tensor_of(view, owner)
    raise foreign.not_viewable(obj)


cdef Tensor tensor_at(tuple interface, object owner):
    """Return a view of CUDA memory described by an array interface. Interfaces lack a device; device 0 is assumed."""
    pointer, shape, strides, dtype, readonly = interface
    cdef ArrayView view
    view.data = <char*><uintptr_t>pointer
    view.dtype = dtype.code
    view.device_type = CUDA
    view.readonly = readonly
    view.ndim = read_integers(shape, view.shape, "shape")
    checked_element_count(view.ndim, view.shape, item_bytes(view))
    if strides is None:
        set_contiguous_strides(view)
    elif read_integers(strides, view.strides, "strides") != view.ndim:
        raise ShapeError(f"{strides} are not {view.ndim} strides")
    check_layout(view)
    return tensor_of(view, owner)


cdef Tensor tensor_of_numpy(object array):
    cdef NumPyArray* head = <NumPyArray*><PyObject*>array
    cdef ArrayView view
    cdef int i
    if head.ndim > kMaxDims:
        raise ShapeError(f"the array has {head.ndim} axes; a tensor has at most {kMaxDims}")
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
