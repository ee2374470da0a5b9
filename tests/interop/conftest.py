"""All tests of this folder are slow: each process that runs one imports torch or JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = f"{Path(__file__).parent}/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(FOLDER):
            item.add_marker(pytest.mark.slow)
