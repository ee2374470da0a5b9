"""The instances of kernels that are built, read from cuda_src/manifest.toml."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

from pagecore.ops.cuda.compilation.sources import read_source


@dataclass(frozen=True)
class Instance:
    """One kernel: a function template of the sources with its arguments.

    Attributes
    ----------
    name : str
        ``"write_kv<float,pc_half>"``, without spaces; ``"write_kv"`` without arguments.
    entry, source : str
        The template, and the path of its file in cuda_src.
    arguments : tuple of str
    """

    name: str
    entry: str
    source: str
    arguments: tuple[str, ...]

    @property
    def expression(self) -> str:
        """Name of the instance in C++."""
        return f"pagecore::{self.name}"


@cache
def instances() -> tuple[Instance, ...]:
    """Return every instance of the manifest, in its order."""
    return parse_manifest(read_source("manifest.toml"))


@cache
def _by_name() -> dict[str, Instance]:
    return {instance.name: instance for instance in instances()}


def instance(name: str) -> Instance:
    """Return the instance of a name; raise KeyError if the manifest lacks it."""
    found = _by_name().get(name)
    if found is None:
        raise KeyError(f"no kernel is called {name}; cuda_src/manifest.toml lists those that are built")
    return found


def parse_manifest(text: str) -> tuple[Instance, ...]:
    """Parse a manifest; raise ValueError if it is malformed."""
    import tomllib  # an eighth of the time of `import pagecore`

    found: dict[str, Instance] = {}
    for table in tomllib.loads(text).get("kernel", []):
        for each in _instances_of(table):
            if each.name in found:
                raise ValueError(f"the manifest has {each.name} twice")
            found[each.name] = each
    return tuple(found.values())


def _instances_of(table: dict[str, Any]) -> list[Instance]:
    if not {"entry", "source"} <= table.keys() <= {"entry", "source", "values"}:
        raise ValueError(f"a kernel of the manifest has the keys {sorted(table)}; they are entry, source and values")
    entry, source = str(table["entry"]), str(table["source"])
    values = [[str(value).replace(" ", "") for value in axis] for axis in table.get("values", [])]
    if not values:
        return [Instance(entry, entry, source, ())]
    if not all(values):
        raise ValueError(f"the manifest has an empty list of values for {entry}")
    rows = itertools.product(*values)
    return [Instance(f"{entry}<{','.join(arguments)}>", entry, source, arguments) for arguments in rows]
