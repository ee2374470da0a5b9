from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def interop(jax: Any) -> Any:
    """`pagecore.interop.jax`, where JAX is."""
    from pagecore.interop import jax as module

    return module
