"""Conversions between tensors and NumPy, CuPy and the array interfaces, for `Tensor`; none is on a hot path."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from pagecore.arrays.cuda.device_memory import DEFAULT_STREAM, LEGACY_STREAM, DeviceMemory
from pagecore.arrays.dtypes.dtype import DType, as_dtype
from pagecore.arrays.exchange.frameworks import is_instance
from pagecore.arrays.refusals import ExportRefused
from pagecore.arrays.views.tensor_like import TensorLike
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption, shown

Array = np.ndarray[Any, np.dtype[Any]]


def not_viewable(obj: object) -> PagecoreError:
    """Return the error for an object without memory to view."""
    if is_instance(obj, "jax.core", "Tracer"):
        return UnsupportedOption(
            "the array is traced by JAX (under jax.jit, vmap or grad) and has no memory yet; there, call write_kv and "
            "paged_attention of pagecore.interop.jax"
        )
    return UnsupportedDtype(
        f"a {type(obj).__name__} is not an array; a tensor views NumPy, torch, JAX and CuPy arrays, DLPack producers, "
        "array interfaces and buffers without a copy: convert it first, e.g. numpy.asarray(x, dtype)"
    )


def without_mask(array: Array) -> Array:
    """Return the array; raise UnsupportedOption if it is masked, because a view would show the masked elements."""
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedOption("the array is masked, which a view cannot be; pass array.filled(...) or array.data")
    return array


def numpy_without_copy(obj: object) -> Array:
    """Return an ndarray over an object with ``__array_interface__``; raise ExportRefused if that needs a copy."""
    try:
        return np.array(obj, copy=False)
    except Exception as error:
        raise ExportRefused(f"the {type(obj).__name__} cannot be viewed: {error}") from error


def read_cuda_interface(obj: Any) -> tuple[int, Any, Any, DType, bool]:
    """Return the pointer, shape, strides, dtype and read-only flag of ``__cuda_array_interface__``."""
    try:
        interface = obj.__cuda_array_interface__
        pointer, readonly = interface["data"]
        shape, typestr = interface["shape"], interface["typestr"]
        strides, mask = interface.get("strides"), interface.get("mask")
        pointer = int(pointer or 0)
    except Exception as error:
        raise ExportRefused(f"the CUDA array interface of {type(obj).__name__} is broken: {error!r}") from error
    if mask is not None:
        raise UnsupportedOption("the array is masked, which a view cannot be; pass it without the mask")
    if not 0 <= pointer < 1 << 64:
        raise ShapeError(
            f"the CUDA array interface of {type(obj).__name__} has the address {pointer}; addresses are 0 to 2^64 - 1"
        )
    return pointer, shape, strides, as_dtype(typestr), bool(readonly)


def array_interface(tensor: TensorLike) -> dict[str, object]:
    """Return ``__array_interface__``; raise AttributeError for device memory and for dtypes that NumPy lacks."""
    if tensor.device != "cpu":
        raise AttributeError(f"a tensor on {tensor.device} has no __array_interface__")
    return _interface(tensor)


def cuda_array_interface(tensor: TensorLike) -> dict[str, object]:
    """Return ``__cuda_array_interface__`` (version 3, without a stream to wait for); AttributeError as above."""
    if tensor.device == "cpu":
        raise AttributeError("a tensor on the host has no __cuda_array_interface__")
    return _interface(tensor) | {"stream": None}


def _interface(tensor: TensorLike) -> dict[str, object]:
    dtype = tensor.dtype
    if dtype.cupy != dtype.numpy:
        raise AttributeError(f"array interfaces cannot describe {dtype}; use DLPack")
    return {
        "version": 3,
        "shape": tensor.shape,
        "strides": tensor.strides,
        "typestr": dtype.numpy.str,
        "data": (tensor.pointer, tensor.readonly),
    }


def as_array(tensor: TensorLike, dtype: Any, copy: bool | None) -> Array:
    """Return the tensor as ``__array__`` does in NumPy 2: a view, unless another dtype or a copy is requested."""
    array: Array = tensor.numpy()
    if dtype is not None and np.dtype(dtype) != array.dtype:
        if copy is False:
            raise ValueError(f"a {tensor.dtype} tensor cannot become {np.dtype(dtype)} without a copy; pass copy=None")
        return array.astype(dtype)
    return array.copy() if copy else array


def assign(target: TensorLike, value: object, view: Callable[[object], TensorLike]) -> None:
    """Write `value`, broadcast and cast as NumPy does, to a host tensor; `view` makes a tensor of a DLPack array."""
    if target.readonly:
        raise UnsupportedOption("the tensor is read-only; copy it first, e.g. as_tensor(t.numpy().copy())")
    array: Array = target.numpy()
    # NumPy alone cannot read dtypes that it lacks, such as torch's bfloat16.
    if hasattr(type(value), "__dlpack__"):
        with suppress(PagecoreError):
            value = view(value).numpy()
    try:
        array[...] = value
    except MemoryError:
        raise
    except Exception as error:
        text = f"the value does not fit shape {target.shape}, dtype {target.dtype}: {shown(error)}"
        raise ShapeError(text) from error


def tolist(tensor: TensorLike) -> Any:
    """Return nested lists of Python numbers; exact, because float32 represents every bfloat16 and float8."""
    array: Array = tensor.numpy()
    if tensor.dtype.cupy != tensor.dtype.numpy:
        array = array.astype(np.float32)
    return array.tolist()


def item(tensor: TensorLike) -> Any:
    """Return the only element as a Python number."""
    if tensor.size != 1:
        raise ShapeError(f"the tensor has {tensor.size} elements; .item() and bool() need exactly one")
    return tolist(tensor.reshape(()))


def order_streams(owner: Any, stream: object) -> None:
    """Make a DLPack consumer's stream wait for the pending work on the memory, as the array API specifies.

    An event does so for memory of pagecore. For memory of another framework that framework is called.
    """
    if isinstance(owner, DeviceMemory):
        handle = _consumer_handle(stream)
        if handle is not None:
            owner.order(handle)
        return
    if stream == -1:
        return
    producer = getattr(owner, "producer", None) or owner
    if not hasattr(producer, "__dlpack__"):
        raise ExportRefused("the producer of this memory cannot order streams; synchronise, then pass stream=-1")
    producer.__dlpack__(stream=stream)


def _consumer_handle(stream: object) -> int | None:
    """Return the handle of a consumer's stream; None if the consumer orders the streams itself."""
    if stream is None:
        return DEFAULT_STREAM
    if isinstance(stream, bool) or not isinstance(stream, int) or not -1 <= stream < 1 << 64:
        raise ExportRefused(f"stream is {shown(stream)}; for CUDA memory it must be None, -1 or the handle of a stream")
    if stream == -1:
        return None
    return DEFAULT_STREAM if stream == LEGACY_STREAM else stream


def cupy_view(tensor: TensorLike) -> Any:
    """Return a CuPy array over CUDA memory."""
    if tensor.device == "cpu":
        raise DeviceError("the tensor is on the host; .cupy() views CUDA memory: copy with cupy.asarray(t.numpy())")
    try:
        import cupy
    except ImportError as error:
        raise DeviceError("CuPy is not installed; install pagecore[cuda12] or pagecore[cuda13]") from error
    memory = cupy.cuda.UnownedMemory(tensor.pointer, tensor.nbytes, tensor, int(tensor.device.partition(":")[2]))
    return cupy.ndarray(tensor.shape, tensor.dtype.cupy, cupy.cuda.MemoryPointer(memory, 0), tensor.strides)
