"""A config.json and its fields, each read with a check that names file, field and value."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pagecore.errors import ShapeError
from pagecore.models.files import open_file
from pagecore.storage.checks import INT32_MAX

# Such files have a few kilobytes; weights that are named by mistake have many gigabytes.
FILE_BYTES_MAX = 1 << 24


class ConfigError(ShapeError):
    """A model's config cannot be read, lacks a field, or contradicts itself; the message names file and field."""


class Fields:
    """The fields of one config.

    Parameters
    ----------
    values : mapping
        Names and values, as JSON has them.
    source : str
        What messages call the config: its path.
    inside : str
        Name of the field that these fields stand in, for messages.

    Attributes
    ----------
    defaults : mapping
        Value of each field that a config may leave out. A field without a default must be there.
    aliases : mapping
        The family's own names of fields: ``{"hidden_size": "n_embd"}``.
    """

    def __init__(self, values: Mapping[str, Any], source: str, inside: str = "") -> None:
        self.source = source
        self.defaults: Mapping[str, object] = {}
        self.aliases: Mapping[str, str] = {}
        self._values = dict(values)
        self._inside = inside

    def refuse(self, reason: str) -> NoReturn:
        """Raise a `ConfigError` that names the file."""
        raise ConfigError(f"{self.source}: {reason}")

    def name(self, name: str) -> str:
        """A field as messages call it."""
        name = self._key(name)
        return f"{self._inside}.{name}" if self._inside else name

    def told(self, name: str) -> str:
        """A field and what it is, for messages: also where the file leaves it out."""
        key = self._key(name)
        if key in self._values:
            return f"{self.name(name)} is {shown(self._values[key])}"
        return f"{self.name(name)} is left out, which means {shown(self.defaults.get(name))}"

    def value(self, name: str) -> Any:
        """A field's value or its default; None where it is null."""
        key = self._key(name)
        if key not in self._values and name not in self.defaults:
            self.refuse(f"{self.name(name)} is missing; the config must say it")
        return self._values.get(key, self.defaults.get(name))

    def given(self, name: str) -> Any:
        """A field's value; None where it is null or left out, whatever its default."""
        return self._values.get(self._key(name))

    def integer(self, name: str, least: int = 1, most: int = INT32_MAX) -> int:
        """A field that must be an integer from `least` to `most`."""
        value = self.value(name)
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if not least <= number <= most:
            self.refuse(f"{self.told(name)}; it must be an integer between {least} and {most}")
        return number

    def number(self, name: str) -> float:
        """A field that must be a finite number, not negative."""
        value = self.value(name)
        try:
            number = -1.0 if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        if not (math.isfinite(number) and number >= 0):
            self.refuse(f"{self.told(name)}; it must be a finite number, 0 or more")
        return number

    def flag(self, name: str) -> bool:
        """A field that must be true or false; null is false."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{self.told(name)}; it must be true or false")
        return bool(value)

    def check_aliases(self) -> None:
        """Refuse a field that is given by both of its names, with different values."""
        for name, alias in self.aliases.items():
            both = [self._values[key] for key in (name, alias) if key in self._values]
            if len(both) == 2 and shown(both[0]) != shown(both[1]):
                self.refuse(f"{alias} is {shown(both[1])}, but {name} is {shown(both[0])}; leave one of them out")

    def _key(self, name: str) -> str:
        """The name by which the config has a field: the family's own, unless only the other is there."""
        alias = self.aliases.get(name, name)
        return name if alias not in self._values and name in self._values else alias

    def inner(self, name: str) -> Fields:
        """The object that a field holds."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            self.refuse(f"{self.told(name)}; it must be an object that holds the fields of the text model")
        return Fields(value, self.source, self.name(name))


def open_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Fields:
    """The fields of a config: a dict, a file, or the config.json of a folder.

    Raises
    ------
    ConfigError
        It cannot be read, or is no JSON object.
    """
    if isinstance(config, Mapping):
        return Fields(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config is a {type(config).__name__}; give the path of a config.json, its folder, or a dict")
    path = Path(os.fsdecode(config))
    if os.path.isdir(path):  # unlike Path.is_dir, False for a path that cannot be looked at
        path /= "config.json"
    return Fields(_object(path), str(path))


def shown(value: object) -> str:
    """A value as JSON writes it, short whatever it holds."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds."""
    try:
        with open_file(path) as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"config {path} cannot be read: {reason}; give a model's config.json or its folder"
        ) from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"config {str(path)!r} is no path: {error}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"config {path} is larger than {FILE_BYTES_MAX} bytes; give the config.json, not the weights")
    try:
        fields = json.loads(text)
    except UnicodeDecodeError:
        raise ConfigError(f"config {path} is not UTF-8 text; give a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"config {path} holds {shown(fields)}; a JSON object is expected")
    return fields
