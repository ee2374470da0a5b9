"""Command line of the benches: choice of benches, header, JSON and plot."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.gpu.device import GpuMissing, require_gpu
from bench.harness.machine import ROOT, commit, machine, versions
from bench.harness.runner import Bench
from bench.host import picture
from bench.peers import PeerMissing

# The folder of each bench, in the order of the list.
FOLDERS = {
    "prepare": "index",
    "index": "index",
    "prefix": "index",
    "cpu_write": "host",
    "gather": "host",
    "cpu_attention": "host",
    "formats": "host",
    "rotations": "host",
    "latent": "host",
    "metrics": "serving",
    "sparse": "host",
    "trees": "host",
    "states": "serving",
    "promote": "tiers",
    "events": "tiers",
    "dispatch": "host",
    "replay": "serving",
    "scheduler": "serving",
    "tiers": "tiers",
}
NAMES = tuple(FOLDERS)
# Benches that need a GPU, in the folder gpu.
GPU_NAMES = ("gpu_decode", "gpu_latent", "gpu_prefill", "gpu_write", "gpu_sparse")
# The bench that --plot draws.
DRAWN = "cpu_attention"
PEERS = ("sglang", "vllm")
REFUSED = 2


def main(argv: list[str] | None = None) -> int:
    """Run the named benches, or list them.

    A single bench runs in this process. Several benches run in a process each and write a file each, so that a bench
    that fails or crashes does not affect the figures of the others.

    Returns
    -------
    int
        0 if every bench ran and every check passed; 1 otherwise; 2 if a peer, a GPU, the trace or the place of the JSON
        is missing, with one message on stderr. Missed targets do not count.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.names and not options.peer:
        _list_names()
        return 0
    _refuse_paths(parser, options)
    try:
        peers = _load_peers(options)
        if set(options.names) & set(GPU_NAMES):
            require_gpu()
    except (PeerMissing, GpuMissing) as missing:
        parser.exit(REFUSED, f"bench: {missing}\n")
    titles = _titles(options)
    if len(titles) > 1:
        return _run_processes(titles, options)
    (title,) = titles
    return _run_one(title, peers[title] if title in peers else importlib.import_module(module_of(title)), options)


def _titles(options: argparse.Namespace) -> list[str]:
    """Return the titles to run: the benches, then the peers unless they are only controls of the bench "prefix"."""
    names = list(dict.fromkeys(options.names))
    return names if names == ["prefix"] else names + [f"peer {peer}" for peer in dict.fromkeys(options.peer)]


def _run_one(title: str, module: ModuleType, options: argparse.Namespace) -> int:
    """Run one bench and write its file after every figure, so that an aborted run keeps them."""
    report = _header(options)
    print(f"\n{title}: {(module.__doc__ or '').splitlines()[0]}", flush=True)

    def save() -> None:
        report["results"][title] = bench.as_json()
        if options.json:
            _write(options.json, json.dumps(report, indent=2) + "\n")

    bench = Bench(kind=options.kind, clock=getattr(module, "CLOCK", time.perf_counter), on_change=save)
    gc.collect()
    gc.freeze()  # each figure starts with a collection, which would walk all modules
    with bench.case(title):
        module.run(bench, options)
    bench.show_targets()
    save()
    if options.plot and title == DRAWN and bench.figures:
        picture.save(bench.figures, options.plot, f"{report['machine']['cpu']}, {report['machine']['isa']}")
    if bench.failures:
        print(f"bench: {title}: {len(bench.failures)} failed", file=sys.stderr)
    return int(bool(bench.failures))


