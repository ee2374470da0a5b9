"""Optional capabilities of the machine: frameworks, compilers and a GPU.

A test that lacks a capability is skipped, and the reason begins with "needs" and its name. PAGECORE_REQUIRE lists the
capabilities that must be present, such as ``PAGECORE_REQUIRE=torch,jax,redis,moto``: a test that lacks one of
them fails.
"""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any

import pytest


def required() -> set[str]:
    return {name.strip() for name in os.environ.get("PAGECORE_REQUIRE", "").split(",") if name.strip()}


def missing(capability: str, reason: str) -> None:
    """Skip the test because a capability is absent; fail it if PAGECORE_REQUIRE lists the capability."""
    if capability in required():
        pytest.fail(f"{capability} is required by PAGECORE_REQUIRE and absent: {reason}")
    pytest.skip(f"needs {capability}: {reason}", allow_module_level=True)


def require(module: str) -> Any:
    """Import an optional module; skip the test if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return missing(module, str(error))


def require_chromium() -> str:
    """Return the path of a Chromium that runs without a display; skip the test if there is none."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
    for name in names:
        if path := shutil.which(name):
            return path
    return missing("chromium", f"none of {', '.join(names)} is on the PATH")


def require_nvrtc() -> Any:
    """Return the NVRTC binding of CuPy, which works without a device; skip the test if it is absent."""
    from pagecore.errors import DeviceError
    from pagecore.ops.cuda.compilation.compiler import nvrtc

    try:
        return nvrtc()
    except DeviceError as error:
        return missing("nvrtc", str(error))
