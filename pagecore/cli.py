"""The `pagecore` command: info, demo, replay, plan."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pagecore.errors import PagecoreError
from pagecore.serving.info import info_rows
from pagecore.serving.replay.options import DEFAULT_BYTES_PER_TOKEN, DEFAULT_MEMORY, ReplayOptions

if TYPE_CHECKING:
    from rich.progress import Progress

    from pagecore.serving.pictures.timeline import Timeline, Watcher
    from pagecore.serving.planner import ModelPlan
    from pagecore.serving.replay import ReplayReport

__all__ = ["main"]

# Exit codes: a result that is wrong, a command that cannot be done, Ctrl-C as shells report it.
WRONG, REFUSED, INTERRUPTED = 1, 2, 130
UPDATE_STEPS = 64


class MissingExtraError(PagecoreError, ImportError):
    """A command needs a package that only an extra installs."""


class UnwritableFileError(PagecoreError, OSError):
    """A file that the command was asked to write cannot be written."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error of the command is said."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        0 when all is well, 1 when a check failed, 2 when the command cannot be done (one line on stderr says why) or no
        request could be served, 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, type(sys.__stdout__)) and sys.stdout is not None:
        # Bars and box lines must not end a replay on a terminal that has none.
        sys.stdout.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        if sys.stdout is not None:  # closed by the caller: nobody is to read
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except PagecoreError as error:
        return _fail(str(error), REFUSED)
    except OSError as error:
        # Our output has nowhere to go; the interpreter must not try to flush it once more.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return WRONG
        return _fail(f"output cannot be written: {error.strerror or error}", REFUSED)
    except MemoryError as error:
        return _fail(f"out of memory ({error or 'no details'}); give less --memory or --max-running", REFUSED)
    return code


def _fail(reason: str, code: int) -> int:
    print(f"pagecore: {' '.join(reason.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pagecore", description="The paged key-value cache of a transformer.")
    commands = parser.add_subparsers(required=True, metavar="{info,demo,replay,plan}")
    info = commands.add_parser("info", help="versions, instruction set, threads, CUDA or why not")
    info.set_defaults(command=_info)
    demo = commands.add_parser("demo", help="serve two dozen chat requests and check every token")
    demo.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default 0)")
    demo.add_argument("--swap", action="store_true", help="swap preempted sequences out instead of recomputing them")
    _add_pictures(demo)
    demo.set_defaults(command=_demo)
    _add_replay(commands.add_parser("replay", help="run a recorded trace through the scheduler and the cache"))
    _add_plan(commands.add_parser("plan", help="what of a model fits into a memory: tokens, blocks, requests"))
    return parser


def _add_replay(parser: argparse.ArgumentParser) -> None:
    defaults = ReplayOptions
    parser.add_argument("trace", metavar="TRACE", help="a Mooncake trace, one JSON object a line")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--memory", help=f"KV memory of the modelled machine: bytes, or such as 64GiB ({DEFAULT_MEMORY})")
    size.add_argument("--blocks", type=int, help="blocks instead of memory, the null block counted")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="CONFIG", help="a model's config.json or its folder: its groups and bytes")
    model.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help=f"key and value of one token in all layers ({DEFAULT_BYTES_PER_TOKEN}, an 8B Llama in bfloat16)",
    )
    parser.add_argument(
        "--swap-memory", metavar="MEMORY", help="swap preempted requests out to this much memory, such as 16GiB"
    )
    numbers = {
        "block-size": "tokens a block",
        "max-tokens-per-step": "tokens of one step, prompt and decode together",
        "max-running": "sequences that run at once",
        "seed": "of the key and value that --attend makes up",
    }
    for name, text in numbers.items():
        default = defaults.__dataclass_fields__[name.replace("-", "_")].default
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")
    parser.add_argument("--requests", type=int, metavar="N", help="replay only the first N requests")
    parser.add_argument(
        "--attend", action="store_true", help="write and attend real key and value; check against float64"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE too")
    _add_pictures(parser)
    parser.set_defaults(command=_replay)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CONFIG", help="a Hugging Face config.json, or the folder that it is in")
    parser.add_argument("--memory", required=True, help="for key and value on one rank: bytes, or such as 40GiB")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="tensor parallel ranks (1)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (16)")
    parser.add_argument(
        "--context", type=int, nargs="+", metavar="N", help="lengths of requests (a few, up to the model's longest)"
    )
    parser.add_argument("--dtype", default="auto", help="of key and value: auto (the model's), bfloat16, float16 ...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan to FILE too")
    parser.set_defaults(command=_plan)


def _add_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw use, queue, preemptions and the block map")
    parser.add_argument("--live", action="store_true", help="show the block map in the terminal while it runs")


