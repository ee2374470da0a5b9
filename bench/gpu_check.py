"""Everything that takes a GPU, in one run of under nine minutes: build, kernels, tests, benches, memory checker.

Knows nothing of pagecore, which is not built yet when it starts. A step that fails or takes too long is told and the
next one begins; the exit code is 1 where one failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOTAL_S = 530.0
BENCHES = ("gpu_write", "gpu_decode", "gpu_prefill")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and how long it may take."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended: `code` is the exit code, -9 where it took too long; `last` is its last line."""

    code: int
    seconds: float
    last: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, print a table and write the JSON."""
    options = _parser().parse_args(arguments)
    gpu = find_gpu()
    if isinstance(gpu, str):
        print(f"gpu_check: {gpu}", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in gpu.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_steps(steps(Path(folder), options.kind), time.monotonic() + TOTAL_S)
        figures = {name: _read(Path(folder) / f"{name}.json") for name in ("kernels", "bench")}
    steps_taken = {name: asdict(outcome) for name, outcome in outcomes.items()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = gpu | {"date": date, "commit": _commit(), "steps": steps_taken} | figures
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{_slug(gpu['gpu'])}-{report['date'][:10]}-{report['commit']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + table(outcomes) + f"\nwritten: {path}")
    return int(any(outcome.code for outcome in outcomes.values()))


def steps(out: Path, kind: tuple[str, ...]) -> list[Step]:
    """What is run, in this order; what matters less comes last."""
    python, jobs = sys.executable, str(os.cpu_count() or 1)
    bench = (python, "-m", "bench", *BENCHES)
    report = (python, "-m", "pagecore.ops.cuda.report", "--arch", "device", "--jobs", jobs)
    tests = (python, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider")
    planned = [
        Step("build", (python, "setup.py", "-q", "build_clib", "build_ext", "--inplace", "-j", jobs), 170),
        Step("kernels", (*report, "--json", str(out / "kernels.json")), 60),
        Step("tests", tests, 130),
        Step("bench", (*bench, *kind, "--json", str(out / "bench.json")), 150),
    ]
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is not None:
        # Under it every access takes many times as long: the smallest sizes, whose results are checked too.
        planned.append(Step("sanitizer", (sanitizer, "--error-exitcode", "9", *bench, "--smoke"), 90))
    return planned


def run_steps(planned: Sequence[Step], deadline: float) -> dict[str, Outcome]:
    """Run them one after another, none past the deadline."""
    outcomes = {}
    for step in planned:
        limit = min(step.limit_s, deadline - time.monotonic())
        print(f"\n== {step.name}: {' '.join(step.command)}", flush=True)
        outcomes[step.name] = run_step(step, max(limit, 0.0))
    return outcomes


def run_step(step: Step, limit_s: float) -> Outcome:
    """Run one command, showing what it prints; it ends with all that it started when its time is up."""
    begin = time.monotonic()
    environment = os.environ | {"PAGECORE_REQUIRE": "gpu,torch,nvrtc", "PYTHONUNBUFFERED": "1"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take three quarters of the memory
    last = ""
    with subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        code = process.wait()
        timer.cancel()
    return Outcome(code, round(time.monotonic() - begin, 1), last)


def table(outcomes: dict[str, Outcome]) -> str:
    """A line for each step."""
    verdicts = {0: "passed", -signal.SIGKILL: "took too long"}
    return "\n".join(
        f"{name:<10} {verdicts.get(outcome.code, 'failed'):<14} {outcome.seconds:>6.1f} s  {outcome.last}"
        for name, outcome in outcomes.items()
    )


def find_gpu() -> dict[str, str] | str:
    """The first GPU and its driver; why there is none, as text."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs a GPU: the NVIDIA driver (libcuda.so.1) is not on this machine"
    count, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "needs a GPU: the NVIDIA driver sees no device"
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetName(name, len(name), 0)
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return {"gpu": name.value.decode(), "driver": _ask_smi("driver_version"), "cuda": cuda}


def _ask_smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.splitlines()[0].strip() if told.strip() else "unknown"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench/gpu_check.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", metavar="FOLDER", help="for the JSON")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--full", dest="kind", action="store_const", const=(), default=("--quick",), help="all figures")
    kind.add_argument("--smoke", dest="kind", action="store_const", const=("--smoke",), help="no figures to quote")
    return parser


if __name__ == "__main__":
    sys.exit(main())
