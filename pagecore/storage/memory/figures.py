"""Figures of a device's memory: bytes that a framework allocated, holds and held at most."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pagecore.arrays import cuda
from pagecore.arrays.cuda.devices import check_device, device_index
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.storage.memory.budgets import free_memory

__all__ = ["FRAMEWORKS", "MemoryFigures", "memory_figures"]

_STATUS = Path("/proc/self/status")
Used = tuple[int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a device, in bytes.

    Attributes
    ----------
    device : str
    framework : str
        Framework whose allocator the first three figures are of.
    allocated : int or None
        Bytes of arrays; on the host the resident memory of the process. None if the framework does not count them.
    reserved : int or None
        Bytes that the allocator holds, cached ones included; on the host the addresses of the process.
    peak : int or None
        Most bytes allocated since the start, or since the framework's peak was reset.
    free, total : int
        Bytes of the device: free ones, and all.
    """

    device: str
    framework: str
    allocated: int | None
    reserved: int | None
    peak: int | None
    free: int
    total: int


def memory_figures(device: str = "cpu", framework: str | None = None) -> MemoryFigures:
    """Return the memory that a framework uses on a device.

    Parameters
    ----------
    device : str
        "cpu" or such as "cuda:0".
    framework : {"host", "cupy", "torch", "jax"}, optional
        By default the allocator of pagecore: "host" on "cpu", "cupy" on CUDA. Another one must have been imported.

    Raises
    ------
    DeviceError
        An invalid device, or one that does not exist.
    UnsupportedOption
        A framework that is unknown, not imported, or does not count the memory of this device.
    """
    index = device_index(device)
    if index is not None:
        check_device(index)
    name = framework if framework is not None else "host" if index is None else "cupy"
    if not isinstance(name, str) or name not in FRAMEWORKS:
        raise UnsupportedOption(f"framework is {shown(framework)}; use one of {', '.join(FRAMEWORKS)}")
    if (name == "host") != (index is None):
        raise UnsupportedOption(
            f"framework is {name!r}, which does not count the memory of {device!r}; leave framework out"
        )
    used = FRAMEWORKS[name](0 if index is None else index)
    if index is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MemoryFigures(device, name, *used, free_memory(), total)
    return MemoryFigures(device, name, *used, *cuda.runtime().memory_info(index))


def _of_process(_index: int) -> Used:
    """Return resident memory, addresses and peak of this process."""
    text = _STATUS.read_text() if _STATUS.exists() else ""
    found = [re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE) for name in ("VmRSS", "VmSize", "VmHWM")]
    resident, addresses, peak = (None if each is None else int(each[1]) * 1024 for each in found)
    return resident, addresses, peak


def _imported(name: str) -> ModuleType:
    module = sys.modules.get(name)
    if module is None:
        raise UnsupportedOption(f"framework is {name!r}, which was not imported; it has allocated nothing")
    return module


def _of_cupy(index: int) -> Used:
    library: Any = _imported("cupy")
    with library.cuda.Device(index):
        pool = library.get_default_memory_pool()
        return int(pool.used_bytes()), int(pool.total_bytes()), None


def _of_torch(index: int) -> Used:
    counts: Any = _imported("torch").cuda
    allocated, reserved = counts.memory_allocated(index), counts.memory_reserved(index)
    return int(allocated), int(reserved), int(counts.max_memory_allocated(index))


def _of_jax(index: int) -> Used:
    library: Any = _imported("jax")
    counts = library.devices("cuda")[index].memory_stats() or {}
    allocated, reserved, peak = (counts.get(name) for name in ("bytes_in_use", "pool_bytes", "peak_bytes_in_use"))
    return allocated, reserved, peak


FRAMEWORKS: Mapping[str, Callable[[int], Used]] = {
    "host": _of_process,
    "cupy": _of_cupy,
    "torch": _of_torch,
    "jax": _of_jax,
}
