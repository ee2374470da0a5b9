from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def interop(jax: Any) -> Any:
    """Return `pagecore.interop.jax`; skip where JAX is missing."""
    from pagecore.interop import jax as module

    return module
