"""Constructors of tensors, views of buffers, and conversion of tensors to arrays of a framework."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays.dtypes.codes cimport CUDA
from pagecore.arrays.exchange._exchange cimport Exchange, exchange_of, export_versioned
from pagecore.arrays.exchange.dlpack cimport make_array
from pagecore.arrays.tensors._tensor cimport Tensor, as_tensor, contiguous, new_tensor, size_of, tensor_of
from pagecore.arrays.views._shapes cimport read_integers
from pagecore.arrays.views.array_view cimport (
    ArrayView,
    Extent,
    checked_element_count,
    checked_extent,
    item_bytes,
    set_contiguous_strides,
)

from numpy import ndarray

from pagecore.arrays import cuda
from pagecore.arrays.cuda.device_memory import DeviceMemory
from pagecore.arrays.cuda.devices import device_index
from pagecore.arrays.dtypes.dtype import as_dtype
from pagecore.arrays.exchange import frameworks
from pagecore.arrays.tensors.streams import stream_handle
from pagecore.errors import ShapeError, UnsupportedOption, shown


cdef Tensor make(object shape, object dtype, object device, object stream, bint zeroed):
    cdef int64_t lengths[8]
    cdef int ndim = read_integers(shape, lengths, "shape")
    cdef int code = as_dtype(dtype).code
    index = device_index(device)
    if index is not None:
        handle = None if stream is None else stream_handle(stream, None, index)
        return new_cuda_tensor(ndim, lengths, code, index, handle, zeroed)
    if stream is not None:
        raise UnsupportedOption(f"stream is {shown(stream)}; host memory has no streams: leave it out")
    return new_tensor(ndim, lengths, code, zeroed)


cdef Tensor new_cuda_tensor(int ndim, const int64_t* shape, int code, int device, object stream, bint zeroed):
    cdef ArrayView view
    cdef int i
    view.dtype = code
    cdef int64_t size = checked_element_count(ndim, shape, item_bytes(view))
    view.ndim = ndim
    for i in range(ndim):
        view.shape[i] = shape[i]
    set_contiguous_strides(view)
    memory = DeviceMemory(size * item_bytes(view), device, stream, zeroed)
    view.data = <char*><uintptr_t>memory.address
    view.device_type = CUDA
    view.device_id = device
    return tensor_of(view, memory)


def pinned(nbytes, device, *, bint zeroed=False):
    """Return page-locked host memory as a tensor of bytes that a CUDA device accesses over its bus.

    `Tensor.device` is the CUDA device, so operations on the device accept the tensor and the host's do not. Before
    freeing the tensor the caller waits for work of the device on it.

    Parameters
    ----------
    nbytes : int
    device : str
        A CUDA device.
    zeroed : bool
        Zero the memory on the host; otherwise its elements are undefined.

    Returns
    -------
    Tensor
        ``[nbytes]``, uint8. It owns the memory.

    Raises
    ------
    DeviceError
        The device cannot be used.
    NotEnoughMemory
        The host cannot allocate the pinned memory.
    """
    memory = cuda.runtime().allocate_pinned(nbytes)
    if zeroed:
        memory.fill(0)
    return mapped(memory.ctypes.data, nbytes, device, memory)


def mapped(address, nbytes, device, owner):
    """Return memory that a CUDA device can access as a tensor of bytes on that device.

    Parameters
    ----------
    address, nbytes : int
        Page-locked host memory, which the device accesses over its bus, or memory of the device.
    device : str
        A CUDA device.
    owner : object
        Owner of the memory; the tensor keeps it alive.

    Returns
    -------
    Tensor
        ``[nbytes]``, uint8.
    """
    cdef ArrayView view
    view.data = <char*><uintptr_t>address
    view.dtype = as_dtype("uint8").code
    view.ndim = 1
    view.shape[0] = nbytes
    set_contiguous_strides(view)
    view.device_type = CUDA
    view.device_id = device_index(device)
    return tensor_of(view, owner)


def empty(shape, dtype="float32", device="cpu", *, stream=None):
    """Return a new C-contiguous tensor with undefined elements.

    Parameters
    ----------
    shape : int or sequence of int
        Up to 8 lengths, each at least 0.
    dtype : dtype
        A dtype that `as_dtype` accepts.
    device : str
        ``"cpu"``, ``"cuda"`` (which is ``"cuda:0"``) or another CUDA device.
    stream : int or a stream, optional
        For CUDA memory, the stream that uses it; other streams have to wait for this one first. When None, the call
        waits until every stream may use the memory.

    Returns
    -------
    Tensor
        Aligned to 64 bytes on the host, to 2 MiB with huge pages advised from 4 MiB on, and to 256 bytes on CUDA.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        A negative length, more than 2^63 - 1 bytes; a dtype that is not in the table; an invalid stream.
    DeviceError
        The device does not exist or cannot be used.
    NotEnoughMemory
        The host or the device cannot allocate the memory.
    """
    return make(shape, dtype, device, stream, False)


def zeros(shape, dtype="float32", device="cpu", *, stream=None):
    """Return a new tensor of zeros; parameters and errors are those of `empty`.

    Pages of a large tensor on the host take memory when they are first touched.
    """
    return make(shape, dtype, device, stream, True)


def strided(buffer, shape, strides_bytes=None, byte_offset=0, dtype=None):
    """Return a bounds-checked view of part of a contiguous tensor or buffer.

    Parameters
    ----------
    buffer : array
        An array that `as_tensor` accepts; contiguous. The view keeps its memory alive and is read-only if it is.
    shape : int or sequence of int
    strides_bytes : sequence of int, optional
        Bytes from one element to the next along each axis, which may be negative or 0; C-contiguous when None.
    byte_offset : int
        Position of element 0 in the buffer.
    dtype : dtype, optional
        The dtype of the view, independent of the buffer's; the buffer's when None.

    Raises
    ------
    ShapeError
        The buffer is not contiguous, or an element of the view would be outside it.
    """
    cdef Tensor base = as_tensor(buffer)
    cdef ArrayView view = base.view()
    cdef int64_t offset
    if not contiguous(base):
        raise ShapeError(f"the buffer of shape {base.shape} has strides {base.strides}; it must be contiguous")
    if dtype is not None:
        view.dtype = as_dtype(dtype).code
    view.ndim = read_integers(shape, view.shape, "shape")
    checked_element_count(view.ndim, view.shape, item_bytes(view))
    if strides_bytes is None:
        set_contiguous_strides(view)
    elif read_integers(strides_bytes, view.strides, "strides_bytes") != view.ndim:
        raise ShapeError(
            f"strides_bytes is {shown(strides_bytes)}; it must have {view.ndim} entries, one for each axis of shape "
            f"{shown(shape)}"
        )
    if read_integers(byte_offset, &offset, "byte_offset") != 1:
        raise ShapeError(f"byte_offset is {shown(byte_offset)}; it must be one integer")
    cdef Extent extent = checked_extent(view)
    nbytes = size_of(base) * base.itemsize
    first, last = <object>offset + extent.low, <object>offset + extent.high
    if first < 0 or last > nbytes:
        raise ShapeError(f"the view would span bytes {first} to {last} of a buffer of {nbytes} bytes")
    view.data += offset
    return tensor_of(view, base.owner)


def like(tensor, example):
    """Return a tensor as an array of the framework of `example`, over the same memory.

    Parameters
    ----------
    tensor : Tensor
        Or an array that `as_tensor` accepts.
    example : Tensor, numpy.ndarray, torch.Tensor, jax.Array, cupy.ndarray or anything else
        A list or another object selects NumPy.

    Returns
    -------
    Tensor, numpy.ndarray (of ml_dtypes for bfloat16 and float8), torch.Tensor, jax.Array or cupy.ndarray
        Memory that is returned as a JAX array must not be written again.

    Raises
    ------
    UnsupportedOption
        The framework cannot view the memory without a copy: read-only memory in torch or JAX, negative strides in
        torch, memory in JAX that is not contiguous and aligned to 64 bytes.
    UnsupportedDtype
        64-bit integers in JAX without jax_enable_x64.
    DeviceError
        CUDA memory in NumPy, host memory in CuPy.
    """
    cdef Tensor source = as_tensor(tensor)
    if type(example) is Tensor:
        return source
    if type(example) is ndarray:
        return source.numpy()
    cdef Exchange exchange = exchange_of(type(example))
    if exchange is not None and exchange.torch and not source.readonly:
        return through_exchange(source, exchange)
    return frameworks.like_framework(source, example)


cdef object through_exchange(Tensor source, Exchange exchange):
    """Return a torch tensor, made by the exchange function without a capsule."""
    cdef int i
    for i in range(source.ndim):
        if source.strides_[i] < 0:
            frameworks.refuse_negative_strides(source)
    return make_array(exchange.api, export_versioned(source.view(), source.owner, 0, 3))
