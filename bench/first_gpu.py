"""First run on a GPU machine, in under nine minutes: facts, build, compiled kernels, smoke runs, benches and tests.

Decode is timed before the tests, because a run may be cut short; each figure checks its numbers before it is timed.
Each step is a command with a time limit; a step that fails or takes too long does not stop the next one. This module
does not import pagecore, which is not built when the run starts. The exit status is 0 if every step passed, 1 if one
failed, 2 if there is no GPU.

The folder --out gets few files: log.txt (the output of the steps), summary.json, built.tar.gz (extensions and compiled
kernels, to unpack in the root of the tree), kernels.json, and a JSON file for each bench.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu.facts import commit, cores, find_gpu, print_facts
from bench.gpu.steps import Outcome, Step, run_step, tail, trimmed

ROOT = Path(__file__).parent.parent
SCRATCH = ROOT / "build" / "first_gpu"
CUBINS = SCRATCH / "cubins"
TOTAL_S = 530.0
BENCHES = ("gpu_decode", "gpu_latent", "gpu_prefill", "gpu_write", "gpu_sparse")
BEFORE_TESTS = 2
TEST_PROCESSES = 8
LOG_BYTES_MAX = 1 << 20  # for each step
LINES_SHOWN = 12
WIDTH_SHOWN = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, write the files and print the summary."""
    options = _parser().parse_args(arguments)
    if options.facts:
        print_facts()
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out.resolve(), time.monotonic() + TOTAL_S)
    run.take(Step("facts", (sys.executable, "-m", "bench.first_gpu", "--facts"), 20))
    gpu = find_gpu()
    if isinstance(gpu, str):
        print(f"first_gpu: {gpu}; stopped after the first step", file=sys.stderr)
        run.finish(error=gpu)
        return 2
    run.report |= gpu
    try:
        make_private(CUBINS)
    except OSError as error:
        print(f"first_gpu: {CUBINS} stays as it is, and every process compiles its kernels: {error}", file=sys.stderr)
    for step in steps(run.out, options.kind):
        run.take(step)
        if step.name in ("build", "kernels"):
            archive(run.out / "built.tar.gz")
    return run.finish()


def steps(out: Path, kind: tuple[str, ...]) -> list[Step]:
    """Return the steps after the facts in order, most important first."""
    python, jobs = sys.executable, str(cores())
    build = (python, "setup.py", "-q", "build_clib", f"-j{jobs}", "build_ext", "--inplace", f"-j{jobs}")
    report = (python, "-m", "pagecore.ops.cuda.report", "--arch", "device", "--jobs", jobs)
    # -v: a run that is killed has named the tests that failed.
    tests = [python, "-m", "pytest", "tests/gpu", "-v", "-pno:cacheprovider", "-Wdefault", "--tb=short"]
    if find_spec("xdist") is not None:
        tests += ["-n", str(TEST_PROCESSES), "--dist", "loadfile"]
    if find_spec("pytest_timeout") is not None:
        tests += ["--timeout", "90"]
    # Longer benches take what earlier steps have left.
    benches = [
        Step(f"bench {name}", (python, "-m", "bench", name, *kind, "--json", str(out / f"{name}.json")), 28, 30)
        for name in BENCHES
    ]
    return [
        Step("build", build, 110),
        Step("kernels", (*report, "--json", str(out / "kernels.json")), 70),
        # The first runs compile kernels that the step before had no time for.
        *(Step(f"smoke {name}", (python, "-m", "bench", name, "--smoke"), 15, 45) for name in BENCHES),
        *benches[:BEFORE_TESTS],
        Step("tests", tuple(tests), 115),
        *benches[BEFORE_TESTS:],
    ]


