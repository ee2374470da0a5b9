"""Clock of a replay: requests arrive by their timestamps, and steps take the time of a modelled machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagecore.serving.metrics import Histogram
from pagecore.serving.replay.trace import TraceRequest
from pagecore.serving.scheduling.request import Run
from pagecore.serving.scheduling.step import Step

__all__ = ["ClockReport", "ReplayClock"]

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReport:
    """Times of a replay with a clock, in seconds of the modelled machine.

    `duration_s` is the time from the first arrival to the end of the last step, of which `idle_s` passed without a
    request, and `reading_s` with reads of tiers. `first_token_s` is the time from the arrival of a request to the end
    of the step that generates its first token, or completes a prompt that generates none. `next_token_s` is the mean
    time of each further token of a request. Both have the keys "mean", "p50", "p90", "p99" and "max"; percentiles are
    off by less than 1%.
    """

    duration_s: float
    idle_s: float
    reading_s: float
    first_token_s: dict[str, float]
    next_token_s: dict[str, float]


class _Times:
    """Statistics of durations, in bounded memory."""

    def __init__(self) -> None:
        self._microseconds = Histogram()
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._microseconds.add(round(seconds * MICROSECONDS))
        self._sum += seconds

    def summary(self) -> dict[str, float]:
        counted = self._microseconds
        found = {"mean": self._sum / max(counted.count, 1)}
        found |= {f"p{percent}": counted.percentile(percent) / MICROSECONDS for percent in (50, 90, 99)}
        return found | {"max": counted.maximum / MICROSECONDS}


class ReplayClock:
    """The time of a modelled machine, which begins with the first arrival.

    Parameters
    ----------
    prefill_rate : float
        Tokens that the machine computes in a second.
    step_s : float
        Seconds that a step takes in addition.
    """

    def __init__(self, prefill_rate: float, step_s: float) -> None:
        self._rate, self._step_s = prefill_rate, step_s
        self._now = self._idle = self._reading = 0.0
        self._origin_ms: float | None = None
        # Of the requests that have not finished: arrival, and end of the step of the first token.
        self._arrivals: dict[object, float] = {}
        self._first: dict[object, float] = {}
        self._to_first, self._between = _Times(), _Times()

    def has_arrived(self, line: TraceRequest) -> bool:
        """Return True if a request has arrived; the first one of a trace always has."""
        return self._arrival(line) <= self._now

    def wait_for(self, line: TraceRequest) -> None:
        """Pass the time until a request arrives."""
        arrival = self._arrival(line)
        self._idle += max(arrival - self._now, 0.0)
        self._now = max(arrival, self._now)

    @property
    def now_s(self) -> float:
        """Seconds since the first arrival."""
        return self._now

    def queue(self, line: TraceRequest, *, number: int | None = None, earliest_s: float = 0.0) -> None:
        """Note the arrival of a request that the scheduler takes, or of a turn.

        A turn has the number of the first request of its conversation, and arrives at `earliest_s`, the end of the turn
        before it, if that is later than its timestamp.
        """
        self._arrivals[line.number if number is None else number] = max(self._arrival(line), earliest_s)

    def run(self, step: Step, reading_s: float) -> None:
        """Pass the time of a step, which begins after reads of `reading_s` seconds; its tokens are not accepted yet."""
        self._reading += reading_s
        self._now += reading_s + self._step_s + step.batch.num_tokens / self._rate
        for run in (*step.outputs, *step.unsampled):
            number = run.request.id
            if number not in self._first:
                self._first[number] = self._now
                self._to_first.add(self._now - self._arrivals[number])

    def finish(self, runs: Iterable[Run]) -> None:
        """Note that requests have generated their last token in the step that ran."""
        for run in runs:
            del self._arrivals[run.request.id]
            first = self._first.pop(run.request.id)
            if run.num_generated > 1:
                self._between.add((self._now - first) / (run.num_generated - 1))

    def report(self) -> ClockReport:
        """Return the times so far."""
        return ClockReport(
            duration_s=self._now,
            idle_s=self._idle,
            reading_s=self._reading,
            first_token_s=self._to_first.summary(),
            next_token_s=self._between.summary(),
        )

    def _arrival(self, line: TraceRequest) -> float:
        if self._origin_ms is None:
            self._origin_ms = line.timestamp_ms
        return (line.timestamp_ms - self._origin_ms) / 1000
