"""The folder of a disk store: locked by one process, and complete or as it was."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from pagecore.errors import NotEnoughMemory, StoreError, UnsupportedOption
from pagecore.storage.checks import shown
from pagecore.tiers.disk.header import SlabHeader
from pagecore.tiers.disk.slab import PART, check_file, create_slab


def checked_folder(folder: object) -> Path:
    """Return the path of a folder; raise UnsupportedOption for anything that is not one."""
    path = os.fsdecode(folder) if isinstance(folder, str | bytes | os.PathLike) else ""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate, which no path of this file system holds
        path = ""
    if not path or "\0" in path:
        raise UnsupportedOption(f"the folder is {shown(folder)}; give the path of a folder on a local disk")
    return Path(path)


class StoreFolder:
    """The folder of one fingerprint, locked until `close`.

    Parameters
    ----------
    path : Path
        Created with its parents if it does not exist.

    Raises
    ------
    StoreError
        The folder cannot be made or used, or another store has it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = _missing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._remove_made()
            raise StoreError(
                f"the folder {path} cannot be used: {error.strerror}; give one with the right to write"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StoreError(
                f"the folder {path} is open in another store ({error.strerror}); close that one, or use another folder"
            ) from error

    def create(self, headers: Iterable[SlabHeader]) -> list[Path]:
        """Return the paths of the files of `headers`; create those that are missing, all of them or none.

        Raises
        ------
        UnsupportedOption
            The folder has further slabs, or slabs of another model, layout or size.
        NotEnoughMemory
            There is no room.
        StoreError
            The files cannot be made.
        """
        paths = {self.path / header.file_name: header for header in headers}
        further = sorted(set(self.path.glob("*.slab")) - set(paths))
        if further:
            raise UnsupportedOption(
                f"{further[0]} is not among the {len(paths)} files of this size; open the folder with the max_bytes, "
                "max_blocks_per_file and state_ratio that it was made with, or delete it"
            )
        made: list[Path] = []
        try:
            for path, header in paths.items():
                if path.exists():
                    check_file(path, header)
            for left in self.path.glob(f"*{PART}"):
                left.unlink()
            self._require_room(sum(header.file_bytes for path, header in paths.items() if not path.exists()))
            for path, header in paths.items():
                if not path.exists():
                    part = path.with_name(path.name + PART)
                    made.append(part)  # first: an interrupted creation is removed, too
                    create_slab(part, header)
            for part in made:
                part.rename(part.with_name(part.name.removesuffix(PART)))
            if made:
                os.fsync(self._fd)
        except OSError as error:
            self._remove(made)
            raise StoreError(f"no slab can be made in {self.path}: {error.strerror}; give another folder") from error
        except BaseException:
            self._remove(made)
            raise
        return list(paths)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        fd, self._fd = self._fd, -1  # as in Slab.close
        if fd >= 0:
            os.close(fd)

    def undo(self) -> None:
        """Remove the folders that the constructor made, if they are empty."""
        self.close()
        self._remove_made()

    def _require_room(self, nbytes: int) -> None:
        """Raise NotEnoughMemory, before the disk is filled, if it has less than `nbytes` left."""
        system = os.fstatvfs(self._fd)
        left = system.f_bavail * system.f_frsize
        if nbytes > left:
            raise NotEnoughMemory(
                f"{self.path} has no room for {nbytes:,} bytes: {left:,} are left; free some, or use a smaller "
                "max_bytes"
            )

    def _remove(self, parts: list[Path]) -> None:
        for part in parts:
            part.unlink(missing_ok=True)

    def _remove_made(self) -> None:
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return


def _missing(path: Path) -> list[Path]:
    """Return the folders that do not exist, the innermost first."""
    return [folder for folder in (path, *path.parents) if not os.path.exists(folder)]
