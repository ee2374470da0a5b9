"""Replay with a clock: arrivals and latencies against a plain simulation, and times that are computed by hand."""

import json

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving import Request, Scheduler
from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.replay.trace import read_trace
from pagecore.serving.tables import replay_rows
from tests.together import together

SMALL = {"blocks": 33, "block_size": 256, "prefill_rate": 10_000, "step_ms": 10}


def write(path, requests):
    """Write a trace of (timestamp, input_length, output_length, hash_ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, one, strict=True))) for one in requests))
    return path


def simulate(path, num_blocks, block_size, rate, step_s, max_queued=None):
    """Return arrival and the times of all tokens of each request of a trace, in seconds; a full queue takes none."""
    spec = AttentionSpec(num_kv_heads=1, head_dim=1)
    cache = PagedKVCache(spec, num_blocks=num_blocks, block_size=block_size, device="none")
    scheduler = Scheduler(cache, max_tokens_per_step=8192)
    coming, clock, times = [*read_trace(path)], 0.0, {}
    origin, arrivals = coming[0].timestamp_ms, []
    while coming or scheduler.num_running or scheduler.num_waiting:
        if not (scheduler.num_running or scheduler.num_waiting):
            clock = max(clock, (coming[0].timestamp_ms - origin) / 1000)
        while coming and (coming[0].timestamp_ms - origin) / 1000 <= clock:
            line = coming.pop(0)
            if max_queued is not None and scheduler.num_waiting >= max_queued:
                continue
            arrivals.append((line.timestamp_ms - origin) / 1000)
            times[scheduler.add(Request(line.number, line.prompt(), line.output_length))] = []
        step = scheduler.schedule()
        clock += step_s + step.batch.num_tokens / rate
        scheduler.commit(step)
        for run in (*step.outputs, *step.unsampled):
            times[run].append(clock)
        scheduler.accept(step, np.zeros(len(step.outputs), np.int32))
    return arrivals, [*times.values()], clock


def test_the_times_of_a_small_trace_are_those_computed_by_hand(tmp_path):
    # 1000 tokens take 110 ms; the second request arrives meanwhile and reuses 768; the third arrives when all is done.
    requests = [(700, 1000, 3, [1, 2]), (750, 1000, 3, [1, 2]), (1000, 600, 1, [1, 3])]
    report = replay(write(tmp_path / "t", requests), ReplayOptions(**SMALL))
    clock = report.clock
    first = [0.110, 0.1433 - 0.050, 0.0188]
    assert clock.first_token_s["mean"] == pytest.approx(np.mean(first), abs=2e-4)
    assert clock.first_token_s["max"] == pytest.approx(0.110, abs=1e-6)
    assert clock.first_token_s["p50"] == pytest.approx(first[1], rel=0.01)
    between = [(0.1535 - 0.110) / 2, (0.1637 - 0.1433) / 2]
    assert clock.next_token_s["mean"] == pytest.approx(np.mean(between), abs=2e-4)
    assert clock.duration_s == pytest.approx(0.3188, abs=1e-6)
    assert clock.idle_s == pytest.approx(0.3 - 0.1636, abs=2e-4)
    assert clock.reading_s == 0.0
    rows = dict(replay_rows(report))
    assert rows["modelled time"] == "0.3 s, 0.1 s idle"
    assert rows["first token"].endswith("max 110.0 ms")
    assert report.as_json()["clock"]["first_token_s"].keys() == {"mean", "p50", "p90", "p99", "max"}


@pytest.mark.parametrize(("prefill_only", "max_queued"), [(False, None), (True, None), (False, 1)])
def test_the_times_of_a_random_trace_are_those_of_a_simulation(tmp_path, prefill_only, max_queued):
    random = np.random.default_rng(5)
    now, requests = 40.0, []
    for _ in range(60):
        now += float(random.exponential(60.0)) + (3000.0 if random.random() < 0.05 else 0.0)
        ids = [int(random.integers(3)), *random.integers(0, 9, 2).tolist()]
        outputs = 0 if prefill_only else int(random.integers(0, 9))
        length = int(random.integers(1, 1536))
        requests.append((now, length, outputs, ids[: -(-length // 512)]))
    path = write(tmp_path / "t", requests)
    report = replay(path, ReplayOptions(**SMALL | {"block_size": 16, "blocks": 800}, max_queued=max_queued))
    arrivals, times, end = simulate(path, 800, 16, 10_000, 0.010, max_queued)
    first = [one[0] - arrival for one, arrival in zip(times, arrivals, strict=True)]
    between = [(one[-1] - one[0]) / (len(one) - 1) for one in times if len(one) > 1]
    clock = report.clock
    assert clock.duration_s == pytest.approx(end)
    assert clock.idle_s > 0
    assert clock.first_token_s["mean"] == pytest.approx(np.mean(first))
    assert clock.first_token_s["max"] == pytest.approx(max(first), abs=1e-6)
    assert clock.next_token_s["mean"] == pytest.approx(np.mean(between) if between else 0.0)
    assert (report.requests_finished, report.requests_total) == (len(times), len(requests))
    if max_queued is not None:
        assert report.requests_rejected == len(requests) - len(times) > 3
        assert dict(replay_rows(report))["requests rejected"].startswith(f"{report.requests_rejected}, ")
        return
    plain = replay(path, ReplayOptions(blocks=800))
    assert (report.requests_finished, report.prompt_tokens) == (plain.requests_finished, plain.prompt_tokens)
    assert plain.clock is plain.requests_rejected is None


def test_all_requests_that_have_arrived_are_queued(tmp_path):
    """The second prompt reuses 8 of its 12 tokens, so that its step of 8 tokens has room for the third."""
    requests = [(0, 8, 1, [1, 2]), (1, 12, 1, [1, 2, 3]), (1, 4, 1, [9])]
    small = {"blocks": 33, "block_size": 4, "hash_block": 4, "max_tokens_per_step": 8, "prefill_rate": 1000}
    report = replay(write(tmp_path / "t", requests), ReplayOptions(**small))
    assert (report.steps, report.prefix_hit_tokens, report.clock.duration_s) == (2, 8, 0.016)


def test_reads_of_tiers_delay_their_step(tmp_path):
    requests = [(0, 1000, 0, [1, 2]), (1000, 1000, 0, [3, 4]), (2000, 1000, 0, [1, 2])]
    path = write(tmp_path / "t", requests)
    options = {"blocks": 5, "block_size": 256, "max_running": 1, "prefill_rate": 10_000, "host": "1GiB"}
    fast = replay(path, ReplayOptions(**options))
    slow = replay(path, ReplayOptions(**options, bandwidth={"host": 1}))
    assert fast.tiers.hit_tokens == slow.tiers.hit_tokens == {"GPU": 0, "CPU": 768}
    seconds = 768 * 131072 / 1e9
    assert slow.clock.reading_s == pytest.approx(seconds)
    assert slow.tiers.modelled_s == {"CPU": pytest.approx(seconds)}
    assert slow.clock.duration_s == pytest.approx(fast.clock.duration_s + seconds)
    assert fast.clock.duration_s == pytest.approx(2 + 0.0232)


@together(
    ("options", "error"),
    [
        ({"prefill_rate": 0}, ShapeError),
        ({"prefill_rate": float("nan")}, ShapeError),
        ({"prefill_rate": float("inf")}, ShapeError),
        ({"prefill_rate": 1e-308}, ShapeError),
        ({"prefill_rate": 1, "step_ms": 1e308}, ShapeError),
        ({"prefill_rate": "fast"}, ShapeError),
        ({"prefill_rate": 1, "step_ms": -1}, ShapeError),
        ({"prefill_rate": 1, "step_ms": float("inf")}, ShapeError),
        ({"step_ms": 5}, UnsupportedOption),
        ({"max_queued": 5}, UnsupportedOption),
        ({"prefill_rate": 1, "max_queued": 0}, ShapeError),
    ],
)
def test_impossible_clocks_are_refused(options, error):
    with pytest.raises(error, match=r"prefill_rate|step_ms|max_queued"):
        ReplayOptions(**options)