def _run_processes(titles: list[str], options: argparse.Namespace) -> int:
    """Run each bench in its own process, one after another."""
    if options.json:
        options.json.mkdir(exist_ok=True)
    failed = 0
    for title in titles:
        sys.stdout.flush()
        command = [sys.executable, "-m", "bench", *_arguments(title, options)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code < 0:
            print(f"bench: {title}: ended by signal {-code}", file=sys.stderr)
        failed += code != 0
        print()
    if failed:
        print(f"bench: {failed} of {len(titles)} failed", file=sys.stderr)
    return int(failed > 0)


def _arguments(title: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of one of several benches."""
    peer = title.removeprefix("peer ")
    arguments = [title] if peer == title else ["--peer", peer]
    if title == "prefix":
        arguments += [argument for each in options.peer for argument in ("--peer", each)]
    if options.kind != "full":
        arguments.append(f"--{options.kind}")
    if options.json:
        arguments += ["--json", str(options.json.resolve() / f"{title.replace(' ', '_')}.json")]
    if options.plot and title == DRAWN:
        arguments += ["--plot", str(options.plot.resolve())]
    if options.trace:
        arguments += ["--trace", str(options.trace.resolve())]
    if options.requests:
        arguments += ["--requests", str(options.requests)]
    return arguments


def _write(path: Path, text: str) -> None:
    """Replace a file atomically, so that an aborted run leaves a complete file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


def module_of(name: str) -> str:
    """Return the name of a bench's module."""
    return f"bench.{FOLDERS.get(name, 'gpu')}.{name}"


def about(module: str) -> str:
    """Return the first line of a bench's docstring."""
    return (importlib.import_module(module).__doc__ or "").splitlines()[0]


def _load_peers(options: argparse.Namespace) -> dict[str, ModuleType]:
    """Import the named peers' benches and load the peers, before minutes of work instead of after.

    In the bench "prefix" a peer's prefix cache is one of the controls. If only "prefix" is named, return no peer bench.
    """
    peers = list(dict.fromkeys(options.peer))
    modules = {f"peer {peer}": importlib.import_module(f"bench.peers.{peer}") for peer in peers}
    if "prefix" in options.names:
        for peer in peers:
            importlib.import_module(f"bench.peers.{peer}_prefix").load()
        if set(options.names) == {"prefix"}:
            return {}
    for module in modules.values():
        module.load()
    return modules


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time pagecore against named controls.")
    parser.add_argument("names", nargs="*", metavar="NAME", type=_name, help=", ".join((*NAMES, *GPU_NAMES)))
    parser.add_argument(
        "--peer",
        action="append",
        choices=PEERS,
        default=[],
        help="also time this peer's allocators, and in prefix its prefix cache",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", dest="kind", action="store_const", const="quick", default="full", help="fewer rounds")
    kind.add_argument(
        "--smoke",
        dest="kind",
        action="store_const",
        const="smoke",
        help="small sizes and two rounds; the figures mean nothing",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write machine, versions, sizes and figures to FILE; with several benches, to FILE/NAME.json",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"{DRAWN}: draw its GB/s as PNG")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay: a Mooncake trace instead of a synthetic one"
    )
    parser.add_argument("--requests", type=_count, metavar="N", help="replay: only the first N requests (2000)")
    return parser


def _name(text: str) -> str:
    # `choices` would reject the empty list, which lists the benches.
    if text not in (*NAMES, *GPU_NAMES):
        raise argparse.ArgumentTypeError(f"unknown bench {text!r}; use one of {', '.join((*NAMES, *GPU_NAMES))}")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of requests, 1 or more, got {text!r}")
    return int(text)


def _refuse_paths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with the reason if a named file or folder cannot be read or written."""
    several = len(_titles(options)) > 1
    if options.json and several and not (_is_writable_folder(options.json) or _writable(options.json)):
        parser.error(f"--json {options.json} cannot be written; name a folder, or a new one in an existing folder")
    if options.json and several and options.json.exists() and not options.json.is_dir():
        parser.error(f"--json {options.json} is a file, and several benches write one file each; name a folder")
    if options.json and not several and not _writable(options.json):
        parser.error(f"--json {options.json} cannot be written; name a file in an existing folder")
    if options.plot:
        _refuse_plot(parser, options)
    if options.trace and not options.trace.is_file():
        parser.error(f"--trace {options.trace} is not a file; omit it to replay a synthetic trace")


def _refuse_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if DRAWN not in options.names:
        parser.error(f"--plot draws the figures of {DRAWN}; name that bench too")
    if not _writable(options.plot):
        parser.error(f"--plot {options.plot} cannot be written; name a file in an existing folder")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'pagecore[cli]'")


def _is_writable_folder(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK)


def _writable(path: Path) -> bool:
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _list_names() -> None:
    for name in (*NAMES, *GPU_NAMES):
        print(f"{name:<14} {about(module_of(name))}")
    for peer in PEERS:
        print(f"--peer {peer:<8} {about(f'bench.peers.{peer}')}")


def _header(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the machine, versions and commit of the run."""
    report: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": options.kind,
        "results": {},
    }
    for part in ("machine", "versions"):
        print(f"{part}: " + ", ".join(f"{key} {_shown(value)}" for key, value in report[part].items()))
    print(f"commit: {_shown(report['commit'])}")
    print("below each figure: its controls, and its speed-up over each: median (min to max) of interleaved rounds")
    if options.kind == "smoke":
        print("--smoke: the figures only show that the benches run")
    return report


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {size}" for key, size in value.items())
    return "unknown" if value is None else str(value)
