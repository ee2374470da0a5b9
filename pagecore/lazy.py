"""Packages whose names are loaded at their first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package : str
        Name of the package, which is being imported.
    modules : mapping
        The names that the package exports, by the module of the package that defines them.
    """
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names}
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(module_of[name]), name)
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of})

    return load, list_names
