"""Opening of configs: a dict, a file, or a folder with one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagecore.models.config_files.fields import ConfigError, Fields, shown
from pagecore.models.config_files.params_json import as_config, is_params
from pagecore.models.config_files.regular_files import open_file

__all__ = ["QUANTIZATION_FIELDS", "open_config"]

# A config has a few kilobytes. The limit keeps a path of weights, passed by mistake, from being read as a whole.
FILE_BYTES_MAX = 1 << 24
# Fields that describe the formats of a checkpoint; the second one is of earlier files of compressed-tensors.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


def open_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Fields:
    """Return the fields of a config: of a dict, of a file, or of the config.json or the params.json in a folder.

    Fields of a params.json are returned as those of a config.json. A config.json without a `quantization_config` has
    that of the hf_quant_config.json in the same folder.

    Raises
    ------
    ConfigError
        The file cannot be read or does not hold a JSON object.
    """
    if isinstance(config, Mapping):
        return _fields(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config is a {type(config).__name__}; pass the path of a config.json, its folder, or a dict")
    path = Path(os.fsdecode(config))
    if os.path.isdir(path):  # unlike Path.is_dir, returns False for a path that cannot be accessed
        folder, path = path, path / "config.json"
        if not os.path.exists(path) and os.path.exists(folder / "params.json"):
            path = folder / "params.json"
    return _fields(_with_quantization(_object(path), path), str(path))


def _with_quantization(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a config.json with those of the hf_quant_config.json of ModelOpt next to it.

    Early checkpoints of ModelOpt describe their formats only there.
    """
    other = path.with_name("hf_quant_config.json")
    parts = [values, *(each for each in values.values() if isinstance(each, dict))]
    is_described = any(part.get(name) is not None for part in parts for name in QUANTIZATION_FIELDS)
    if path.name != "config.json" or is_described or not os.path.exists(other):
        return values
    return values | {"quantization_config": _object(other)}


def _fields(values: Mapping[str, Any], source: str) -> Fields:
    return Fields(as_config(values, source) if is_params(values) else values, source)


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        with open_file(path) as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"config {path} cannot be read: {reason}; pass a model's config.json or its folder"
        ) from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError(f"config {str(path)!r} is not a path: {error}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"config {path} is larger than {FILE_BYTES_MAX} bytes; pass the config.json, not the weights")
    try:
        fields = json.loads(text)
    except UnicodeDecodeError:
        raise ConfigError(f"config {path} is not UTF-8 text; pass a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config {path} is not JSON: {error}; pass a model's config.json") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"config {path} holds {shown(fields)}; expected a JSON object")
    return fields
