"""Replay of a chat trace through scheduler and index: steps a second, and the index's share, against NumPy tables.

The trace is --trace, or a synthetic one. The whole replay is timed a few times. Then its cache calls (rows added,
extended, removed) are repeated on BlockTables alone and on the control.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.runner import Bench, Job
from bench.index.controls import NumpyPool, NumpyTables
from bench.serving.recording import Event, Log, record
from bench.serving.synthetic_trace import write_trace
from pagecore import BlockPool, BlockTables
from pagecore.serving.replay import ReplayReport, replay
from pagecore.serving.replay.options import ReplayOptions

MEMORY = "64GiB"


def run(bench: Bench, options: argparse.Namespace) -> None:
    """Run the replay, then its log."""
    requests = options.requests or bench.pick(2000, 20)
    with _trace(bench, options.trace, requests) as path:
        settings = ReplayOptions(memory=MEMORY, requests=requests)
        _whole(bench, [replay(path, settings) for _ in range(bench.pick(3, 1))])
        # A quarter of the requests, because the control is slow and more requests show the same.
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
        bench.fact("trace", "synthetic")
        yield path


def _whole(bench: Bench, reports: list[ReplayReport]) -> None:
    """Report the replays, which differ only in time."""
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
    """Compare both kinds of tables on the log of the first requests."""
    if not log.num_steps:
        bench.note("no request fits the pool, so the log is empty; its figure is left out")
        return
    ours, theirs = _Ours(log), _NumPy(log)
    bench.fact("memory of the index: tables and pool", (ours.tables.nbytes + ours.pool.nbytes) / 2**20, "MiB")

    def check() -> None:
        """Compare every slot of every step."""
        for event in log.events:
            np.testing.assert_array_equal(ours.apply(event), theirs.apply(event))

    bench.compare(
        f"the index alone, {log.num_steps} steps",
        Job(partial(_apply_all, ours, log)),
        {"NumPy tables": Job(partial(_apply_all, theirs, log))},
        check=check,
        per=log.num_steps,
        each="step",
        sizes={"steps": log.num_steps, "tokens": log.num_tokens, "rows": log.max_sequences}
        | {"num_blocks": log.num_blocks, "block_size": log.block_size},
    )


def _apply_all(tables: _Ours | _NumPy, log: Log) -> None:
    for event in log.events:
        tables.apply(event)


class _Ours:
    """BlockTables that replay the log."""

    def __init__(self, log: Log) -> None:
        self.pool = BlockPool(log.num_blocks)
        self.tables = BlockTables(
            self.pool,
            block_sizes=log.block_size,
            max_sequences=log.max_sequences,
            max_blocks_per_sequence=-(-log.max_tokens_per_sequence // log.block_size),
        )
        self.slots = np.empty(log.max_tokens_per_step, np.int64)

    def apply(self, event: Event) -> object:
        if event.kind == "extend":
            return self.tables.extend(event.rows, event.counts, out=self.slots)
        if event.kind == "remove":
            self.tables.remove(event.rows)
            return None
        row = self.tables.add()
        assert row == event.rows[0], "rows must be allocated in the order of the log"
        return None


class _NumPy:
    """NumPy tables that replay the log."""

    def __init__(self, log: Log) -> None:
        columns = -(-log.max_tokens_per_sequence // log.block_size) + 1
        self.tables = NumpyTables(NumpyPool(log.num_blocks), log.block_size, log.max_sequences + 1, columns)
        self.slots = np.empty(log.max_tokens_per_step, np.int64)

    def apply(self, event: Event) -> object:
        if event.kind == "extend":
            return self.tables.extend(event.rows, event.counts, self.slots)
        if event.kind == "remove":
            self.tables.remove(int(event.rows[0]))
        return None
