from __future__ import annotations

from typing import Any

import pytest

from tests.capabilities import require


@pytest.fixture(scope="session")
def torch() -> Any:
    return require("torch")


@pytest.fixture(scope="session")
def jax() -> Any:
    return require("jax")
