"""Compiled kernels on disk.

A file is found by a key of all that went into it: sources, flags, architecture, compiler, instances. Its first lines
hold a checksum of the rest, so that a torn file is compiled anew; it is written aside and renamed, so that of several
processes each sees all of a file or nothing. Where the folder cannot be written, kernels are compiled in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pagecore.ops.cuda.compiler import FLAGS, Cubin, compile_instances, compiler_version
from pagecore.ops.cuda.manifest import Instance
from pagecore.ops.cuda.sources import with_headers

_MAGIC = b"pagecore cubin 1\n"
_folder: Path | None = None


def cache_folder() -> Path | None:
    """Return where cubins are kept: what `set_cache_folder` said, else $PAGECORE_CACHE_DIR, else the user's cache."""
    if _folder is not None:
        return _folder
    if os.environ.get("PAGECORE_CACHE_DIR"):
        return Path(os.environ["PAGECORE_CACHE_DIR"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "pagecore"
    try:
        return Path.home() / ".cache" / "pagecore"
    except RuntimeError:  # a user without a home
        return None


def set_cache_folder(folder: str | os.PathLike[str] | None) -> None:
    """Keep cubins in `folder` from now on; None means what the environment says."""
    global _folder  # noqa: PLW0603
    _folder = None if folder is None else Path(folder)


def cubin(instances: Sequence[Instance], architecture: str) -> Cubin:
    """Return the machine code of instances of one source, from disk where it has been compiled before."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{cache_key(instances, architecture)}.cubin"
    found = None if path is None else read_cubin(path)
    if found is None:
        found = compile_instances(instances, architecture)
        if path is not None:
            write_cubin(path, found)
    return found


def cache_key(instances: Sequence[Instance], architecture: str) -> str:
    """Return the key of all that the machine code depends on."""
    text, headers = with_headers(instances[0].source)
    names = [each.name for each in instances]
    parts = [names, architecture, compiler_version(), FLAGS, text, sorted(headers.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def read_cubin(path: Path) -> Cubin | None:
    """Return what a file holds; None where there is none that is whole."""
    try:
        magic, digest, payload = path.read_bytes().split(b"\n", 2)
        if magic + b"\n" != _MAGIC or hashlib.sha256(payload).hexdigest().encode() != digest:
            return None
        head, image = payload.split(b"\n", 1)
        return Cubin(image, **json.loads(head))
    except (OSError, ValueError):
        return None


def write_cubin(path: Path, cubin: Cubin) -> bool:
    """Write a file at once or not at all; whether it could be."""
    payload = json.dumps({"symbols": cubin.symbols, "log": cubin.log}).encode() + b"\n" + cubin.image
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
            aside = Path(file.name)
            file.write(_MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        if aside is not None:
            with contextlib.suppress(OSError):
                aside.unlink()
        return False
    return True
