"""Optional capabilities of the machine, and skips of tests that need a missing one.

A missing capability skips the test with its name; ``PAGECORE_REQUIRE=torch,jax,transformers,nvrtc`` turns those skips
into failures.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("PAGECORE_REQUIRE", "").split(",") if name.strip()}


def missing(capability: str, reason: str) -> None:
    """Skip the test for want of one capability, or fail it where that was required."""
    if capability in required():
        pytest.fail(f"{capability} is required by PAGECORE_REQUIRE and missing: {reason}")
    pytest.skip(f"needs {capability}: {reason}", allow_module_level=True)


def require(module: str) -> Any:
    """Import an optional module for a test."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return missing(module, str(error))


def require_nvrtc() -> Any:
    """NVRTC through CuPy, which needs no device."""
    from pagecore.errors import DeviceError
    from pagecore.ops.cuda.compiler import nvrtc

    try:
        return nvrtc()
    except DeviceError as error:
        return missing("nvrtc", str(error))
