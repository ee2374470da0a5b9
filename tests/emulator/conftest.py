"""The emulator's own tests need the compiler that builds it."""

from __future__ import annotations

import pytest

from tests.cuda.runtimes import require_compiler
from tests.emulator.faults import Planting


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    require_compiler()


@pytest.fixture(scope="module")
def planting(tmp_path_factory: pytest.TempPathFactory) -> Planting:
    """Faulty copies of kernels, which the tests of a module share."""
    return Planting(tmp_path_factory.mktemp("planted"))
