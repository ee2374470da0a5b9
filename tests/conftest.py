"""Options and fixtures of all tests; tests/README.md describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.capabilities import require

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--runtime",
        choices=("emulator", "gpu"),
        help="run tests/cuda on this runtime alone (default: the emulator, and a GPU if there is one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let ``pytest tests/gpu`` run all tests that a GPU can run: those of tests/cuda too, without the emulator."""
    folders = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if folders == [FOLDER / "gpu"]:
        config.args.append(str(FOLDER / "cuda"))
        config.option.runtime = config.option.runtime or "gpu"


@pytest.fixture(scope="session")
def torch() -> Any:
    return require("torch")


@pytest.fixture(scope="session")
def jax() -> Any:
    return require("jax")
