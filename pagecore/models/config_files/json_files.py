"""JSON objects in files whose path comes from the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagecore.models.config_files.fields import ConfigError, shown
from pagecore.models.config_files.regular_files import open_file

__all__ = ["parse_json_object", "read_json_object"]


def read_json_object(path: Path, max_bytes: int, remedy: str, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file.

    Parameters
    ----------
    path : Path
    max_bytes : int
        Limit of the file in bytes, which keeps a path of weights, passed by mistake, from being read as a whole.
    remedy : str
        Advice at the end of messages: "pass a model's config.json".
    unique : bool
        True refuses an object with two values of one name; otherwise the last value counts.

    Raises
    ------
    ConfigError
        The file cannot be read, is larger, or does not hold a JSON object.
    """
    try:
        with open_file(path) as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"{str(path)!r} is not a path: {error}; {remedy}") from error
    if len(text) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes} bytes; {remedy}")
    return parse_json_object(text, str(path), remedy, unique=unique)


def parse_json_object(text: bytes, source: str, remedy: str, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in a text; parameters and errors as for `read_json_object`."""
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates if unique else None)
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not UTF-8 text; {remedy}") from None
    except _DuplicateName as error:
        raise ConfigError(f"{source} has two values of {shown(str(error))}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} holds {shown(values)}; expected a JSON object: {remedy}")
    return values


class _DuplicateName(Exception):
    """An object has two values of one name."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise _DuplicateName(name)
        values[name] = value
    return values
