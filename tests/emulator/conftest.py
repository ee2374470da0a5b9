"""What tests/cuda is run on here: kernels on the host, and device memory that is host memory."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator

import pytest

from pagecore.arrays.cuda import use_runtime
from tests.capabilities import missing
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator import build
from tests.emulator.runtime import EmulatedRuntime


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    command = build.compiler_command()
    if shutil.which(command[0]) is None:
        missing("compiler", f"the emulator is built by {' '.join(command)}, which is not installed")


@pytest.fixture(params=cases(["late"], ["late", "at once"]))
def cuda(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """A device of the test's own.

    It does its work when it is waited for, or at once; blocks, warps and lanes run in an order that follows from the
    test's name, so that all tests together see many.
    """
    runtime = EmulatedRuntime(seed=zlib.crc32(request.node.nodeid.encode()))
    runtime.streams.deferred = request.param == "late"
    with use_runtime(runtime):
        yield Kit(runtime)
        runtime.finish()
