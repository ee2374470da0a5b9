"""How many processors this process may keep busy: what the kernel schedules it on, and what its container paid for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, cut to the CPU quota of its control groups (rounded up).

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each control group around this process grants; an outer group's quota binds the inner ones too."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _upwards(root / "sys/fs/cgroup", path):
                yield from _cores(*_text(group / "cpu.max").split()[:2])
        elif "cpu" in controllers.split(","):
            for mount in {"cpu", controllers}:
                for group in _upwards(root / "sys/fs/cgroup" / mount, path):
                    yield from _cores(_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us"))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A group and those around it. In a container the path may be the host's: then the mount itself is the group."""
    group = Path(path.lstrip("/"))
    yield from (mount / each for each in (group, *group.parents))


def _cores(quota: str = "", period: str = "") -> Iterator[float]:
    """Microseconds of each period; "max", -1 or nothing is no limit."""
    if quota.strip().isdigit() and period.strip().isdigit() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    """What a file holds; nothing where it is not there to be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
