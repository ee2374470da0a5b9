"""A chat service's trace through scheduler and index: steps a second, and the index's share beside NumPy tables.

The trace is --trace, or one made on the spot. The whole replay is timed a few times as it is; then what the cache was
told in it (rows added, extended, removed) is told again to BlockTables alone and to the control.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.controls import NumpyPool, NumpyTables
from bench.recording import Event, Log, record
from bench.runner import Bench, Job
from bench.synthetic_trace import write_trace
from pagecore import BlockPool, BlockTables
from pagecore.serving.replay import ReplayReport, replay
from pagecore.serving.replay.options import ReplayOptions

MEMORY = "64GiB"


def run(bench: Bench, options: argparse.Namespace) -> None:
    """The replay, then its log."""
    requests = options.requests or bench.pick(2000, 20)
    with _trace(bench, options.trace, requests) as path:
        settings = ReplayOptions(memory=MEMORY, requests=requests)
        _whole(bench, [replay(path, settings) for _ in range(bench.pick(3, 1))])
        # A quarter of the requests: the control is slow, and more of them show the same.
        log = record(path, max(1, requests // 4), settings)
    _log(bench, log)


@contextmanager
def _trace(bench: Bench, given: Path | None, requests: int) -> Iterator[Path]:
    if given is not None:
        bench.fact("trace", given.name)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.jsonl"
        write_trace(path, requests, bench.pick(1.0, 0.05))
        bench.fact("trace", "synthetic, made on the spot")
        yield path


def _whole(bench: Bench, reports: list[ReplayReport]) -> None:
    """What the replays were like; they are equal in everything but time."""
    report = reports[0]
    bench.fact("steps a second", [report.steps / report.wall_s for report in reports])
    bench.fact("index, median of the steps", [report.index_us_p50 for report in reports], "us")
    bench.fact("index, 99th percentile", [report.index_us_p99 for report in reports], "us")
    bench.fact("requests", report.requests_finished)
    bench.fact("steps", report.steps)
    bench.fact("tokens computed", report.computed_tokens)
    bench.fact("preemptions", report.preemptions)
    bench.fact("blocks of the pool", report.num_blocks)
    bench.fact("blocks in use, mean share", report.utilization_mean)
    bench.fact("slots wasted in held blocks, mean share", report.fragmentation_mean)


def _log(bench: Bench, log: Log) -> None:
    """The log of the first requests, told to the two kinds of tables."""
    if not log.num_steps:
        bench.note("no request fits the pool: there is no log to tell")
        return
    ours, theirs = _Ours(log), _NumPy(log)
    bench.fact("memory of the index: tables and pool", (ours.tables.nbytes + ours.pool.nbytes) / 2**20, "MiB")

    def check() -> None:
        """Every slot of every step, while both pools hand out in the order in which they were made."""
        for event in log.events:
            np.testing.assert_array_equal(ours.tell(event), theirs.tell(event))

    bench.compare(
        f"the index alone, {log.num_steps} steps",
        Job(partial(_tell_all, ours, log)),
        {"NumPy tables": Job(partial(_tell_all, theirs, log))},
        check=check,
        per=log.num_steps,
        each="step",
        sizes={"steps": log.num_steps, "tokens": log.num_tokens, "rows": log.max_sequences}
        | {"num_blocks": log.num_blocks, "block_size": log.block_size},
    )


def _tell_all(tables: _Ours | _NumPy, log: Log) -> None:
    for event in log.events:
        tables.tell(event)


class _Ours:
    """BlockTables that are told the log."""

    def __init__(self, log: Log) -> None:
        self.pool = BlockPool(log.num_blocks)
        self.tables = BlockTables(
            self.pool,
            block_sizes=log.block_size,
            max_sequences=log.max_sequences,
            max_blocks_per_sequence=-(-log.max_tokens_per_sequence // log.block_size),
        )
        self.slots = np.empty(log.max_tokens_per_step, np.int64)

    def tell(self, event: Event) -> object:
        if event.kind == "extend":
            return self.tables.extend(event.rows, event.counts, out=self.slots)
        if event.kind == "remove":
            return self.tables.remove(event.rows)
        row = self.tables.add()
        assert row == event.rows[0], "rows are handed out as they were when the log was written"
        return None


class _NumPy:
    """NumPy tables that are told the log."""

    def __init__(self, log: Log) -> None:
        columns = -(-log.max_tokens_per_sequence // log.block_size) + 1
        self.tables = NumpyTables(NumpyPool(log.num_blocks), log.block_size, log.max_sequences + 1, columns)
        self.slots = np.empty(log.max_tokens_per_step, np.int64)

    def tell(self, event: Event) -> object:
        if event.kind == "extend":
            return self.tables.extend(event.rows, event.counts, self.slots)
        if event.kind == "remove":
            self.tables.remove(int(event.rows[0]))
        return None
