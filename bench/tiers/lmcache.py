"""LMCache's own bench of its stores, ``lmcache bench l2``, for the bench "tiers": a folder with O_DIRECT, and Redis."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness.runner import Bench
from bench.tiers.disk import THREADS
from bench.tiers.remote import redis_server

KIB, MIB = 1 << 10, 1 << 20
SECONDS = 120.0
# lmcache without torch's and CUDA's packages is enough for its stores.
REMEDY = "pip install --no-deps --target FOLDER lmcache and what its command names as missing; set PYTHONPATH=FOLDER"


def run(bench: Bench, entry_bytes: int, count: int) -> None:
    """Print what LMCache measures with equal entries; it sums nothing and keeps one file an entry."""
    if importlib.util.find_spec("lmcache") is None:
        bench.note(f"lmcache is not installed: no figures of LMCache; {REMEDY}")
        return
    with tempfile.TemporaryDirectory() as folder:
        store = {"type": "fs_native", "base_path": folder, "use_odirect": True, "num_workers": THREADS}
        _measure(bench, "LMCache fs_native", store, entry_bytes, count)
    if shutil.which("redis-server") is None:
        bench.note("redis-server is not installed: no figures of LMCache with Redis; make servers installs it")
        return
    with redis_server(16 * count * entry_bytes, port=True) as port:
        store = {"type": "resp", "host": "127.0.0.1", "port": int(str(port)), "num_workers": 2}
        _measure(bench, "LMCache resp, TCP", store, entry_bytes, count)


def _measure(bench: Bench, name: str, store: dict[str, object], entry_bytes: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {"num-keys": count, "data-size-kb": entry_bytes // KIB, "rounds": 5, "l1-align-bytes": 4096}
        command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(store)]
        command += [f"--{option}={value}" for option, value in options.items()]
        environment = os.environ | {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        done = subprocess.run(
            [*command, "--format=json", f"--output={report}", "--quiet"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode or not report.exists():
            bench.note(f"{name}: its bench failed, {(done.stdout.strip().splitlines() or ['no output'])[-1]}; {REMEDY}")
            return
        measured: dict[str, Any] = json.loads(report.read_text())["metrics"]
    for operation in ("Store", "Load"):
        found = [each for each in measured.values() if each.get("operation") == operation]
        if not found or found[0]["total_success"] != found[0]["total_keys"]:
            bench.note(f"{name}: its bench did not {operation.lower()} all entries")
            continue
        speed = found[0]["throughput_avg_mbps"] * MIB / 1e9
        bench.fact(f"{operation.lower()}, {name}, {entry_bytes / MIB:g} MiB", speed, "GB/s")
