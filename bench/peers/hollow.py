"""Empty modules in place of imports that the timed code of a peer never calls."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


@contextmanager
def hollowed(*names: str) -> Iterator[None]:
    """Let imports of these packages, or of anything in them, return modules of empty classes."""
    finder = _Finder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder, Loader):
    """Finder of the unneeded packages, as modules whose every name is an empty class."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if any(name == unneeded or name.startswith(unneeded + ".") for unneeded in self._names):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class _Empty(types.ModuleType):
    """A module that defines every name on access."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda _self, *_args, **_options: None})
        setattr(self, name, found)
        return found
