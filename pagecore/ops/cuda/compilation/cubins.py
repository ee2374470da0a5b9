"""Compiled kernels on disk.

The name of a file is a key of everything that went into it: sources, flags, architecture, compiler, instances. The
first lines hold a checksum of the rest, so a torn file is compiled again. A file is written under another name and
renamed, so concurrent processes see a complete file or none. If the folder cannot be written, each process compiles the
kernels that it needs.

The files hold machine code that runs with this user's rights. The folder is created with mode 0700, and only regular
files that only this user owns and can write are loaded; every other file is compiled again and replaced. A
folder that another user owns or can write to is not used at all, and a RuntimeWarning says so once.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

from pagecore.ops.cuda.compilation.compiler import Cubin, compile_instances, compiler_version, flags
from pagecore.ops.cuda.compilation.manifest import Instance
from pagecore.ops.cuda.compilation.sources import with_headers

# Version 1 held images without their last byte.
_MAGIC = b"pagecore cubin 2\n"
# Far above the largest image; a file of more bytes is not read.
_FILE_BYTES_MAX = 1 << 28
_folder: Path | None = None
# Folders that a warning has named.
_refused: set[Path] = set()


def cache_folder() -> Path | None:
    """Return the folder of cubins: that of `set_cache_folder`, else $PAGECORE_CACHE_DIR, else the user's cache."""
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
    """Set the folder of cubins; None selects the one of the environment."""
    global _folder  # noqa: PLW0603
    _folder = None if folder is None else Path(folder)


def cubin(instances: Sequence[Instance], architecture: str) -> Cubin:
    """Return the machine code of instances of one source, from disk if it is cached."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{cache_key(instances, architecture)}.cubin"
    found = None if path is None else read_cubin(path)
    if found is None or not found.symbols.keys() >= {each.name for each in instances}:
        found = compile_instances(instances, architecture)
        if path is not None:
            write_cubin(path, found)
    return found


def cache_key(instances: Sequence[Instance], architecture: str) -> str:
    """Return a key of everything that the machine code depends on."""
    text, headers = with_headers(instances[0].source)
    names = [each.name for each in instances]
    parts = [names, architecture, compiler_version(), flags(), text, sorted(headers.items())]
    return _sha256(json.dumps(parts).encode())[:40]


def read_cubin(path: Path) -> Cubin | None:
    """Return the cubin of a file, or None unless the file is complete, well-formed and safe to load.

    A file is safe if it is a regular file of this user that no other user can write, in a folder that is safe too.
    """
    try:
        folder = _open_folder(path.parent)
        try:
            text = _read_own_file(path.name, folder)
        finally:
            os.close(folder)
        magic, digest, payload = text.split(b"\n", 2)
        if magic + b"\n" != _MAGIC or _sha256(payload).encode() != digest:
            return None
        head, image = payload.split(b"\n", 1)
        return _cubin_of(json.loads(head), image)
    except (OSError, ValueError, RecursionError):
        return None


def write_cubin(path: Path, cubin: Cubin) -> bool:
    """Write a file completely or not at all; return True if it was written."""
    payload = json.dumps({"symbols": cubin.symbols, "log": cubin.log}).encode() + b"\n" + cubin.image
    text = _MAGIC + _sha256(payload).encode() + b"\n" + payload
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = _open_folder(path.parent)
        try:
            _replace_file(path.name, text, folder)
        finally:
            os.close(folder)
    except OSError:
        return False
    return True


def _sha256(data: bytes) -> str:
    import hashlib  # it loads OpenSSL, which `import pagecore` does without

    return hashlib.sha256(data).hexdigest()


def _open_folder(folder: Path) -> int:
    """Return a descriptor of a folder; OSError if another user owns it or can write to it, with one warning."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if _is_private(status):
        return descriptor
    os.close(descriptor)
    if folder not in _refused:
        _refused.add(folder)
        warnings.warn(
            f"the kernel cache {folder} is not used: expected a folder of user {os.geteuid()} that only this user can "
            f"write, got owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):o}; use chmod go-w, or name "
            "another folder in PAGECORE_CACHE_DIR",
            RuntimeWarning,
            stacklevel=2,
        )
    raise PermissionError(f"{folder} is not private")


def _read_own_file(name: str, folder: int) -> bytes:
    """Return the bytes of a file; OSError unless it is a regular file that only this user can write."""
    # Opening a FIFO for reading would wait for a writer without O_NONBLOCK.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status) or status.st_size > _FILE_BYTES_MAX:
            raise PermissionError(f"{name} is not a kernel file of this user")
        return file.read()


def _replace_file(name: str, text: bytes, folder: int) -> None:
    """Write a file under a temporary name, then rename it, so that readers see the old bytes or the new ones."""
    aside = f".{name}.{os.urandom(8).hex()}.part"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=folder)
        raise


def _is_private(status: os.stat_result) -> bool:
    """Return True if this user owns the file or folder, and neither its group nor others can write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _cubin_of(head: object, image: bytes) -> Cubin:
    """Return a cubin from the JSON head of a file; ValueError if the head has other fields or types."""
    if not isinstance(head, dict) or head.keys() != {"symbols", "log"}:
        raise ValueError(f"expected the fields symbols and log, got {head!r}")
    symbols, log = head["symbols"], head["log"]
    if not isinstance(log, str) or not isinstance(symbols, dict):
        raise ValueError("expected text as log and an object as symbols")
    if not all(isinstance(symbol, str) for symbol in symbols.values()):
        raise ValueError("expected text as symbols")
    return Cubin(image, symbols, log)
