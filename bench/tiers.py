"""Stores of blocks: puts and gets of 256 KiB, 1 MiB and 4 MiB against raw I/O, a file copy and a copy in memory."""

from __future__ import annotations

import argparse

from bench import tiers_disk, tiers_handover, tiers_lmcache, tiers_remote
from bench.runner import Bench

KIB, MIB = 1 << 10, 1 << 20
# Media by name; each has ``run(bench, entry_bytes, count)``, see bench/store_load.py.
MEDIA = {
    "disk": tiers_disk.run,
    "redis": tiers_remote.run_redis,
    "objects": tiers_remote.run_objects,
    "lmcache": tiers_lmcache.run,
    "handover": tiers_handover.run,
}


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run every medium with batches of equal bytes, divided into entries of three sizes."""
    total = bench.pick(128 * MIB, 256 * KIB, 64 * MIB)
    for name, medium in MEDIA.items():
        for entry_bytes in bench.pick((256 * KIB, MIB, 4 * MIB), (64 * KIB,)):
            with bench.case(f"{name}, {entry_bytes} bytes"):
                medium(bench, entry_bytes, total // entry_bytes)
