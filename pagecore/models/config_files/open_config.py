"""Opening of configs: a dict, a file, or a folder with one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagecore.models.config_files.fields import ConfigError, Fields
from pagecore.models.config_files.json_files import read_json_object
from pagecore.models.config_files.params_json import as_config, is_params

__all__ = ["FILE_BYTES_MAX", "open_config"]

# A config has a few kilobytes.
FILE_BYTES_MAX = 1 << 24


def open_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Fields:
    """Return the fields of a config: of a dict, of a file, or of the config.json or the params.json in a folder.

    Fields of a params.json are returned as those of a config.json. The fields of a config.json have its folder.

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
    remedy = "pass a model's config.json or its folder, not the weights"
    fields = _fields(read_json_object(path, FILE_BYTES_MAX, remedy), str(path))
    fields.folder = path.parent if path.name == "config.json" else None
    return fields


def _fields(values: Mapping[str, Any], source: str) -> Fields:
    return Fields(as_config(values, source) if is_params(values) else values, source)
