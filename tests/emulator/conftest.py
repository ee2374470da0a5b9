"""What tests/cuda is run on here: kernels on the host, and device memory that is host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagecore.arrays.cuda import use_runtime
from tests.cuda.kit import Kit
from tests.emulator.runtime import EmulatedRuntime


@pytest.fixture
def cuda() -> Iterator[Kit]:
    runtime = EmulatedRuntime()
    with use_runtime(runtime):
        yield Kit(runtime)
