"""Facts about a GPU machine, collected without pagecore: device, driver, tools, packages, commit."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cython",
    "setuptools",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torch",
    "jax",
    "triton",
    "flashinfer-python",
    "pytest",
    "pytest-xdist",
    "pytest-timeout",
    "hypothesis",
    "nvidia-cuda-nvrtc",
)
TOOLS = ("g++", "nvcc", "ncu", "nsys", "compute-sanitizer", "cuobjdump", "nvdisasm")
SMI = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.max.sm",
    "power.limit",
    "mig.mode.current",
)


def print_facts() -> None:
    """Print a line for each fact."""
    gpu = find_gpu()
    print("gpu:", gpu if isinstance(gpu, str) else ", ".join(f"{name} {value}" for name, value in gpu.items()))
    print(f"nvidia-smi: {', '.join(SMI)}: {ask_smi(*SMI)}")  # one call: each may take a second
    print(f"system: {platform.platform()}, {platform.version()}")
    print(f"cores: {cores()}, memory: {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB")
    print(f"python: {sys.version.split()[0]} at {sys.executable}")
    print("packages:", ", ".join(f"{name} {package_version(name)}" for name in PACKAGES))
    print("tools:", ", ".join(f"{tool} {_tool_version(tool)}" for tool in TOOLS))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def package_version(name: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def find_gpu() -> dict[str, str] | str:
    """Return the first GPU with its driver, or the reason why none is usable."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs a GPU: the NVIDIA driver (libcuda.so.1) is not on this machine"
    count, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "needs a GPU: the NVIDIA driver sees no device"
    driver.cuDriverGetVersion(ctypes.byref(number))
    driver.cuDeviceGetName(name, len(name), 0)
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    return {"gpu": name.value.decode(), "driver": ask_smi("driver_version"), "cuda": cuda}


def ask_smi(*fields: str) -> str:
    """Return fields of the first GPU, as nvidia-smi prints them, or "unknown"."""
    query = f"--query-gpu={','.join(fields)}"
    return _output("nvidia-smi", query, "--format=csv,noheader").partition("\n")[0] or "unknown"


def commit(root: Path) -> str:
    """Return the commit that $PAGECORE_COMMIT or git names, or "unknown"."""
    named = os.environ.get("PAGECORE_COMMIT")
    return named or _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD") or "unknown"


def _tool_version(tool: str) -> str:
    """Return the version that a tool prints, or "missing"."""
    if shutil.which(tool) is None:
        return "missing"
    found = re.search(r"\d+(?:\.\d+)+", _output(tool, "--version"))
    return found[0] if found else "of unknown version"


def _output(*command: str) -> str:
    """Return what a command prints, or nothing if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
