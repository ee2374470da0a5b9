"""The fixture `cuda`: every test of this folder runs once on each runtime, the emulator and a GPU.

``--runtime emulator`` or ``--runtime gpu`` selects one of the two; the default is the emulator, and a GPU if there is
one. A GPU that is selected and absent skips the tests; with PAGECORE_REQUIRE=gpu it fails them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.runtimes import GpuModule, gpu_kit, require_compiler, selected_runtimes
from tests.emulator.runtime import EmulatedRuntime

# An emulated device does its work as late as possible: when the host waits for it.
EMULATORS = cases(["emulator"], ["emulator", "emulator at once"])


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if parent.config.getoption("runtime") == "gpu":
        return GpuModule.from_parent(parent, path=module_path)
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cuda" in metafunc.fixturenames:
        chosen: list[Any] = []
        for name in selected_runtimes(metafunc.config):
            chosen += [pytest.param(name, marks=pytest.mark.gpu)] if name == "gpu" else EMULATORS
        metafunc.parametrize("cuda", chosen, indirect=True)


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """Yield the arrays of a device: a new emulated device for each test, or the GPU that all tests share.

    Blocks, warps and lanes of an emulated device run in an order that follows from the test's name, so that the tests
    together cover many orders.
    """
    if request.param == "gpu":
        yield gpu_kit()
        return
    require_compiler()
    runtime = EmulatedRuntime(seed=zlib.crc32(f"{request.path.name}::{request.node.name}".encode()))
    runtime.streams.deferred = request.param == "emulator"
    with use_runtime(runtime):
        yield Kit(runtime)
        runtime.finish()
