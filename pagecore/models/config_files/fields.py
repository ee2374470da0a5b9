"""Checked access to the fields of a config.json; errors name file, field and value."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pagecore.errors import ShapeError
from pagecore.models.config_files.field_types import FIELD_TYPES
from pagecore.storage.checks import INT32_MAX


class ConfigError(ShapeError):
    """A model's config cannot be read, lacks a field, or has contradictory fields; the message names file and field."""


class Fields:
    """The fields of one config.

    Parameters
    ----------
    values : mapping
        Names and values of the JSON object.
    source : str
        Name of the config in messages, such as its path.
    inside : str
        Name of the enclosing field, for messages.

    Attributes
    ----------
    defaults : mapping
        Values of optional fields. A field without a default is required.
    aliases : mapping
        The family's own names of fields: ``{"hidden_size": "n_embd"}``.
    sizes : mapping
        Values of missing fields that take precedence over `defaults`: those of a text model inside another config.
    folder : Path or None
        Folder of a config.json, which may have other files that describe the checkpoint; None for other configs.
    """

    def __init__(self, values: Mapping[str, Any], source: str, inside: str = "") -> None:
        self.source = source
        self.defaults: Mapping[str, object] = {}
        self.aliases: Mapping[str, str] = {}
        self.sizes: Mapping[str, object] = {}
        self.folder: Path | None = None
        self._values = dict(values)
        self._inside = inside

    def refuse(self, reason: str) -> NoReturn:
        """Raise a `ConfigError` that names the file."""
        raise ConfigError(f"{self.source}: {reason}")

    def name(self, name: str) -> str:
        """Return the name of a field for messages, with the enclosing field."""
        name = self._key(name)
        return f"{self._inside}.{name}" if self._inside else name

    def describe(self, name: str) -> str:
        """Return the name and the value of a field for messages, or its default if it is missing."""
        key = self._key(name)
        if key in self._values:
            return f"{self.name(name)} is {shown(self._values[key])}"
        return f"{self.name(name)} is missing, which means {shown(self._default(name))}"

    def value(self, name: str) -> Any:
        """Return the value of a field or its default; None for null. Raise if a required field is missing."""
        key = self._key(name)
        if key not in self._values and name not in self.defaults and name not in self.sizes:
            self.refuse(f"{self.name(name)} is missing; add it to the config")
        return self._of_type(name, self._values.get(key, self._default(name)))

    def given(self, name: str) -> Any:
        """Return the value of a field; None if it is null or missing, regardless of its default."""
        return self._of_type(name, self._values.get(self._key(name)))

    def integer(self, name: str, min: int = 1, max: int = INT32_MAX) -> int:
        """Return a field that must be an integer from `min` to `max`."""
        value = self.value(name)
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if not min <= number <= max:
            self.refuse(f"{self.describe(name)}; it must be an integer between {min} and {max}")
        return number

    def number(self, name: str) -> float:
        """Return a field that must be a finite number of at least 0."""
        value = self.value(name)
        try:
            number = -1.0 if isinstance(value, bool | str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = -1.0
        if not (math.isfinite(number) and number >= 0):
            self.refuse(f"{self.describe(name)}; it must be a finite number, 0 or more")
        return number

    def scaled(self, size: int, name: str) -> int:
        """Return `size` times a number in a field, rounded down."""
        product = size * self.number(name)
        if product > INT32_MAX:
            self.refuse(f"{self.describe(name)}; times {size} it must be at most {INT32_MAX}")
        return int(product)

    def flag(self, name: str) -> bool:
        """Return a field that must be true or false; null is false."""
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{self.describe(name)}; it must be true or false")
        return bool(value)

    def switch(self, name: str, default: bool) -> bool:
        """Return a field that must be true or false; null and a missing field are `default`."""
        value = self.given(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(f"{self.describe(name)}; it must be true or false")
        return default if value is None else value

    def integers(self, name: str, min: int = 1) -> list[int]:
        """Return a field that must be a list of one or more integers of at least `min`."""
        listed = self.value(name)
        is_list = isinstance(listed, list | tuple) and len(listed) > 0
        if not is_list or not all(type(each) is int and min <= each <= INT32_MAX for each in listed):
            self.refuse(f"{self.describe(name)}; it must be a list of integers between {min} and {INT32_MAX}")
        return list(listed)

    def has_object(self, name: str) -> bool:
        """Return True for a field that is an object, and False if it is null or missing; raise for any other value."""
        value = self.given(name)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(f"{self.describe(name)}; it must be an object with fields, or null")
        return value is not None

    def check_aliases(self, but: Iterable[str] = ()) -> None:
        """Raise ConfigError if a field, `but` those named, is given under both of its names with different values."""
        for name, alias in self.aliases.items():
            if name in but:
                continue
            both = [self._values[key] for key in (name, alias) if key in self._values]
            if len(both) == 2 and shown(both[0]) != shown(both[1]):
                self.refuse(f"{alias} is {shown(both[1])}, but {name} is {shown(both[0])}; leave one of them out")

    def _key(self, name: str) -> str:
        """Return the name of a field in the config: the family's own, unless only the common name is present."""
        alias = self.aliases.get(name, name)
        return name if alias not in self._values and name in self._values else alias

    def _of_type(self, name: str, value: Any) -> Any:
        """Return the value of a field; raise if it is neither null nor of the type that the field has."""
        kind = FIELD_TYPES.get(name.rpartition(".")[2])
        if value is not None and kind is not None and not kind.fits(value):
            self.refuse(f"{self.describe(name)}; it must be {kind.expected}")
        return value

    def _default(self, name: str) -> object:
        return self.sizes[name] if name in self.sizes else self.defaults.get(name)

    def lift(self, names: Iterable[str]) -> None:
        """Make the fields of nested objects readable as "object.field"."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                self.refuse(f"{self.describe(name)}; it must be an object")
            self._values |= {f"{name}.{key}": each for key, each in value.items()}

    def without(self, *names: str) -> Fields:
        """Return the fields but those named, without defaults."""
        kept = {name: value for name, value in self._values.items() if name not in names}
        return Fields(kept, self.source, self._inside)

    def replaced(self, **values: object) -> Fields:
        """Return the fields with other values of those named, without defaults."""
        return Fields({**self._values, **values}, self.source, self._inside)

    def inner(self, name: str) -> Fields:
        """Return the fields of a nested object."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            self.refuse(f"{self.describe(name)}; it must be an object with fields")
        return Fields(value, self.source, self.name(name))

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of the fields in the config."""
        return iter(self._values)


def shown(value: object) -> str:
    """Return a value as JSON for messages, at most 60 characters long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
