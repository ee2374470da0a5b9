"""CuPy, imported when it is needed, and errors that say what is missing."""

from __future__ import annotations

from typing import Any

from pagecore.errors import DeviceError

INSTALL = "install pagecore[cuda12] or pagecore[cuda13] to match the driver's CUDA version"


def import_cupy() -> Any:
    """Import and return CuPy; raise DeviceError if it is missing, broken, or not built for CUDA."""
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            raise DeviceError(f"CUDA needs CuPy, which is not installed: {INSTALL}") from error
        raise DeviceError(f"CuPy is installed and does not work ({first_line(error)}): {INSTALL}") from error
    except Exception as error:  # a broken installation can fail in any way
        raise DeviceError(f"CuPy is installed and does not work ({first_line(error)}): {INSTALL}") from error
    if getattr(cupy.cuda.runtime, "is_hip", False):
        raise DeviceError(f"CuPy is built for ROCm, which is not supported: {INSTALL}")
    return cupy


def count_devices(runtime: Any) -> int:
    """Return the number of devices; raise DeviceError if it is 0."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise _no_device(runtime, error) from error
    if count == 0:
        raise _no_device(runtime, None)
    return count


def _no_device(runtime: Any, error: Exception | None) -> DeviceError:
    driver = runtime.driverGetVersion()
    if driver == 0:
        return DeviceError("no CUDA driver found: install NVIDIA's driver, and give containers access to it")
    if "InsufficientDriver" in str(error):
        built = runtime.runtimeGetVersion()
        return DeviceError(
            f"the driver supports CUDA {_version(driver)} and CuPy is built for CUDA {_version(built)}: install "
            f"pagecore[cuda{driver // 1000}], or a newer driver"
        )
    return DeviceError(
        f"the CUDA driver sees no device ({error or 'it counts 0'}): check nvidia-smi and CUDA_VISIBLE_DEVICES"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message with text in it."""
    lines = [line for line in str(error).splitlines() if line.strip(" =")]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
