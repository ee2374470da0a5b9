"""Output of the commands: progress bars, tables, pictures and JSON."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pagecore.cli.outcomes import MissingExtraError, UnwritableFileError

if TYPE_CHECKING:
    from rich.progress import Progress

    from pagecore.serving.pictures import Timeline, Watcher
    from pagecore.serving.plans import ModelPlan
    from pagecore.serving.replay import ReplayReport
    from pagecore.serving.whatif import WhatIf


def require(feature: str, package: str, extra: str = "cli") -> None:
    """Raise MissingExtraError if `package`, which `feature` needs and `extra` installs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"{feature} needs {package}, which is not installed; run pip install 'pagecore[{extra}]'"
        )


def recorder(path: Path | None) -> Timeline | None:
    """Return a timeline that records a run for the picture at `path`; None without a path."""
    if path is None:
        return None
    check_picture("--plot", path)
    from pagecore.serving.pictures.timeline import Timeline

    return Timeline()


def save_plot(timeline: Timeline | None, path: Path, title: str) -> None:
    """Draw the recorded run and write it to `path`; do nothing without a timeline."""
    if timeline is None:
        return
    from pagecore.serving.pictures.plot import save

    with writing("--plot", path):
        save(timeline, path, title)


@contextmanager
def watched(is_live: bool, timeline: Timeline | None) -> Iterator[tuple[Progress, list[Watcher]]]:
    """Show a progress bar, and the live block map if wanted, during a run; yield the bar and the watchers."""
    bar = progress()
    watchers: list[Watcher] = [] if timeline is None else [timeline]
    # A disabled bar is not entered: rich before 14.3 prints an empty line when it leaves one.
    shown: AbstractContextManager[object] = nullcontext() if bar.disable else bar
    if is_live:
        from pagecore.serving.pictures.live import LiveMap

        live = LiveMap(bar.console, bar)
        if live.is_shown:
            watchers.append(live)
            shown = live
    with shown:
        yield bar, watchers


def progress() -> Progress:
    """Return a progress bar on stderr, disabled if stderr is not a terminal; it disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of names and values."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    Console().print(table)


def print_columns(title: str, headings: list[str], lines: list[list[str]]) -> None:
    """Print a table with headings above its columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def check_picture(option: str, path: Path) -> None:
    """Raise MissingExtraError or UnwritableFileError if a picture cannot be drawn or its file cannot be written."""
    require(option, "matplotlib")
    if path.suffix.lower() not in ("", ".png"):
        raise UnwritableFileError(f"{option} {path}: the picture is a PNG file; use a name that ends in .png")
    check_writable(option, path)


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Raise UnwritableFileError if the block, which writes a file, raises OSError."""
    try:
        yield
    except UnwritableFileError:
        raise
    except OSError as error:
        raise UnwritableFileError(f"{option} {path} cannot be written: {error.strerror or error}") from error


def check_writable(option: str, path: Path) -> None:
    """Raise UnwritableFileError if a file cannot be written; called before minutes of work."""
    folder = path.parent
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:
        raise UnwritableFileError(f"{option} {path} cannot be written: {error.strerror}") from error
    except ValueError:  # a null byte, or text that no file name can have
        raise UnwritableFileError(f"{option} {str(path)!r} is not a valid path") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise UnwritableFileError(f"{option} {path} is a folder; expected a file")
    if not os.path.isdir(folder):
        raise UnwritableFileError(f"{option} {path}: folder {folder} does not exist; create it first")
    if not os.access(folder if mode is None else path, os.W_OK):
        raise UnwritableFileError(f"{option} {path} cannot be written; check its permissions")
    if mode is not None and stat.S_ISFIFO(mode):
        os.close(_open_fifo(option, path))


def check_distinct(outputs: Mapping[str, Path | None], *, trace: str | None = None, configs: Iterable[object]) -> None:
    """Raise UnwritableFileError if an output would replace another one, the trace, or a config."""
    found = {} if trace is None else {os.path.realpath(trace): "the trace"}
    for config in configs:
        if config is not None:
            path = Path(str(config))
            found[os.path.realpath(path / "config.json" if path.is_dir() else path)] = "the config"
    for option, output in outputs.items():
        if output is None or (output.exists() and not output.is_file()):  # a device takes all outputs
            continue
        other = found.setdefault(os.path.realpath(output), option)
        if other != option:
            raise UnwritableFileError(f"{other} and {option} are both {output}; give each a file of its own")


def write_json(path: Path, report: ReplayReport | ModelPlan | WhatIf) -> None:
    """Write a report as JSON."""
    text = json.dumps(report.as_json(), indent=2) + "\n"
    with writing("--json", path):
        is_fifo = os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode)
        with os.fdopen(_open_fifo("--json", path), "w") if is_fifo else path.open("w") as file:
            file.write(text)


def _open_fifo(option: str, path: Path) -> int:
    """Open a FIFO for writing without waiting for a reader, which may never come."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise UnwritableFileError(f"{option} {path} cannot be written: {error.strerror}") from error
        raise UnwritableFileError(f"{option} {path} is a FIFO without a reader; start the reader first") from None
    os.set_blocking(descriptor, True)
    return descriptor
