"""Recording of the cache calls of a replay: rows added, extended and removed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagecore import PagedKVCache
from pagecore.serving import Request, Scheduler
from pagecore.serving.replay.attend import SPEC, placeholder_ids
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.trace import read_trace, scan_trace


@dataclass(frozen=True, slots=True)
class Event:
    """One row added or removed, or several rows extended by `counts` tokens each."""

    kind: Literal["add", "extend", "remove"]
    rows: NDArray[np.int32]
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(slots=True)
class Log:
    """The events in order, and the cache sizes that they need."""

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
    """A cache that records its calls."""

    log: Log

    def add_sequence(self, tokens: Any, id: object = None, **options: Any) -> Any:
        sequence = super().add_sequence(tokens, id, **options)
        self.log.events.append(Event("add", np.array([sequence.row], np.int32)))
        return sequence

    def remove(self, sequence: Any, *, rank: float | None = None) -> None:
        self.log.events.append(Event("remove", np.array([sequence.row], np.int32)))
        super().remove(sequence, rank=rank)

    def try_prepare(self, sequences: Any, counts: Any, out: Any = None, **options: Any) -> Any:
        batch = super().try_prepare(sequences, counts, out, **options)
        if batch is not None:
            rows = np.array([sequence.row for sequence in sequences], np.int32)
            self.log.events.append(Event("extend", rows, np.array(counts, np.int32)))
        return batch


def record(trace: Path, requests: int, options: ReplayOptions) -> Log:
    """Serve the first requests of a trace like `pagecore replay`, and record the calls of the cache."""
    summary = scan_trace(trace, requests)
    assert summary is not None, "the trace is a pipe; use a file, which can be read twice"
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
        prefix_cache=False,  # the log's tables share nothing, because the control's cannot
    )
    cache.log = log
    scheduler = Scheduler(cache, max_running=rows, max_tokens_per_step=log.max_tokens_per_step)
    for line in read_trace(trace, requests):
        if line.input_length + line.output_length <= scheduler.max_length:
            scheduler.add(Request(line.number, line.prompt(), line.output_length))
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        scheduler.accept(step, placeholder_ids([run.request for run in step.outputs]))
    return log
