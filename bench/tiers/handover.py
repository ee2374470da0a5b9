"""Hand-over: MB/s of each transport between two caches of this process, against memcpy of the same bytes.

A medium of the bench "tiers". The exporter and the importer have a transport each. A figure is one whole import: claim,
bytes, sums of both sides, and commit. NIXL and Mooncake are left out where they are not installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from bench.harness.runner import Bench, Job
from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache.parts import parts_of
from pagecore.errors import PagecoreError
from pagecore.tiers.handover.exports import export_sequence
from pagecore.tiers.handover.imports import import_sequence
from pagecore.tiers.handover.manifest import Manifest
from pagecore.tiers.handover.transports.mooncake import MooncakeTransport
from pagecore.tiers.handover.transports.nixl import NixlTransport
from pagecore.tiers.handover.transports.sockets import SocketTransport

KIB = 1 << 10
BLOCK, DIM, LAYERS = 16, 128, 8
Pair = tuple[SocketTransport, SocketTransport]


def run(bench: Bench, entry_bytes: int, count: int) -> None:
    """Run imports of `count` blocks of `entry_bytes` through each transport."""
    for name in ("TCP", "Unix socket", "NIXL", "Mooncake"):
        with ExitStack() as stack, bench.case(name):
            try:
                pair = stack.enter_context(_pair(name))
            except PagecoreError as missing:
                bench.note(f"{name} is left out: {missing}")
                continue
            _Imports(pair, entry_bytes, count).measure(bench, name)


@contextmanager
def _pair(name: str) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder:
        made = {"NIXL": NixlTransport, "Mooncake": MooncakeTransport}.get(name, SocketTransport)
        address = f"unix://{folder}/socket" if name == "Unix socket" else "tcp://127.0.0.1:0"
        with made(address) as exporter, made() as importer:
            yield exporter, importer


class _Imports:
    """An exported sequence of `count` blocks of `size` bytes each, and the cache that imports it."""

    def __init__(self, pair: Pair, size: int, count: int) -> None:
        self.exporter, self.importer = pair
        self.size, self.count = size, count
        heads = size // (LAYERS * 2 * BLOCK * DIM * 2)
        spec = AttentionSpec(heads, DIM, dtype="bfloat16")
        self.caches = [
            PagedKVCache(
                spec, num_layers=LAYERS, block_size=BLOCK, num_blocks=count + 9, prefix_cache=False, layout="blockwise"
            )
            for _ in range(2)
        ]
        for cache in self.caches:  # touched and filled before anything is timed
            for buffer in parts_of(cache).store.pools[0].buffers:
                buffer.numpy()[:] = 1
        sender = self.caches[0]
        self.sequence = sender.add_sequence(range(count * BLOCK))
        sender.commit(sender.prepare([self.sequence], count * BLOCK))
        self.copied = [np.ones(count * size, np.uint8) for _ in range(2)]
        self.manifest: Manifest | None = None

    def export(self) -> None:
        self.manifest = export_sequence(self.caches[0], self.sequence, transport=self.exporter)

    def once(self) -> None:
        assert self.manifest is not None
        arrived = import_sequence(self.caches[1], self.manifest, transport=self.importer)
        self.caches[1].remove(arrived)

    def check(self) -> None:
        planes = [cache.key(0).numpy() for cache in self.caches]
        rows = np.arange(self.count, dtype=np.float32).reshape(-1, 1, 1, 1)
        row = parts_of(self.caches[0]).tables.blocks(self.sequence.row, 0)
        planes[0][row] = rows
        self.export()
        assert self.manifest is not None
        with import_sequence(self.caches[1], self.manifest, transport=self.importer) as arrived:
            other = parts_of(self.caches[1]).tables.blocks(arrived.row, 0)
            assert (planes[0][row] == planes[1][other]).all(), "the bytes that arrived differ"

    def measure(self, bench: Bench, name: str) -> None:
        source, target = self.copied
        bench.compare(
            f"{name}, {self.count} blocks of {self.size // KIB} KiB",
            Job(self.once, before=self.export),
            {"memcpy": Job(partial(np.copyto, target, source))},
            check=self.check,
            nbytes=self.count * self.size,
            sizes={"transport": name, "unit_bytes": self.size, "units": self.count},
        )
