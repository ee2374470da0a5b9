"""Faults planted in kernels: a source line marked ``// fault: name`` is replaced by another line, or deleted.

Compilation takes most of a fault's time. `Planting` therefore plants all faults of a table in one copy of the sources,
as ``if (emulator::is_planted(number)) { faulty line } else { line }``, and selects one of them for a run. A fault of a
line that is not a statement of its own has a copy of its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.emulator.build import engine

# A statement, and the initialisation of a single constant.
STATEMENT = re.compile(r"(?:return|if \(|for \(|--|[\w.\[\]]+ [-+*|]?= |[\w.]+(?:<[^()]*>)?\().*;|continue;")
CONSTANT = re.compile(r"(const [\w:<>]+ \w+ = )(.*);")
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


class Planting:
    """Faulty copies of kernels, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: dict[object, Path] = {}

    @contextmanager
    def planted(self, sources: Path, fault: Fault, table: Iterable[Fault]) -> Iterator[Path]:
        """Yield a copy of a folder of kernels in which `fault`, one of `table`, is planted while the context lasts."""
        lines = _marked_lines(sources)
        faults = tuple(each for each in table if _with_choice(lines[each.marker], each.line, 1) is not None)
        if fault not in faults:
            yield self._copy(sources, fault)
            return
        copy = self._copy(sources, *_selected_by_number(lines, faults))
        engine().pc_plant(1 + faults.index(fault))
        try:
            yield copy
        finally:
            engine().pc_plant(0)

    def _copy(self, sources: Path, *faults: Fault) -> Path:
        key = (sources, faults)
        if key not in self._copies:
            self._copies[key] = plant(self._folder / str(len(self._copies)), sources, *faults)
        return self._copies[key]


def _selected_by_number(lines: dict[str, str], faults: tuple[Fault, ...]) -> list[Fault]:
    """Return a fault for each marked line, which chooses between the line and all its faults."""
    chosen: dict[str, str] = {}
    for number, fault in enumerate(faults, 1):
        line = _with_choice(chosen.get(fault.marker, lines[fault.marker]), fault.line, number)
        assert line is not None, f"{fault} cannot be selected next to other faults of its line"
        chosen[fault.marker] = line
    return [Fault(marker, line) for marker, line in chosen.items()]


def _with_choice(line: str, faulty: str, number: int) -> str | None:
    """Return a line that is `faulty` if a fault is planted; None if the language has no such line."""
    faulty = faulty.strip()
    constant, other = CONSTANT.fullmatch(line), CONSTANT.fullmatch(faulty)
    if constant and other and constant[1] == other[1] and not _has_comma(constant[2]):
        return f"{constant[1]}emulator::is_planted({number}) ? ({other[2]}) : ({constant[2]});"
    if STATEMENT.fullmatch(line) and (not faulty or faulty.endswith(";")):
        return f"if (emulator::is_planted({number})) {{ {faulty} }} else {line}"
    return None


def _has_comma(text: str) -> bool:
    """Return True if a text has a comma outside of parentheses, as between two constants."""
    while (shorter := re.sub(r"\([^()]*\)", "", text)) != text:
        text = shorter
    return "," in text


@cache
def _marked_lines(sources: Path) -> dict[str, str]:
    """Return the marked lines of a folder of kernels without their markers, by marker."""
    lines = [line for path in _files(sources) for line in path.read_text().splitlines()]
    return {found[1]: line[: found.start()].strip() for line in lines if (found := MARKER.search(line))}


def _files(sources: Path) -> list[Path]:
    """Return the files of a folder of kernels and of the folders in it, without the bytecode of Python."""
    return sorted(path for path in sources.rglob("*") if path.is_file() and path.suffix != ".pyc")


def _lines(path: Path, marker: str) -> list[int]:
    """Return the indices of the lines with a marker."""
    pattern = re.compile(rf"// fault: {re.escape(marker)}$")
    return [i for i, line in enumerate(path.read_text().splitlines()) if pattern.search(line)]
