"""The stream of an operation, and its order after work of other streams."""

from __future__ import annotations

import sys
from typing import Any

from pagecore.arrays import cuda
from pagecore.arrays.cuda.device_memory import DEFAULT_STREAM, LEGACY_STREAM, DeviceMemory
from pagecore.arrays.exchange._exchange import work_stream
from pagecore.arrays.exchange.frameworks import is_instance
from pagecore.arrays.tensors._tensor import Tensor
from pagecore.errors import DeviceError, UnsupportedOption, shown


def stream_handle(stream: object, example: object, device: int) -> int:
    """Return the handle of the stream for work on `device`.

    Parameters
    ----------
    stream : None, int or a stream
        An int is a handle (0: the default stream). A stream is an object with ``__cuda_stream__``, or one of torch or
        CuPy. None is the current stream of the framework of `example`, otherwise CuPy's.
    example : object
        The array whose framework decides if `stream` is None: the query, the key.
    device : int

    Raises
    ------
    UnsupportedOption
        `stream` is not a stream.
    DeviceError
        The stream belongs to another device.
    """
    if stream is None:
        return _current_stream(example, device)
    if type(stream) is int:
        return _checked_handle(stream, stream)
    _check_same_device(stream, device)
    return _handle_of(stream)


def note_work(tensor: Tensor, stream: int) -> None:
    """Record that `stream` works on memory of pagecore, so that a consumer of the memory waits for the stream."""
    owner = tensor.allocation
    if type(owner) is DeviceMemory:
        owner.stream = stream


def await_producer(array: Any, stream: int) -> None:
    """Make `stream` wait for the work that computes `array`, if it is an array of JAX.

    JAX does not expose its streams. Arrays of torch, CuPy and pagecore are used in the order of the stream that the
    caller selected.
    """
    if not is_instance(array, "jax", "Array"):
        return
    try:
        array.__dlpack__(stream=LEGACY_STREAM if stream == DEFAULT_STREAM else stream)
    except Exception as error:
        raise DeviceError(f"JAX cannot order its work before stream {stream:#x}: {error}") from error


def _current_stream(example: object, device: int) -> int:
    if type(example) is Tensor:
        return cuda.runtime().current_stream(device)
    handle: int | None = work_stream(example, device)
    if handle is not None:
        return handle
    if is_instance(example, "torch", "Tensor"):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if is_instance(example, "cupy", "ndarray"):
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    return cuda.runtime().current_stream(device)


def _handle_of(stream: object) -> int:
    """Return the handle of a stream object, from ``__cuda_stream__`` or from the attribute of torch or CuPy."""
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            version, handle = protocol() if callable(protocol) else protocol
            if version != 0:
                text = f"__cuda_stream__ has version {shown(version)}; this version of pagecore reads 0"
                raise UnsupportedOption(text)
        else:
            handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    except UnsupportedOption:
        raise
    except Exception as error:
        raise UnsupportedOption(f"__cuda_stream__ of {type(stream).__name__} is broken: {shown(error)}") from error
    return _checked_handle(handle, stream)


def _checked_handle(handle: object, stream: object) -> int:
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise UnsupportedOption(
            f"stream is {shown(stream)}; it must be None, a handle (an int of at least 0), or a stream of torch, "
            "CuPy or another library with __cuda_stream__"
        )
    return handle


def _check_same_device(stream: Any, device: int) -> None:
    """Raise DeviceError for a stream of another device; streams of torch and CuPy name their device."""
    for name in ("device_index", "device_id"):
        try:
            its = getattr(stream, name, None)
        except Exception:
            continue  # _handle_of raises with the reason
        if isinstance(its, int) and its >= 0 and its != device:
            raise DeviceError(
                f"stream is of cuda:{its} and the arrays are on cuda:{device}; pass a stream of cuda:{device}"
            )
