"""Hand-over: MB/s of each transport between two caches of this process, against memcpy of the same bytes.

The exporter and the importer have a transport each. A figure is one whole import of eight units of 256 KiB, 1 MiB or 4
MiB: claim, bytes, sums of both sides, and commit. NIXL and Mooncake are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from bench.runner import Bench, Job
from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.errors import PagecoreError
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.mooncake import MooncakeTransport
from pagecore.tiers.handover.nixl import NixlTransport
from pagecore.tiers.handover.sockets import SocketTransport

KIB = 1024
BLOCK, DIM = 16, 128
# Units of one import; with 4 MiB the pools of both caches have 136 MiB in all.
UNITS = 8
SIZES = (256 * KIB, 1024 * KIB, 4096 * KIB)
Pair = tuple[SocketTransport, SocketTransport]


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Run imports of three sizes through each transport."""
    for name in ("TCP", "Unix socket", "NIXL", "Mooncake"):
        with ExitStack() as stack, bench.case(name):
            try:
                pair = stack.enter_context(_pair(name))
            except PagecoreError as missing:
                bench.note(f"{name} is left out: {missing}")
                continue
            for size in bench.pick(SIZES, SIZES[:1]):
                with _Imports(pair, size) as imports:
                    imports.measure(bench, name)


@contextmanager
def _pair(name: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        made = {"NIXL": NixlTransport, "Mooncake": MooncakeTransport}.get(name, SocketTransport)
        address = f"unix://{folder}/socket" if name == "Unix socket" else "tcp://127.0.0.1:0"
        with made(address) as exporter, made() as importer:
            yield exporter, importer


class _Imports:
    """An exported sequence of a few blocks of `size` bytes each, and the cache that imports it."""

    def __init__(self, pair: Pair, size: int) -> None:
        self.exporter, self.importer = pair
        self.size = size
        layers = 8
        heads = size // (layers * 2 * BLOCK * DIM * 2)
        spec = AttentionSpec(heads, DIM, dtype="bfloat16")
        self.caches = [
            PagedKVCache(
                spec, num_layers=layers, block_size=BLOCK, num_blocks=UNITS + 9, prefix_cache=False, layout="blockwise"
            )
            for _ in range(2)
        ]
        for cache in self.caches:  # touched and filled before anything is timed
            for buffer in parts_of(cache).store.pools[0].buffers:
                buffer.numpy()[:] = 1
        sender = self.caches[0]
        self.sequence = sender.add_sequence(range(UNITS * BLOCK))
        sender.commit(sender.prepare([self.sequence], UNITS * BLOCK))
        self.copied = [np.ones(UNITS * size, np.uint8) for _ in range(2)]
        self.manifest: Manifest | None = None

    def __enter__(self) -> _Imports:
        return self

    def __exit__(self, *_: object) -> None:
        self.exporter.drain(5)

    def export(self) -> None:
        self.manifest = export_sequence(self.caches[0], self.sequence, transport=self.exporter)

    def once(self) -> None:
        assert self.manifest is not None
        arrived = import_sequence(self.caches[1], self.manifest, transport=self.importer)
        self.caches[1].remove(arrived)

    def check(self) -> None:
        planes = [cache.key(0).numpy() for cache in self.caches]
        row = parts_of(self.caches[0]).tables.blocks(self.sequence.row, 0)
        planes[0][row] = np.arange(UNITS, dtype=np.float32).reshape(-1, 1, 1, 1)
        self.export()
        assert self.manifest is not None
        with import_sequence(self.caches[1], self.manifest, transport=self.importer) as arrived:
            other = parts_of(self.caches[1]).tables.blocks(arrived.row, 0)
            assert (planes[0][row] == planes[1][other]).all(), "the bytes that arrived differ"

    def measure(self, bench: Bench, name: str) -> None:
        source, target = self.copied
        bench.compare(
            f"{name}, {UNITS} units of {self.size // KIB} KiB",
            Job(self.once, before=self.export),
            {"memcpy": Job(partial(np.copyto, target, source))},
            check=self.check,
            nbytes=UNITS * self.size,
            sizes={"transport": name, "unit_bytes": self.size, "units": UNITS},
        )
