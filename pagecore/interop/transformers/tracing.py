"""Exclusion of the cache's Python code from torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Exclude a function from torch.compile; it runs as Python between the graphs of the model."""
    disabled: _Function = torch.compiler.disable(function, reason="a PagedCache allocates its blocks in Python")
    return disabled
