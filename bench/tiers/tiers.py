"""Stores of blocks: puts and gets of 256 KiB, 1 MiB and 4 MiB against raw I/O, a file copy and a copy in memory."""

from __future__ import annotations

import argparse

from bench.harness.runner import Bench
from bench.tiers import disk, handover, lmcache, remote

KIB, MIB = 1 << 10, 1 << 20
# Media by name; each has ``run(bench, entry_bytes, count)``, see bench/tiers/store_load.py.
MEDIA = {
    "disk": disk.run,
    "redis": remote.run_redis,
    "objects": remote.run_objects,
    "lmcache": lmcache.run,
    "handover": handover.run,
}


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run every medium with batches of equal bytes, divided into entries of three sizes."""
    total = bench.pick(128 * MIB, 256 * KIB, 64 * MIB)
    for name, medium in MEDIA.items():
        for entry_bytes in bench.pick((256 * KIB, MIB, 4 * MIB), (64 * KIB,)):
            with bench.case(f"{name}, {entry_bytes} bytes"):
                medium(bench, entry_bytes, total // entry_bytes)
