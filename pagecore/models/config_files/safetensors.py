"""Small tensors of a checkpoint in safetensors files, read by name without the library of that format.

A file begins with the length of its header, 8 bytes with the least significant first; the header is a JSON object of
``{"dtype", "shape", "data_offsets"}`` by tensor; the bytes of the tensors follow.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from pagecore.models.config_files.fields import ConfigError, shown
from pagecore.models.config_files.json_files import parse_json_object, read_json_object
from pagecore.models.config_files.regular_files import open_file

__all__ = ["read_tensors"]

# The limit of the safetensors library for a header; the index of a checkpoint names the same tensors.
HEADER_BYTES_MAX = 100_000_000
NUMBERS_MAX = 1 << 16
INDEX = "model.safetensors.index.json"
_AGAIN = "load the file again"
DTYPES: Mapping[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}


def read_tensors(checkpoint: Path, wanted: Callable[[str], bool]) -> dict[str, list[float]]:
    """Return the numbers of the tensors with wanted names, of a file or of all files in a folder.

    If the folder has an index, each tensor is read from the file that it gives, and no other file is opened.

    Raises
    ------
    ConfigError
        A file cannot be read, or is not a safetensors file; a tensor is in two files, or not in that of the index; or
        one has another dtype than float64, float32, float16 and bfloat16, or more than 65,536 numbers.
    """
    if os.path.isdir(checkpoint) and os.path.exists(checkpoint / INDEX):
        return _indexed_tensors(checkpoint, wanted)
    found: dict[str, list[float]] = {}
    origin: dict[str, Path] = {}
    for path in _files(checkpoint):
        for name, numbers in _tensors_of_file(path, wanted).items():
            if name in found:
                raise ConfigError(f"{name} is in {origin[name]} and in {path}; pass the path of one of the files")
            found[name], origin[name] = numbers, path
    return found


def _indexed_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, list[float]]:
    index = folder / INDEX
    files = read_json_object(index, HEADER_BYTES_MAX, _AGAIN, unique=True).get("weight_map")
    if not isinstance(files, dict):
        raise ConfigError(f"{index}: weight_map is {shown(files)}; expected the file of each tensor")
    names: dict[str, set[str]] = {}
    for name, file in files.items():
        if not wanted(name):
            continue
        if not isinstance(file, str) or os.path.basename(file) != file or file in {"", ".", ".."}:
            raise ConfigError(f"{index} names the file {shown(file)}; expected one of its own folder")
        names.setdefault(file, set()).add(name)
    found: dict[str, list[float]] = {}
    for file, listed in sorted(names.items()):
        tensors = _tensors_of_file(folder / file, listed.__contains__)
        for name in sorted(listed - tensors.keys()):
            raise ConfigError(f"{index} names {file} for {name}, which does not have it; {_AGAIN}")
        found |= tensors
    return found


def _files(checkpoint: Path) -> list[Path]:
    """Return a file, or the files in a folder, in order of their names."""
    if not os.path.isdir(checkpoint):
        return [checkpoint]
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{checkpoint} has no safetensors files; pass the folder of a checkpoint, or a file")
    return paths


def _tensors_of_file(path: Path, wanted: Callable[[str], bool]) -> dict[str, list[float]]:
    try:
        with open_file(path) as file:
            return _read(file, path, wanted)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read(file: BinaryIO, path: Path, wanted: Callable[[str], bool]) -> dict[str, list[float]]:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= HEADER_BYTES_MAX:
        raise ConfigError(f"{path} is not a safetensors file: its header would have {length} bytes")
    text = file.read(length)
    if len(text) < length:
        raise ConfigError(f"{path} ends within its header of {length} bytes; load the file again")
    header = parse_json_object(text, str(path), _AGAIN, unique=True)
    tensors: dict[str, list[float]] = {}
    for name in filter(wanted, header):
        begin, count, dtype = tensor_extent(header[name], f"{path}: {name}")
        file.seek(8 + length + begin)
        data = file.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise ConfigError(f"{path} ends within {name}; load the file again")
        tensors[name] = np.frombuffer(data, dtype).astype(np.float64).tolist()
    return tensors


def tensor_extent(entry: Any, where: str) -> tuple[int, int, np.dtype[Any]]:
    """Return the first byte of a tensor, its number of elements, and its dtype."""
    try:
        name, shape = entry["dtype"], [operator.index(size) for size in entry["shape"]]
        begin, end = map(operator.index, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is {shown(entry)}; expected dtype, shape and data_offsets") from error
    count = math.prod(shape)
    if not isinstance(name, str) or name not in DTYPES:
        raise ConfigError(f"{where} has dtype {shown(name)}; {', '.join(DTYPES)} are supported")
    dtype = np.dtype(DTYPES[name])
    if min([begin, *shape]) < 0 or end - begin != count * dtype.itemsize:
        raise ConfigError(f"{where} has shape {shape} and bytes {begin} to {end}, which do not match {name}")
    if count > NUMBERS_MAX:
        raise ConfigError(f"{where} has shape {shape}; at most {NUMBERS_MAX} numbers are read")
    return begin, count, dtype
