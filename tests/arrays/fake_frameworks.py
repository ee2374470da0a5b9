"""Fakes of torch, CuPy and JAX arrays on a CUDA device, over memory of the runtime in use."""

from __future__ import annotations

import types
from contextlib import contextmanager
from typing import Any

import pagecore


class Streams:
    """The current stream of a framework, on each device."""

    def __init__(self) -> None:
        self.current = {0: 40, 1: 41}

    @contextmanager
    def on(self, device: int, handle: int) -> Any:
        before, self.current[device] = self.current[device], handle
        try:
            yield
        finally:
            self.current[device] = before


class Array:
    """An array of a framework, which exports a tensor of pagecore as its own memory."""

    def __init__(self, tensor: pagecore.Tensor, stream: int) -> None:
        self.tensor, self.stream = tensor, stream
        self.asked: list[object] = []

    def __getitem__(self, index: Any) -> Array:
        return type(self)(self.tensor[index], self.stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream: object = None, **options: Any) -> Any:
        self.asked.append(stream)
        return self.tensor.__dlpack__(stream=-1, **options)


def fake_torch(streams: Streams) -> types.ModuleType:
    class Tensor(Array):
        pass

    def device(kind: str, index: int) -> Any:
        return types.SimpleNamespace(kind=kind, index=index)

    def empty(shape: Any, *, dtype: str, device: Any) -> Tensor:
        handle = streams.current[device.index]
        return Tensor(pagecore.empty(shape, dtype, f"{device.kind}:{device.index}", stream=handle), handle)

    def stream_of(handle: int, index: int) -> Any:
        return types.SimpleNamespace(cuda_stream=handle, device_index=index)

    module = types.ModuleType("torch")
    vars(module).update(
        Tensor=Tensor,
        device=device,
        empty=empty,
        float32="float32",
        bfloat16="bfloat16",
        int32="int32",
        uint8="uint8",
        from_dlpack=lambda tensor: Tensor(tensor, -1),
        cuda=types.SimpleNamespace(
            current_stream=lambda index: stream_of(streams.current[index], index),
            default_stream=lambda device: stream_of(0, device.index),
            ExternalStream=lambda handle, device: stream_of(handle, device.index),
            stream=lambda stream: streams.on(stream.device_index, stream.cuda_stream),
        ),
    )
    return module


def fake_jax() -> types.ModuleType:
    class JaxArray(Array):
        @property
        def dtype(self) -> str:
            return str(self.tensor.dtype)

    JaxArray.__module__ = "jaxlib._jax"

    def from_dlpack(tensor: pagecore.Tensor, copy: bool | None = None) -> JaxArray:
        return JaxArray(pagecore.as_tensor(tensor.__dlpack__(stream=90)), 90)

    module = types.ModuleType("jax")
    vars(module).update(Array=JaxArray, dlpack=types.SimpleNamespace(from_dlpack=from_dlpack))
    return module