class Run:
    """The steps so far and their files in the folder `out`, which are complete after each step."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.outcomes: dict[str, Outcome] = {}
        self.spare = 0.0  # seconds that the steps so far have left of their limits
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self.report: dict[str, Any] = {"date": date, "commit": commit(ROOT), "python": sys.version.split()[0]}
        self.log = out / "log.txt"
        self.log.write_text("")

    def take(self, step: Step) -> Outcome:
        """Run one step, append its output to the log, and show the last lines."""
        limit = min(step.limit_s + min(step.extra_s, self.spare), self.deadline - time.monotonic())
        head = f"\n== {step.name} (limit {max(limit, 0):.0f} s): {' '.join(step.command)}\n"
        print(head, end="", flush=True)
        output = self.out / "step.log"
        outcome = run_step(step, limit, output, environment(self.report["commit"]), ROOT)
        text = trimmed(output.read_bytes(), LOG_BYTES_MAX)
        output.unlink()
        end = f"== {step.name}: {outcome.verdict}, {outcome.seconds:.1f} s\n"
        with self.log.open("ab") as log:
            log.write(head.encode() + text + end.encode())
        print(tail(text, LINES_SHOWN, WIDTH_SHOWN) + end, end="", flush=True)
        self.outcomes[step.name] = outcome
        self.spare = max(self.spare + step.limit_s - outcome.seconds, 0.0)
        self._save()
        return outcome

    def finish(self, error: str | None = None) -> int:
        """Print the summary and complete the files; return 1 if a step failed."""
        if error is not None:
            self.report["error"] = error
        self._save()
        summary = table(self.outcomes) + f"\nwritten: {self.out}\n"
        with self.log.open("a") as log:
            log.write("\n" + summary)
        print("\n" + summary, end="", flush=True)
        return int(any(outcome.code for outcome in self.outcomes.values()))

    def _save(self) -> None:
        taken = {name: asdict(outcome) | {"verdict": outcome.verdict} for name, outcome in self.outcomes.items()}
        (self.out / "summary.json").write_text(json.dumps(self.report | {"steps": taken}, indent=1) + "\n")


def environment(commit: str) -> dict[str, str]:
    """Return the environment of a step."""
    return os.environ | {
        "PAGECORE_CACHE_DIR": str(CUBINS),
        "PAGECORE_COMMIT": commit,
        "PAGECORE_REQUIRE": "gpu,torch,nvrtc",
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX would take three quarters of the memory
    }


def archive(path: Path) -> None:
    """Pack this interpreter's extensions and the compiled kernels, by their paths in the tree."""
    built = sorted(ROOT.glob(f"pagecore/**/*{EXTENSION_SUFFIXES[0]}"))
    with tarfile.open(path, "w:gz", compresslevel=1) as packed:  # seconds of the GPU's time are dearer than bytes
        for each in [*built, *([CUBINS] if CUBINS.is_dir() else [])]:
            packed.add(each, each.relative_to(ROOT))
    print(f"built.tar.gz: {len(built)} extensions, {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def make_private(folder: Path) -> None:
    """Give this user alone the files of a folder that came with the tree; pagecore loads no kernels of other users."""
    if not folder.is_dir():
        return
    aside, former = (folder.with_name(folder.name + suffix) for suffix in (".private", ".former"))
    for each in (aside, former):
        shutil.rmtree(each, ignore_errors=True)
    aside.mkdir(mode=0o700)
    for each in folder.iterdir():
        if each.is_file() and not each.is_symlink():
            shutil.copyfile(each, aside / each.name)
            (aside / each.name).chmod(0o600)
    folder.rename(former)
    aside.rename(folder)
    shutil.rmtree(former, ignore_errors=True)  # a file of another user may stay


def table(outcomes: dict[str, Outcome]) -> str:
    """Return a line for each step."""
    return "\n".join(
        f"{name:<18} {outcome.verdict:<14} {outcome.seconds:>6.1f} s  {outcome.last[:120]}"
        for name, outcome in outcomes.items()
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bench/first_gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(os.environ.get("OUT") or SCRATCH / "out")
    parser.add_argument(
        "--out", type=Path, default=out, metavar="FOLDER", help="folder of the files (default: $OUT or %(default)s)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--full", dest="kind", action="store_const", const=(), default=("--quick",), help="full runs with all figures"
    )
    kind.add_argument(
        "--smoke", dest="kind", action="store_const", const=("--smoke",), help="smoke runs, whose figures mean nothing"
    )
    parser.add_argument("--facts", action="store_true", help="print facts of the machine and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
