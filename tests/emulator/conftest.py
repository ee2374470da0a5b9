"""The emulator's own tests need the compiler that builds it."""

from __future__ import annotations

import pytest

from tests.cuda.runtimes import require_compiler


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    require_compiler()
