"""Kernels by name, loaded once for each device."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.errors import DeviceError
from pagecore.ops.cuda.compilation.manifest import instance

# Kernels by runtime: a kernel of one runtime is invalid in another, as the tests use.
_loaded: WeakKeyDictionary[Runtime, dict[tuple[str, int], Any]] = WeakKeyDictionary()
_loading = threading.Lock()
# The runtime of the last call with its kernels, which saves launches a lookup in _loaded.
_latest: tuple[Runtime | None, dict[tuple[str, int], Any]] = (None, {})


def kernel(name: str, device: int, stream: int | None = None) -> Any:
    """Return the kernel of an instance of the manifest, ready for `launch`; the first call compiles and loads it.

    Raises
    ------
    DeviceError
        The device or the compiler is missing, or the kernels do not support the device. Or the kernel is not loaded and
        `stream` is being captured: loading would invalidate the capture.
    """
    latest, kernels = _latest
    found = kernels.get((name, device)) if latest is runtime() else None
    return found if found is not None else _load(name, device, stream)


def launch(
    name: str,
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    stream: int,
    parameters: int,
    device: int,
) -> None:
    """Launch an instance with the parameter struct at the address `parameters`; the struct is copied."""
    runtime().launch(kernel(name, device, stream), grid, num_threads, shared_bytes, stream, parameters)


def _load(name: str, device: int, stream: int | None) -> Any:
    global _latest  # noqa: PLW0603
    # The compiler and its files are loaded with the first kernel: a process without a device never needs them.
    from pagecore.ops.cuda.compilation.compiler import check_architecture
    from pagecore.ops.cuda.compilation.cubins import cubin

    with _loading:
        current = runtime()
        kernels = _loaded.setdefault(current, {})
        if (name, device) not in kernels:
            wanted = instance(name)
            if stream is not None and current.is_capturing(stream):
                raise DeviceError(
                    f"{name} is not loaded yet, and stream {stream:#x} is being captured: run the call once before the "
                    "capture"
                )
            properties = current.properties(device)
            architecture = check_architecture(properties.architecture)

            def image() -> tuple[bytes, str]:
                compiled = cubin([wanted], architecture)
                return compiled.image, compiled.symbols[name]

            kernels[name, device] = current.load(name, device, image, properties.shared_bytes_per_block)
        _latest = (current, kernels)
        return kernels[name, device]
