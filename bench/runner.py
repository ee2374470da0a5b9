"""How a figure is taken: interleaved pairs, so that a slow moment of the machine hits subject and control alike."""

import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pagecore

Work = Callable[[], object]


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    found = {"python": platform.python_version(), "cpu": _cpu_name(), "isa": pagecore.isa()}
    for package in ("pagecore", "numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def seconds(work: Work) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alone(name: str, work: Work, after: Work = lambda: None, rounds: int = 400) -> dict[str, float]:
    """Microseconds of a call, for targets that are absolute; `after` is not timed. Prints and returns the spread."""
    taken = []
    for _ in range(rounds):
        taken.append(seconds(work) * 1e6)
        after()
    taken.sort()
    figures = {"min_us": taken[0], "median_us": statistics.median(taken), "max_us": taken[-1]}
    print(f"  {name:<58} {figures['median_us']:9.1f} us   ({taken[0]:.1f} to {taken[-1]:.1f})")
    return figures


def against(name: str, subject: Work, control_name: str, control: Work, rounds: int = 9) -> dict[str, float | str]:
    """How many times faster `subject` is than `control`; prints and returns min, median and max of the pairs."""
    subject(), control()
    pairs = [(seconds(subject), seconds(control)) for _ in range(rounds)]
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    median = statistics.median(ratios)
    spread = f"{median:5.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"  {name:<44} {ours:9.0f} us  {control_name} {theirs:9.0f} us  {spread}")
    return {
        "control": control_name,
        "subject_us": ours,
        "control_us": theirs,
        "ratio_min": ratios[0],
        "ratio_median": median,
        "ratio_max": ratios[-1],
    }


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return names[0] if names else platform.machine()
