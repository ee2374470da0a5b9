"""What a replay tells its cache, written down: rows that come, grow and go."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagecore import PagedKVCache
from pagecore.serving.replay.attend import SPEC
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.replayer import placeholder_ids
from pagecore.serving.replay.trace import read_trace, scan_trace
from pagecore.serving.request import Request
from pagecore.serving.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Event:
    """Rows that are added or removed (one), or extended by `counts` tokens each."""

    kind: Literal["add", "extend", "remove"]
    rows: NDArray[np.int32]
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(slots=True)
class Log:
    """The events in their order, and the sizes that a cache needs for them."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_tokens_per_sequence: int
    max_tokens_per_step: int
    events: list[Event] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return sum(event.kind == "extend" for event in self.events)

    @property
    def num_tokens(self) -> int:
        return sum(int(event.counts.sum()) for event in self.events)


class _RecordedCache(PagedKVCache):
    """A cache that notes what it did."""

    log: Log

    def add_sequence(self, tokens: Any, id: object = None, **options: Any) -> Any:
        sequence = super().add_sequence(tokens, id, **options)
        self.log.events.append(Event("add", np.array([sequence.row], np.int32)))
        return sequence

    def remove(self, sequence: Any) -> None:
        self.log.events.append(Event("remove", np.array([sequence.row], np.int32)))
        super().remove(sequence)

    def try_prepare(self, sequences: Any, counts: Any, out: Any = None) -> Any:
        batch = super().try_prepare(sequences, counts, out)
        if batch is not None:
            rows = np.array([sequence.row for sequence in sequences], np.int32)
            self.log.events.append(Event("extend", rows, np.array(counts, np.int32)))
        return batch


def record(trace: Path, requests: int, options: ReplayOptions) -> Log:
    """Serve the first requests of a trace as `pagecore replay` does, and write down what the cache is told."""
    summary = scan_trace(trace, requests)
    assert summary is not None, "a trace that is a pipe was already read"
    length = min(summary.max_length, (options.num_blocks - 1) * options.block_size)
    rows = min(options.max_running, summary.num_requests)
    log = Log(options.num_blocks, options.block_size, rows, length, options.max_tokens_per_step)
    cache = _RecordedCache(
        SPEC,
        block_size=log.block_size,
        num_blocks=log.num_blocks,
        max_sequences=rows,
        max_tokens_per_sequence=length,
        device="none",
        prefix_cache=False,  # the log's tables share nothing, and the control's cannot
    )
    cache.log = log
    scheduler = Scheduler(cache, max_running=rows, max_tokens_per_step=log.max_tokens_per_step)
    for line in read_trace(trace, requests):
        if line.input_length + line.output_length <= scheduler.max_length:
            scheduler.add(Request(line.number, line.prompt(), line.output_length))
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        scheduler.accept(step, placeholder_ids(step.outputs))
    return log
