"""What tests/cuda is run on here: the first GPU. Without one every file skips with the reason."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from pagecore.arrays.cuda import runtime
from pagecore.errors import DeviceError
from tests.capabilities import missing
from tests.cuda.kit import Kit

# JAX would take three quarters of the memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@cache
def without_gpu() -> str:
    """Why there is none; empty where there is one."""
    try:
        return "" if runtime().num_devices() else "no CUDA device is visible"
    except (DeviceError, ImportError) as error:
        return str(error)


class Module(pytest.Module):
    def collect(self):
        reason = without_gpu()
        if reason:
            missing("gpu", reason)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def gpu() -> Kit:
    return Kit(runtime(), is_emulated=False)


@pytest.fixture
def cuda(gpu: Kit) -> Kit:
    return gpu
