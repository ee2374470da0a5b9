"""Faults planted in kernels: a source line marked ``// fault: name`` is replaced by another line, or deleted."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

MARKER = re.compile(r"// fault: (\w+)$", re.MULTILINE)


class MarkerError(ValueError):
    """A marker of a fault is missing from the sources, or marks several lines."""


@dataclass(frozen=True)
class Fault:
    """A faulty version of one source line.

    Attributes
    ----------
    marker : str
        Name after ``// fault:`` on the line. Several faults may share a line.
    line : str
        The faulty line; empty to delete the line.
    message : str or None
        Pattern of the error that the fault must cause; None for any error.
    """

    marker: str
    line: str = ""
    message: str | None = None


def markers(sources: Path) -> list[str]:
    """Return the names of all marked lines in a folder of kernels, one entry for each line."""
    return sorted(name for path in _files(sources) for name in MARKER.findall(path.read_text()))


def plant(folder: Path, sources: Path, *faults: Fault) -> Path:
    """Return a copy of a folder of kernels, in `folder` and of its name, with faults planted.

    Raises
    ------
    MarkerError
        A marker is on no line, or on several.
    """
    copy = Path(shutil.copytree(sources, folder / sources.name))
    for fault in faults:
        found = [path for path in _files(copy) for _ in _lines(path, fault.marker)]
        if len(found) != 1:
            places = ", ".join(path.relative_to(copy).as_posix() for path in found) or "none"
            raise MarkerError(
                f"expected one line with '// fault: {fault.marker}' in {sources}, got {len(found)} ({places}); "
                "mark the line, or rename the fault"
            )
        (path,) = found
        lines = path.read_text().splitlines(keepends=True)
        (at,) = _lines(path, fault.marker)
        lines[at] = f"{fault.line}\n"
        path.write_text("".join(lines))
    return copy


def _files(sources: Path) -> list[Path]:
    """Return the files of a folder of kernels and of the folders in it, without the bytecode of Python."""
    return sorted(path for path in sources.rglob("*") if path.is_file() and path.suffix != ".pyc")


def _lines(path: Path, marker: str) -> list[int]:
    """Return the indices of the lines with a marker."""
    pattern = re.compile(rf"// fault: {re.escape(marker)}$")
    return [i for i, line in enumerate(path.read_text().splitlines()) if pattern.search(line)]
