"""The number of cores available to the process, by CPU affinity and by the quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores available to the process: its affinity, limited by the CPU quotas of its control groups.

    Quotas are rounded up.

    Parameters
    ----------
    root : Path
        Directory that contains ``proc`` and ``sys``.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each enclosing control group grants; the quota of an outer group also limits inner ones."""
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
    """Yield a group and its ancestors. In a container the path may be the host's, and the mount is the group."""
    group = Path(path.lstrip("/"))
    yield from (mount / each for each in (group, *group.parents))


def _cores(quota: str = "", period: str = "") -> Iterator[float]:
    """Yield quota / period, both in microseconds; "max", -1 or an empty text is unlimited."""
    if quota.strip().isdigit() and period.strip().isdigit() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    """Return the content of a file, or an empty text if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
