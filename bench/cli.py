"""The command line of the benches: which run, what on, where the figures go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import picture
from bench.gpu import GpuMissing, require_gpu
from bench.machine import commit, machine, versions
from bench.peers import PeerMissing
from bench.runner import Bench

NAMES = ("prepare", "index", "prefix", "cpu_write", "gather", "cpu_attention", "dispatch", "replay")
# These need a GPU.
GPU_NAMES = ("gpu_write", "gpu_decode", "gpu_prefill")
# The bench that has a picture.
DRAWN = "cpu_attention"
PEERS = ("sglang", "vllm")
REFUSED = 2


def main(argv: list[str] | None = None) -> int:
    """Run the benches that are named, or list them.

    Returns
    -------
    int
        0; or 2 where a peer, a GPU, the trace or the place of the JSON is not there, which one message on stderr says.
        Targets that are missed change nothing.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.names and not options.peer:
        _list_names()
        return 0
    if options.json and not _writable(options.json):
        parser.error(f"--json {options.json} cannot be written; name a file in a folder that is there")
    if options.plot:
        _refuse_plot(parser, options)
    if options.trace and not options.trace.is_file():
        parser.error(f"--trace {options.trace} is no file; leave it out to replay one that is found or made")
    try:
        peers = _load_peers(options)
        if set(options.names) & set(GPU_NAMES):
            require_gpu()
    except (PeerMissing, GpuMissing) as missing:
        parser.exit(REFUSED, f"bench: {missing}\n")
    report = _header(options)
    modules = {name: importlib.import_module(f"bench.{name}") for name in options.names} | peers
    for title, module in modules.items():
        bench = _section(title, module, options)
        report["results"][title] = bench.as_json()
        if options.plot and title == DRAWN:
            picture.save(bench.figures, options.plot, f"{report['machine']['cpu']}, {report['machine']['isa']}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def about(name: str) -> str:
    """What a bench times: the first line of its module."""
    return (importlib.import_module(f"bench.{name}").__doc__ or "").splitlines()[0]


def _load_peers(options: argparse.Namespace) -> dict[str, ModuleType]:
    """The benches of the peers that are named, the peers themselves loaded: before minutes of work, not after.

    A peer's prefix cache stands among the controls of the bench "prefix"; where nothing else is named, that is all.
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
        help="time its allocators beside ours, and for prefix its prefix cache",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--quick", dest="kind", action="store_const", const="quick", default="full", help="a short run: fewer rounds"
    )
    kind.add_argument(
        "--smoke", dest="kind", action="store_const", const="smoke", help="small sizes, two rounds, nothing to quote"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, sizes and figures to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"{DRAWN}: draw what it reaches as PNG")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay: a Mooncake trace instead of the one found")
    parser.add_argument("--requests", type=_count, metavar="N", help="replay: only the first N requests (2000)")
    return parser


def _name(text: str) -> str:
    # `choices` would refuse the empty list of names, which asks for the list.
    if text not in (*NAMES, *GPU_NAMES):
        raise argparse.ArgumentTypeError(f"there is no bench {text!r}; there are {', '.join((*NAMES, *GPU_NAMES))}")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests, 1 or more")
    return int(text)


def _refuse_plot(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if DRAWN not in options.names:
        parser.error(f"--plot draws what {DRAWN} reaches; name it too")
    if not _writable(options.plot):
        parser.error(f"--plot {options.plot} cannot be written; name a file in a folder that is there")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'pagecore[cli]'")


def _writable(path: Path) -> bool:
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _list_names() -> None:
    for name in (*NAMES, *GPU_NAMES):
        print(f"{name:<14} {about(name)}")
    for peer in PEERS:
        print(f"--peer {peer:<8} {about(f'peers.{peer}')}")


def _header(options: argparse.Namespace) -> dict[str, Any]:
    """Print and return what the figures are taken on."""
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
    print("a line below its figure is a control, and how many times faster than it the figure is: median (min to max)")
    if options.kind == "smoke":
        print("--smoke: these figures only show that the benches run")
    return report


def _section(title: str, module: ModuleType, options: argparse.Namespace) -> Bench:
    print(f"\n{title}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
    bench = Bench(kind=options.kind, clock=getattr(module, "CLOCK", time.perf_counter))
    module.run(bench, options)
    bench.show_targets()
    return bench


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {size}" for key, size in value.items())
    return "unknown" if value is None else str(value)