def _info(_arguments: argparse.Namespace) -> int:
    for name, value in info_rows():
        print(f"{name:<16} {value}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    _require("demo", "rich")
    timeline = _timeline(arguments.plot)
    from pagecore.serving.demo import DemoConfig, demo
    from pagecore.serving.report import demo_rows

    with _watched(arguments.live, timeline) as (bar, watchers):
        tasks = {"serve": bar.add_task("serving", total=None), "verify": bar.add_task("verifying", total=None)}
        report = demo(
            DemoConfig(seed=arguments.seed, swap=arguments.swap),
            lambda stage, done, total: bar.update(tasks[stage], completed=done, total=total),
            watchers,
        )
    _print_table("pagecore demo", demo_rows(report))
    _save_plot(timeline, arguments.plot, f"pagecore demo --seed {arguments.seed}")
    if not report.verdict.passed:
        wrong = report.verdict.wrong or ["nothing was generated"]
        for line in wrong[:10]:
            print(line, file=sys.stderr)
        return _fail(f"{len(wrong)} checks of {report.verdict.tokens} tokens failed", WRONG)
    print("all tokens verified")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    _require("replay", "rich")
    names = ReplayOptions.__dataclass_fields__
    options = ReplayOptions(**{name: value for name, value in vars(arguments).items() if name in names})
    if arguments.json is not None:
        _check_writable("--json", arguments.json)
    timeline = _timeline(arguments.plot)
    report = _replay_with_progress(arguments.trace, options, arguments.live, timeline)
    from pagecore.serving.report import replay_rows

    _print_table(f"pagecore replay {arguments.trace}", replay_rows(report))
    if arguments.json is not None:
        _write_json(arguments.json, report)
    _save_plot(timeline, arguments.plot, f"pagecore replay {Path(arguments.trace).name}")
    if report.requests_refused:
        _fail(f"{report.requests_refused} requests refused; {report.first_refusal}", REFUSED)
        if not report.requests_finished:
            return REFUSED
    if not report.passed:
        return _fail("attention differs from float64 by more than float32 may, or no row was checked", WRONG)
    return 0


def _replay_with_progress(trace: str, options: ReplayOptions, is_live: bool, timeline: Timeline | None) -> ReplayReport:
    from pagecore.serving.replay import replay

    with _watched(is_live, timeline) as (bar, watchers):
        task = bar.add_task("replaying", total=None)
        steps = 0

        def advance(done: int, total: int | None) -> None:
            # An update costs as much as a step of the index: one in many is enough for the eye.
            nonlocal steps
            steps += 1
            if steps % UPDATE_STEPS == 0:
                bar.update(task, completed=done, total=total)

        return replay(trace, options, advance, watchers)


def _plan(arguments: argparse.Namespace) -> int:
    _require("plan", "rich")
    from pagecore.serving.plan_report import context_columns, group_columns, plan_rows
    from pagecore.serving.planner import plan_model

    if arguments.json is not None:
        _check_writable("--json", arguments.json)
    plan = plan_model(
        arguments.model,
        arguments.memory,
        ranks=arguments.ranks,
        block_size=arguments.block_size,
        context=arguments.context,
        dtype=arguments.dtype,
    )
    _print_table(f"pagecore plan {arguments.model}", plan_rows(plan))
    _print_columns("groups", *group_columns(plan))
    _print_columns("requests at once", *context_columns(plan))
    if arguments.json is not None:
        _write_json(arguments.json, plan)
    return 0


def _require(what: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"{what} needs {package}, which is not installed: pip install 'pagecore[cli]'")


def _timeline(path: Path | None) -> Timeline | None:
    """What records a run for the picture that is wanted at `path`, if one is and can be drawn there."""
    if path is None:
        return None
    _require("--plot", "matplotlib")
    if path.suffix.lower() not in ("", ".png"):
        raise UnwritableFileError(f"--plot {path}: pictures are PNG; let the name end in .png")
    _check_writable("--plot", path)
    from pagecore.serving.pictures.timeline import Timeline

    return Timeline()


def _save_plot(timeline: Timeline | None, path: Path, title: str) -> None:
    if timeline is None:
        return
    from pagecore.serving.pictures.plot import save

    try:
        save(timeline, path, title)
    except OSError as error:
        raise UnwritableFileError(f"--plot {path} cannot be written: {error.strerror or error}") from error


@contextmanager
def _watched(is_live: bool, timeline: Timeline | None) -> Iterator[tuple[Progress, list[Watcher]]]:
    """What a run shows while it is under way, and who looks on: the bar alone, or with the block map above it."""
    bar = _progress()
    watchers: list[Watcher] = [] if timeline is None else [timeline]
    shown: AbstractContextManager[object] = bar
    if is_live:
        from pagecore.serving.pictures.live import LiveMap

        live = LiveMap(bar.console, bar)
        if live.is_shown:
            watchers.append(live)
            shown = live
    with shown:
        yield bar, watchers


def _progress() -> Progress:
    """A progress bar on stderr, if that is a terminal; it vanishes when it is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print_table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    Console().print(table)


def _print_columns(title: str, heads: list[str], lines: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for head in heads:
        table.add_column(Text(head), justify="right")
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)


def _check_writable(option: str, path: Path) -> None:
    """Before minutes of work, not after: can the file be written where it is wanted?"""
    folder = path.parent
    if path.is_dir():
        raise UnwritableFileError(f"{option} {path} is a folder; name a file in it")
    if not folder.is_dir():
        raise UnwritableFileError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UnwritableFileError(f"{option} {path} cannot be written; check its permissions")


def _write_json(path: Path, report: ReplayReport | ModelPlan) -> None:
    try:
        path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    except OSError as error:
        raise UnwritableFileError(f"--json {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
