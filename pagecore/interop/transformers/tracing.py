"""What torch.compile leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile out of a function: what the cache decides is Python, between the graphs of the model."""
    kept: _Function = torch.compiler.disable(function, reason="a PagedCache takes blocks and looks them up in Python")
    return kept
