"""What tests/cuda is run on here: the first GPU. Without one every test skips with the reason."""

from __future__ import annotations

import os

import pytest

from pagecore.arrays.cuda import runtime
from pagecore.errors import DeviceError
from tests.capabilities import missing
from tests.cuda.kit import Kit


# JAX would take three quarters of the memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(scope="session")
def gpu() -> Kit:
    try:
        found = runtime()
        devices = found.num_devices()
    except (DeviceError, ImportError) as error:
        missing("gpu", str(error))
    if not devices:
        missing("gpu", "no CUDA device is visible")
    return Kit(found, is_emulated=False)


@pytest.fixture
def cuda(gpu: Kit) -> Kit:
    return gpu
