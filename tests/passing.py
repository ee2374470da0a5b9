"""The cache among the arguments of a call of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from tests.capabilities import require


def passing(cache: Any, module: Any = None) -> dict[str, Any]:
    """Return the cache under the name of this version of transformers, or under the one that `module` takes."""
    require("transformers")
    from pagecore.interop.transformers.inputs.arguments import CACHE, CACHES

    named = {} if module is None else inspect.signature(module.forward).parameters
    return {next((name for name in CACHES if name in named), CACHE): cache}
