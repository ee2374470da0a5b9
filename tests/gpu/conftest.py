"""Tests that only a GPU can run; without one, the folder is skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cuda.kit import Kit
from tests.cuda.runtimes import GpuModule, gpu_kit

FOLDER = f"{Path(__file__).parent}/"
# JAX would otherwise reserve three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if config.getoption("runtime") == "emulator" else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return GpuModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(FOLDER):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu() -> Kit:
    return gpu_kit()


@pytest.fixture
def cuda(gpu: Kit) -> Kit:
    return gpu
