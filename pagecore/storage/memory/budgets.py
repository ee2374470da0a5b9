"""Memory budgets in bytes: conversion of "8GiB" or of a fraction of the free memory."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from pagecore.arrays import cuda
from pagecore.arrays.cuda.devices import check_device, device_index
from pagecore.errors import NotEnoughMemory, ShapeError
from pagecore.storage.checks import shown

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
CGROUP = Path("/sys/fs/cgroup")
_BUDGET = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?)\s*([A-Za-z]*)\s*")

Memory = int | float | str


def parse_memory(memory: Memory, device: str = "cpu", name: str = "memory") -> int:
    """Return a memory budget in bytes.

    Parameters
    ----------
    memory : int, str or float
        An int is bytes; a str is a number and a unit ("8GiB", "512MB", "1.5TiB"); a float is a fraction of the device's
        free memory, above 0 and up to 1.
    device : str
        Device to whose free memory a fraction refers.
    name : str
        Name of the argument in messages.

    Raises
    ------
    ShapeError
        A negative number, an unknown unit, a fraction outside (0, 1], a str with a fraction of a byte.
    DeviceError
        `device` is not the name of a device.
    """
    device_index(device)
    if isinstance(memory, str):
        match = _BUDGET.fullmatch(memory)
        if match is None or match[2] not in UNITS:
            units = ", ".join(unit for unit in UNITS if unit)
            raise ShapeError(f"{name} is {shown(memory)}; give a number and one of {units}, such as '8GiB'")
        if "." in match[1] and not match[2]:
            raise ShapeError(
                f"{name} is {shown(memory)}; a number of bytes must be whole: give a unit, such as '{match[1]}GiB'"
            )
        from fractions import Fraction

        return math.floor(Fraction(match[1]) * UNITS[match[2]])
    number: object = memory
    if isinstance(number, int | np.integer) and not isinstance(number, bool):
        if number < 0:
            raise ShapeError(f"{name} is {shown(memory)} bytes; it cannot be negative")
        return int(number)
    if isinstance(number, float | np.floating):
        if not 0 < number <= 1:
            raise ShapeError(f"{name} is {memory}; a float is a fraction of the free memory, above 0 and up to 1")
        return math.floor(float(number) * free_memory(device))
    raise ShapeError(f"{name} is {shown(memory)}; give bytes, a str such as '8GiB', or a fraction of the free memory")


def free_memory(device: str = "cpu") -> int:
    """Return the free memory of a device in bytes.

    On the host this is the memory that the kernel reports as available, limited by the cgroup, in which the inactive
    part of the page cache counts as free. On a CUDA device it is
    the memory that the driver reports as free; memory that a framework's allocator caches counts as used.

    Raises
    ------
    DeviceError
        An invalid device, or one that does not exist.
    """
    index = device_index(device)
    if index is not None:
        check_device(index)
        return cuda.runtime().memory_info(index)[0]
    available = _host_available()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - max(0, used - _inactive_file())))


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NotEnoughMemory("/proc/meminfo does not report MemAvailable; give the budget in bytes")


def _inactive_file() -> int:
    """Return the bytes of the cgroup's page cache that the kernel reclaims first."""
    try:
        found = re.search(r"^inactive_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if found is None else int(found[1])


def _cgroup(name: str) -> int | None:
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
