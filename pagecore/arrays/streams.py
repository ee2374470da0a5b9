"""On which stream an op works, and what must be done before."""

from __future__ import annotations

import sys
from typing import Any

from pagecore.arrays import cuda
from pagecore.arrays._import import work_stream
from pagecore.arrays._tensor import Tensor
from pagecore.arrays.device_memory import DEFAULT_STREAM, LEGACY_STREAM, DeviceMemory
from pagecore.arrays.frameworks import is_instance
from pagecore.arrays.refusals import brief
from pagecore.errors import DeviceError, UnsupportedOption


def stream_handle(stream: object, example: object, device: int) -> int:
    """Return the handle of the stream that work on `device` is given to.

    Parameters
    ----------
    stream : None, int or a stream
        An int is a handle (0: the default stream); a stream is anything with ``__cuda_stream__``, of torch or of CuPy.
        None is the current stream of the framework that `example` belongs to, else CuPy's.
    example : object
        The array whose framework decides where `stream` is None: the query, the key.
    device : int

    Raises
    ------
    UnsupportedOption
        What stands for no stream.
    DeviceError
        A stream of another device.
    """
    if stream is None:
        return _current_stream(example, device)
    if type(stream) is int:
        return _checked_handle(stream, stream)
    _check_same_device(stream, device)
    return _handle_of(stream)


def note_work(tensor: Tensor, stream: int) -> None:
    """Remember that `stream` was given work on memory of pagecore's, so that who takes it over waits for it."""
    owner = tensor.allocation
    if type(owner) is DeviceMemory:
        owner.stream = stream


def await_producer(array: Any, stream: int) -> None:
    """Let `stream` wait for the work that makes `array` where its framework keeps its streams to itself, as JAX does.

    Arrays of torch, CuPy and pagecore are used in the order of the stream that the caller chose.
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
    """Return the handle of a stream object: by the protocol, else by what torch and CuPy call it."""
    try:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            version, handle = protocol() if callable(protocol) else protocol
            if version != 0:
                text = f"__cuda_stream__ has version {brief(version)}; this version of pagecore reads 0"
                raise UnsupportedOption(text)
        else:
            handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    except UnsupportedOption:
        raise
    except Exception as error:
        raise UnsupportedOption(f"__cuda_stream__ of {type(stream).__name__} is broken: {brief(error)}") from error
    return _checked_handle(handle, stream)


def _checked_handle(handle: object, stream: object) -> int:
    if isinstance(handle, bool) or not isinstance(handle, int) or not 0 <= handle < 1 << 64:
        raise UnsupportedOption(
            f"stream is {brief(stream)}; it must be None, a handle (an int of at least 0), or a stream of torch, "
            "CuPy or anything else with __cuda_stream__"
        )
    return handle


def _check_same_device(stream: Any, device: int) -> None:
    """Refuse a stream that says it is of another device; torch and CuPy say so."""
    for name in ("device_index", "device_id"):
        try:
            its = getattr(stream, name, None)
        except Exception:
            continue  # _handle_of says what is wrong with it
        if isinstance(its, int) and its >= 0 and its != device:
            raise DeviceError(f"stream is of cuda:{its} and the arrays are on cuda:{device}; pass a stream of theirs")
