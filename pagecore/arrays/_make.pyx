"""Tensors made from nothing, cut out of a buffer, or handed back to a framework."""

from libc.stdint cimport int64_t, uintptr_t

from pagecore.arrays._export cimport export_versioned
from pagecore.arrays._import cimport Exchange, exchange_of
from pagecore.arrays._shapes cimport read_integers
from pagecore.arrays._tensor cimport Tensor, as_tensor, contiguous, new_tensor, size_of, tensor_of
from pagecore.arrays.array_view cimport (
    ArrayView,
    Extent,
    checked_element_count,
    checked_extent,
    item_bytes,
    set_contiguous_strides,
)
from pagecore.arrays.codes cimport CUDA
from pagecore.arrays.dlpack cimport make_array

from pagecore.arrays import cuda, frameworks
from pagecore.arrays.device_memory import DeviceMemory
from pagecore.arrays.devices import device_index
from pagecore.arrays.dtypes import as_dtype
from pagecore.arrays.refusals import brief
from pagecore.arrays.streams import stream_handle
from pagecore.errors import ShapeError, UnsupportedOption


cdef Tensor make(object shape, object dtype, object device, object stream, bint zeroed):
    cdef int64_t lengths[8]
    cdef int ndim = read_integers(shape, lengths, "shape")
    cdef int code = as_dtype(dtype).code
    index = device_index(device)
    if index is not None:
        return new_cuda_tensor(ndim, lengths, code, index, stream, zeroed)
    if stream is not None:
        raise UnsupportedOption(f"stream is {brief(stream)}; host memory has no streams: leave it out")
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
    handle = None if stream is None else stream_handle(stream, None, device)
    memory = DeviceMemory(size * item_bytes(view), device, handle, zeroed)
    view.data = <char*><uintptr_t>memory.address
    view.device_type = CUDA
    view.device_id = device
    return tensor_of(view, memory)


def pinned(nbytes, device, *, bint zeroed=False):
    """Return page-locked host memory, as bytes that a CUDA device reads and writes over its bus.

    The tensor says that it is on the device: ops on the device take it, and nothing on the host does. Who drops it
    waits first for what the device does with it.

    Parameters
    ----------
    nbytes : int
    device : str
        A CUDA device.
    zeroed : bool
        Zero the memory, by the host; its elements are undefined otherwise.

    Returns
    -------
    Tensor
        ``[nbytes]``, uint8; it owns the memory.

    Raises
    ------
    DeviceError
        No way to the device, or a graph is being captured.
    NotEnoughMemory
        The host has not as much to lock.
    """
    cdef ArrayView view
    memory = cuda.runtime().allocate_pinned(nbytes)
    if zeroed:
        memory.fill(0)
    view.data = <char*><uintptr_t>memory.ctypes.data
    view.dtype = as_dtype("uint8").code
    view.ndim = 1
    view.shape[0] = nbytes
    set_contiguous_strides(view)
    view.device_type = CUDA
    view.device_id = device_index(device)
    return tensor_of(view, memory)


def empty(shape, dtype="float32", device="cpu", *, stream=None):
    """Return a new C-contiguous tensor with undefined elements.

    Parameters
    ----------
    shape : int or sequence of int
        At most 8 lengths, zeros among them or none at all.
    dtype : dtype
        Whatever `as_dtype` takes.
    device : str
        ``"cpu"``, ``"cuda"`` (which is ``"cuda:0"``) or another CUDA device.
    stream : int or a stream, optional
        Of CUDA memory: whose work it is for; work of other streams has to wait for this one. When None, this call waits
        until the memory is ready for every stream.

    Returns
    -------
    Tensor
        On the host 64-byte aligned, from 4 MiB on 2 MiB-aligned with huge pages advised; on CUDA 256-byte aligned.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        A negative length, more than 2^63 - 1 bytes, a dtype that is not served, what stands for no stream.
    DeviceError
        A device that is not there, or no way to one.
    NotEnoughMemory
        The system, or the device, has not that much.
    """
    return make(shape, dtype, device, stream, False)


def zeros(shape, dtype="float32", device="cpu", *, stream=None):
    """Return a new tensor of zeros, like `empty`; a large one of the host takes memory only where it is touched."""
    return make(shape, dtype, device, stream, True)


def strided(buffer, shape, strides_bytes=None, byte_offset=0, dtype=None):
    """Return a view of part of a contiguous tensor or buffer, bounds-checked.

    Parameters
    ----------
    buffer : array
        Whatever `as_tensor` takes; contiguous. The view keeps its memory alive and is read-only where it is.
    shape : int or sequence of int
    strides_bytes : sequence of int, optional
        Bytes from one element to the next along each axis, negative and zero ones too; C-contiguous when None.
    byte_offset : int
        Where element 0 lies in the buffer.
    dtype : dtype, optional
        That of the elements, whatever the buffer's is; the buffer's when None.

    Raises
    ------
    ShapeError
        The buffer has gaps, or an element would lie outside it.
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
            f"strides_bytes is {brief(strides_bytes)}; it must have {view.ndim} entries, one for each axis of shape "
            f"{brief(shape)}"
        )
    if read_integers(byte_offset, &offset, "byte_offset") != 1:
        raise ShapeError(f"byte_offset is {brief(byte_offset)}; it must be one integer")
    cdef Extent extent = checked_extent(view)
    nbytes = size_of(base) * base.itemsize
    first, last = <object>offset + extent.low, <object>offset + extent.high
    if first < 0 or last > nbytes:
        raise ShapeError(f"the view would span bytes {first} to {last} of a buffer of {nbytes} bytes")
    view.data += offset
    return tensor_of(view, base.owner)


def like(tensor, example):
    """Return a tensor as an array of the framework that `example` belongs to, over the same memory.

    Parameters
    ----------
    tensor : Tensor
        Or whatever `as_tensor` takes.
    example : Tensor, numpy.ndarray, torch.Tensor, jax.Array, cupy.ndarray or anything else
        A list or another object means NumPy.

    Returns
    -------
    Tensor, numpy.ndarray (of ml_dtypes for bfloat16 and float8), torch.Tensor, jax.Array or cupy.ndarray
        What was handed to JAX must not be written again.

    Raises
    ------
    UnsupportedOption
        The framework cannot show this memory without a copy: read-only memory in torch or JAX; in torch also negative
        strides, in JAX what is not 64-byte aligned and contiguous.
    UnsupportedDtype
        JAX runs without 64-bit integers.
    DeviceError
        CUDA memory in NumPy, host memory in CuPy.
    """
    cdef Tensor source = as_tensor(tensor)
    if type(example) is Tensor:
        return source
    cdef Exchange exchange = exchange_of(type(example))
    if exchange is not None and exchange.torch and not source.readonly:
        return through_exchange(source, exchange)
    return frameworks.like_framework(source, example)


cdef object through_exchange(Tensor source, Exchange exchange):
    """A torch tensor without a capsule between."""
    cdef int i
    for i in range(source.ndim):
        if source.strides_[i] < 0:
            frameworks.refuse_negative_strides(source)
    return make_array(exchange.api, export_versioned(source.view(), source.owner, 0, 3))
