"""Facts about a run: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pagecore
from pagecore.ops.cpu_count import usable_cores
from pagecore.serving.info import installed_version

ROOT = Path(__file__).parents[2]
CPU = Path("/sys/devices/system/cpu/cpu0")
PACKAGES = ("pagecore", "numpy", "torch")


def machine() -> dict[str, object]:
    """Return the hardware and its load at the start; None for unknown values."""
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "caches": _caches(),
        "memory_gib": _memory_gib(),
        "governor": _text(CPU / "cpufreq/scaling_governor"),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "isa": pagecore.isa(),
    }


def versions() -> dict[str, str | None]:
    """Return versions of the interpreter and relevant packages; None for a missing package."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in PACKAGES}


def commit() -> str | None:
    """Return the commit, with "+" if the tree differs from it; None without git or a repository.

    PAGECORE_COMMIT names the commit of a copy of the tree without a repository.
    """
    if os.environ.get("PAGECORE_COMMIT"):
        return os.environ["PAGECORE_COMMIT"]
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + "+" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def _cpu_name() -> str:
    lines = (_text(Path("/proc/cpuinfo")) or "").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """Return the size of each data cache of the first core, by level."""
    found = {}
    for index in sorted(CPU.glob("cache/index*")):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        if level and size and kind != "Instruction":
            found[f"L{level}"] = size
    return found


def last_level_cache() -> int:
    """Return the bytes of the largest data cache of the first core; 0 if unknown."""
    return max((int(size.removesuffix("K")) * 2**10 for size in _caches().values()), default=0)


def available_memory() -> int:
    """Return the bytes available without swapping, or all of the memory if unknown."""
    lines = (_text(Path("/proc/meminfo")) or "").splitlines()
    found = [int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else int((_memory_gib() or 0) * 2**30)


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
