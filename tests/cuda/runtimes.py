"""The runtimes that tests of CUDA code run on: the emulator, which needs a C++ compiler, and a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache

import pytest

from pagecore.arrays.cuda.current import runtime
from pagecore.errors import DeviceError
from tests.capabilities import missing, required
from tests.cuda.kit import Kit
from tests.emulator import build


def selected_runtimes(config: pytest.Config) -> Sequence[str]:
    """Return the runtimes of a test session: that of ``--runtime``, else the emulator and a GPU if there is one."""
    chosen = config.getoption("runtime")
    if chosen is not None:
        return (chosen,)
    return ("emulator",) if reason_without_gpu() and "gpu" not in required() else ("emulator", "gpu")


@cache
def reason_without_gpu() -> str:
    """Return why no GPU can be used, or an empty string if one can be."""
    try:
        return "" if runtime().num_devices() else "no CUDA device is visible"
    except (DeviceError, ImportError) as error:
        return str(error)


class GpuModule(pytest.Module):
    """A test file that only a GPU can run: skipped as a whole, with the reason, if there is none."""

    def collect(self):
        if reason_without_gpu():
            missing("gpu", reason_without_gpu())
        return super().collect()


@cache
def gpu_kit() -> Kit:
    """Return the arrays of the first GPU; skip the test if there is none."""
    if reason_without_gpu():
        missing("gpu", reason_without_gpu())
    return Kit(runtime(), is_emulated=False)


def require_compiler() -> None:
    """Skip the test if the compiler that builds the emulator is not installed."""
    command = build.compiler_command()
    if shutil.which(command[0]) is None:
        missing("compiler", f"the emulator is built by {' '.join(command)}, which is not installed")
