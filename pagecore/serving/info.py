"""What this installation is and can do, told without importing any framework."""

from __future__ import annotations

import ctypes
import platform
from importlib.metadata import PackageNotFoundError, version

from pagecore.ops.cpu import available_isas, isa, num_threads
from pagecore.ops.cpu_count import usable_cores

__all__ = ["cuda_status", "info_rows", "installed_version"]

CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def info_rows() -> list[tuple[str, str]]:
    """Name and value of each line of `pagecore info`."""
    rows = [
        ("pagecore", installed_version("pagecore") or "not installed, run from its source"),
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
        ("instruction set", f"{isa()} (this machine runs {', '.join(available_isas())})"),
        ("threads", f"{num_threads()} on {usable_cores()} cores"),
        ("cuda", cuda_status()),
    ]
    return rows


def cuda_status() -> str:
    """The CUDA devices that the driver sees, or what stands in the way of using one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no: the NVIDIA driver (libcuda.so.1) is not on this machine"
    error = driver.cuInit(0)
    if error:
        return f"no: the NVIDIA driver does not start (CUDA error {error})"
    count, cuda_version = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(cuda_version))
    if count.value == 0:
        return "no: the NVIDIA driver sees no device"
    major, minor = cuda_version.value // 1000, cuda_version.value % 1000 // 10
    devices = f"{count.value} device{'s' if count.value > 1 else ''}, CUDA {major}.{minor}"
    if not any(installed_version(package) for package in CUPY_PACKAGES):
        return f"no: {devices}, but cupy is missing: pip install 'pagecore[cuda{major}]'"
    return f"no: {devices}, but this version keeps caches on the host only"


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
