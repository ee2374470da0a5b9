"""The CUDA runtime in use: CuPy's, created by the first call of `runtime`, or another one set by `use_runtime`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagecore.arrays.cuda.protocol import Runtime

__all__ = ["runtime", "use_runtime"]

_runtime: Runtime | None = None


def runtime() -> Runtime:
    """Return the runtime in use.

    Raises
    ------
    DeviceError
        CuPy is missing or finds no usable device.
    """
    global _runtime  # noqa: PLW0603
    if _runtime is None:
        from pagecore.arrays.cuda.cupy_runtime import CupyRuntime  # imports CuPy when a runtime is created

        _runtime = CupyRuntime()
    return _runtime


@contextmanager
def use_runtime(other: Runtime | None) -> Iterator[None]:
    """Use another runtime in a with-block. Memory and events of one runtime are invalid in another."""
    global _runtime  # noqa: PLW0603
    before, _runtime = _runtime, other
    try:
        yield
    finally:
        _runtime = before
