"""Versions and capabilities of this installation. Only CuPy, which finds the devices, is imported for it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pagecore.arrays.cuda.current import runtime
from pagecore.arrays.cuda.protocol import Runtime
from pagecore.errors import DeviceError
from pagecore.ops.cpu import available_isas, isa, num_threads
from pagecore.ops.cpu_count import usable_cores
from pagecore.ops.cuda.compilation.compiler import compiler_version

__all__ = ["cuda_status", "info_rows", "installed_version"]

CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def info_rows() -> list[tuple[str, str]]:
    """Return the name and value of each line of `pagecore info`."""
    rows = [
        ("pagecore", installed_version("pagecore") or "not installed, running from source"),
        ("python", platform.python_version()),
    ]
    rows += [
        (package, installed_version(package) or "not installed") for package in ("numpy", "ml_dtypes", "torch", "jax")
    ]
    cupy = next(
        (f"{found} ({package})" for package in CUPY_PACKAGES if (found := installed_version(package))), "not installed"
    )
    rows += [
        ("cupy", cupy),
        ("instruction set", f"{isa()} (available: {', '.join(available_isas())})"),
        ("threads", f"{num_threads()} on {usable_cores()} cores"),
        ("cuda", cuda_status()),
    ]
    return rows


def cuda_status() -> str:
    """Describe the usable CUDA devices, or explain why CUDA is unavailable; imports CuPy."""
    compiler = _compiler_status()
    try:
        found = runtime()
        devices = [_device_status(found, index) for index in range(found.num_devices())]
    except DeviceError as error:
        if isinstance(compiler, DeviceError) and str(compiler) == str(error):
            return f"unavailable, and kernels cannot be compiled: {error}"
        return f"unavailable: {error}; {_compiler_sentence(compiler)}"
    return f"{', '.join(devices)}; {_compiler_sentence(compiler)}"


def _device_status(found: Runtime, index: int) -> str:
    properties = found.properties(index)
    free, total = (number / 2**30 for number in found.memory_info(index))
    return f"cuda:{index} {properties.name} ({properties.architecture}, {free:.1f} of {total:.1f} GiB free)"


def _compiler_status() -> str | DeviceError:
    """Return the version of the compiler, or the error that explains why it cannot be used."""
    try:
        return compiler_version()
    except DeviceError as error:
        return error


def _compiler_sentence(status: str | DeviceError) -> str:
    if isinstance(status, DeviceError):
        return f"kernels cannot be compiled: {status}"
    return f"NVRTC {status} compiles kernels"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
