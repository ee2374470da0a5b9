"""Arrays, streams and graphs of the device that a test runs on, emulated or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagecore.arrays import Tensor, as_dtype, as_tensor, strided
from pagecore.arrays.cuda.protocol import Runtime


class DeviceBytes:
    """Device memory as bytes, for `as_tensor`."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        address, self.owner = runtime.allocate(num_bytes, 0, 0)
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def extent(array: Any) -> tuple[int, int]:
    """Return the bytes that an array spans before its first element, and from its first element on."""
    if 0 in array.shape:
        return 0, 0
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    before, after = -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return before, after + array.itemsize


def whole(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Kit:
    """Access to one CUDA device.

    Attributes
    ----------
    runtime : Runtime
        An emulated runtime also counts its calls (`counts`) and accepts a `seed`.
    device : str
    is_emulated : bool
    """

    def __init__(self, runtime: Runtime, *, is_emulated: bool = True) -> None:
        self.runtime: Any = runtime
        self.device = "cuda:0"
        self.is_emulated = is_emulated
        self._streams: list[Any] = []  # CuPy streams, which would otherwise be destroyed

    def put(self, array: Any) -> Tensor:
        """Copy a host array to the device, with its strides, dtype and gaps.

        A new array begins at a multiple of 256 bytes. A view keeps its offset from its base, modulo 256.
        """
        array = np.asarray(array)
        before, after = extent(array)
        low = array.ctypes.data - before
        offset = (low - whole(array).ctypes.data) % 256
        tensor = self._tensor(array.shape, array.strides, array.dtype, offset + before, offset + before + after)
        if before + after:
            self.runtime.copy(tensor.pointer - before, low, before + after, 0)
            self.runtime.synchronize(0)
        return tensor

    def get(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Copy a device tensor to a host array with the same strides, after all work of stream 0."""
        tensor = as_tensor(tensor)
        before, after = extent(tensor)
        held = np.empty(max(before + after, tensor.itemsize), np.uint8)
        if before + after:
            self.runtime.copy(held.ctypes.data, tensor.pointer - before, before + after, 0)
        self.runtime.synchronize(0)
        return np.ndarray(tensor.shape, tensor.dtype.numpy, held.data, before, tensor.strides)

    def empty(self, shape: Any, dtype: Any = "float32") -> Tensor:
        """Return a contiguous device tensor filled with 0xFF bytes."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(as_dtype(dtype).numpy)
        strides = tuple(int(dtype.itemsize * np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        tensor = self._tensor(shape, strides, dtype, 0, num_bytes)
        if num_bytes and not self.is_emulated:
            self.runtime.fill(tensor.pointer, 0xFF, num_bytes, 0)
            self.runtime.synchronize(0)  # streams of `stream` do not wait for stream 0
        return tensor

    def stream(self) -> int:
        """Return the handle of a new stream that does not synchronize with other streams."""
        if self.is_emulated:
            return int(self.runtime.streams.make())
        import cupy

        self._streams.append(cupy.cuda.Stream(non_blocking=True))
        return int(self._streams[-1].ptr)

    def capture(self, work: Callable[[int], None]) -> Callable[[], None]:
        """Capture what `work` submits to a stream; return a function that launches the graph and waits for it."""
        if self.is_emulated:
            streams, stream = self.runtime.streams, self.runtime.streams.make()
            streams.begin_capture(stream)
            try:
                work(stream)
            finally:
                graph = streams.end_capture(stream)
        else:
            import cupy

            captured = cupy.cuda.Stream(non_blocking=True)
            self._streams.append(captured)
            stream = captured.ptr
            with captured:
                captured.begin_capture()
                try:
                    work(stream)
                finally:
                    recorded = captured.end_capture()

        def replay() -> None:
            if self.is_emulated:
                graph.launch(stream)
            else:
                recorded.launch(captured)
            self.runtime.synchronize(stream)

        return replay

    def _tensor(self, shape: Any, strides: Any, dtype: Any, offset: int, num_bytes: int) -> Tensor:
        return strided(DeviceBytes(self.runtime, max(num_bytes, 1)), shape, strides, offset, dtype)
