"""Replay: served requests, report, and detection of wrong attention."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.serving.replay import attend, replay
from pagecore.serving.replay.attend import AttendCheck, TokenVectors
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.trace import TraceError, TraceRequest
from pagecore.serving.tables import human_bytes, replay_rows, sparkline
from tests.models.published import PUBLISHED
from tests.together import together


def write_trace(path, lengths):
    with path.open("w") as file:
        for number, (inputs, outputs) in enumerate(lengths):
            ids = list(range(number * 50, number * 50 + -(-inputs // 512)))
            line = {"timestamp": number * 10, "input_length": inputs, "output_length": outputs, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return path


@pytest.fixture
def lengths():
    random = np.random.default_rng(7)
    return [(int(inputs), int(outputs)) for inputs, outputs in random.integers([1, 0], [1500, 60], (40, 2))]


@pytest.fixture
def trace(tmp_path, lengths):
    return write_trace(tmp_path / "trace.jsonl", lengths)


def test_all_requests_finish_and_are_counted_exactly(trace, lengths):
    report = replay(trace, ReplayOptions(blocks=1000, max_tokens_per_step=512))
    assert (report.requests_total, report.requests_finished, report.requests_refused) == (40, 40, 0)
    assert report.prompt_tokens == sum(inputs for inputs, _ in lengths)
    assert report.generated_tokens == sum(outputs for _, outputs in lengths)
    assert report.preemptions == 0
    assert report.computed_tokens == sum(inputs + max(outputs - 1, 0) for inputs, outputs in lengths)
    assert report.steps >= report.computed_tokens / 512
    assert 0 < report.utilization_mean <= report.utilization_peak <= 1
    assert 0 < report.index_us_p50 <= report.index_us_p99 <= report.index_us_max


def test_a_replay_without_options_is_that_of_the_default_options(trace):
    report, same = replay(trace), replay(trace, ReplayOptions())
    assert (report.num_blocks, report.prefix_hit_tokens) == (same.num_blocks, same.prefix_hit_tokens)


def test_a_small_pool_preempts_and_still_finishes_all_requests(trace, lengths):
    report = replay(trace, ReplayOptions(blocks=130, max_tokens_per_step=512))
    assert report.requests_finished == 40
    assert report.generated_tokens == sum(outputs for _, outputs in lengths)
    assert report.preemptions > 0
    assert report.utilization_peak > 0.9
    assert report.computed_tokens > sum(inputs + max(outputs - 1, 0) for inputs, outputs in lengths)


def test_requests_that_can_never_fit_are_refused(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl", [(100, 5), (161, 1), (150, 11), (150, 12), (3, 1)])
    report = replay(trace, ReplayOptions(blocks=11))
    assert (report.requests_total, report.requests_finished, report.requests_refused) == (5, 3, 2)
    assert report.first_refusal.startswith("line 2: ")
    assert report.prompt_tokens == 253


def test_memory_and_blocks_make_the_same_pool(trace):
    by_blocks = replay(trace, ReplayOptions(blocks=200))
    by_memory = replay(trace, ReplayOptions(memory=200 * 16 * 1000 + 999, bytes_per_token=1000))
    assert by_blocks.num_blocks == by_memory.num_blocks == 200
    assert by_blocks.utilization_series == by_memory.utilization_series


def test_only_the_first_requests_are_replayed(trace):
    assert replay(trace, ReplayOptions(requests=3)).requests_total == 3


def test_a_malformed_line_is_refused_before_the_first_step(trace):
    with trace.open("a") as file:
        file.write("{}\n")
    with pytest.raises(TraceError, match="line 41: field 'timestamp' is missing"):
        replay(trace, ReplayOptions(), lambda done, total: pytest.fail("a step was made"))


def test_the_standard_input_is_replayed_while_it_is_read(trace, monkeypatch):
    totals = set()
    with trace.open("rb") as file:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=file))
        report = replay("-", ReplayOptions(blocks=1000), lambda done, total: totals.add(total))
    assert report.requests_finished == 40
    assert totals == {None}


def test_the_prompt_of_a_refused_request_is_never_made(trace, monkeypatch):
    made = []
    prompt = TraceRequest.prompt
    monkeypatch.setattr(TraceRequest, "prompt", lambda self: made.append(self.input_length) or prompt(self))
    report = replay(trace, ReplayOptions(blocks=40))
    assert 0 < report.requests_refused < 40
    assert len(made) == 40 - report.requests_refused


def test_the_queue_holds_the_tokens_of_about_one_step(trace):
    """Requests are read from the file shortly before they are admitted."""
    import pagecore.serving.replay.build as module

    waiting = []
    original = module.Scheduler.schedule

    def watched(self):
        waiting.append(self.num_waiting_tokens)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Scheduler, "schedule", watched)
        replay(trace, ReplayOptions(blocks=200, max_tokens_per_step=64))
    assert max(waiting) <= 64 + 1500 * 2


@pytest.mark.slow
def test_attention_is_right_through_preemptions(trace):
    report = replay(trace, ReplayOptions(blocks=100, max_tokens_per_step=256, attend=True, requests=20))
    assert report.requests_finished == 20
    assert report.preemptions > 0
    assert report.rows_checked > 100
    assert report.rows_attended > report.rows_checked
    assert report.max_relative_error < 1e-5
    assert report.passed


@pytest.fixture
def talkative(tmp_path):
    """Write a trace with long answers, which a small pool preempts; return it and the number of tokens to compute."""
    lengths = np.random.default_rng(7).integers([1, 50], [150, 160], (20, 2)).tolist()
    return write_trace(tmp_path / "talk.jsonl", lengths), sum(inputs + outputs - 1 for inputs, outputs in lengths)


# The swap space has room for all preempted runs, for some of them, and for almost none.
@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "least", "most"), [(60, 1.0, 1.0), (15, 0.2, 0.9), (2, 0.0, 0.2)])
def test_attention_is_right_through_swaps(talkative, blocks, least, most):
    trace, tokens = talkative
    options = ReplayOptions(
        blocks=60, bytes_per_token=10, swap_memory=blocks * 160, max_tokens_per_step=256, attend=True
    )
    report = replay(trace, options)
    assert (report.requests_finished, report.num_swap_blocks) == (20, blocks)
    assert report.preemptions > 10
    assert least <= report.swaps / report.preemptions <= most
    assert report.swapped_blocks_peak <= blocks - 1
    assert (report.computed_tokens == tokens) == (report.swaps == report.preemptions)
    assert report.rows_checked > 100
    assert report.max_relative_error < 1e-5
    assert report.passed
    rows = dict(replay_rows(report))
    assert rows["swap space"] == f"{blocks - 1} blocks, at most {report.swapped_blocks_peak} of them in use"
    assert rows["preemptions"].startswith(f"{report.preemptions}")


@pytest.mark.slow
def test_a_wrong_swap_does_not_pass(talkative, monkeypatch):
    swap_in = PagedKVCache.swap_in

    def spoilt(self, sequences):
        swap_in(self, sequences)
        first = self.make_batch().group(0).block_table.numpy()[sequences[0].row, 0]
        self.key(0).numpy()[first] = 0

    monkeypatch.setattr(PagedKVCache, "swap_in", spoilt)
    assert not replay(talkative[0], ReplayOptions(blocks=60, swap_memory="1GiB", attend=True)).passed


@pytest.mark.parametrize("fault", ["zeros", "nan", "one key late"])
def test_wrong_attention_does_not_pass(trace, monkeypatch, fault):
    right = attend.paged_attention

    def wrong(query, key, value, table, seq_lens, *, rows):
        if fault == "one key late":
            return right(query, key, value, table, np.maximum(seq_lens - 1, 1), rows=rows)
        return np.full_like(query, {"zeros": 0, "nan": np.nan}[fault])

    monkeypatch.setattr(attend, "paged_attention", wrong)
    report = replay(trace, ReplayOptions(blocks=1000, requests=5, attend=True))
    assert not report.passed
    assert report.max_relative_error > 1e-3


def test_a_lost_write_does_not_pass(trace, monkeypatch):
    run = AttendCheck.run
    written = []

    def sloppy(self, step):
        written.append(step)
        if len(written) == 1:
            # Write zeros: memory that is not written could contain the right numbers from an earlier run.
            write = self.cache.write
            monkeypatch.setattr(self.cache, "write", lambda layer, k, v, batch: write(layer, 0 * k, 0 * v, batch))
        run(self, step)

    monkeypatch.setattr(AttendCheck, "run", sloppy)
    assert not replay(trace, ReplayOptions(blocks=1000, requests=5, attend=True)).passed


def test_vectors_differ_by_request_position_seed_and_name():
    vectors, other = TokenVectors(0), TokenVectors(1)
    requests, positions = (grid.ravel() for grid in np.meshgrid(np.arange(50), np.arange(60)))
    key = vectors.of("key", requests, positions)
    assert key.shape == (3000, 1, 64)
    assert key.dtype == np.float32
    assert len(np.unique(key[:, 0, :2], axis=0)) == 3000
    assert (vectors.of("key", 7, [11, 12])[1] == key[(requests == 7) & (positions == 12)][0]).all()
    assert vectors.of("query", [7], [11]).shape == (1, 4, 64)
    assert not np.allclose(key, vectors.of("value", requests, positions))
    assert not np.allclose(key, other.of("key", requests, positions))
    assert abs(key.mean()) < 0.02
    assert abs(key.std() - 1) < 0.05


@together(
    ("options", "error"),
    [
        ({"memory": "1GiB", "blocks": 5}, UnsupportedOption),
        ({"policy": "priority"}, UnsupportedOption),
        ({"memory": 16 * 131072 * 2 - 1}, NotEnoughMemory),
        ({"memory": "lots"}, ShapeError),
        ({"swap_memory": "lots"}, ShapeError),
        ({"swap_memory": 16 * 131072 * 2 - 1}, NotEnoughMemory),
        ({"swap_memory": 0}, NotEnoughMemory),
        ({"swap_memory": -1}, ShapeError),
        ({"swap_memory": "1000PiB", "bytes_per_token": 1}, ShapeError),
        ({"memory": "1000PiB", "bytes_per_token": 1}, ShapeError),
        ({"blocks": 1}, ShapeError),
        ({"blocks": -3}, ShapeError),
        ({"blocks": 2**31}, ShapeError),
        ({"block_size": 0}, ShapeError),
        ({"bytes_per_token": 0}, ShapeError),
        ({"max_running": 0}, ShapeError),
        ({"max_tokens_per_step": -1}, ShapeError),
        ({"requests": 0}, ShapeError),
        ({"seed": -1}, ShapeError),
        ({"max_running": 2**40}, ShapeError),
    ],
)
def test_invalid_options_are_refused(options, error):
    with pytest.raises(error):
        ReplayOptions(**options)


def test_a_pool_larger_than_free_memory_is_refused_before_it_is_made(trace, monkeypatch):
    monkeypatch.setattr("pagecore.serving.replay.build.free_memory", lambda: 10_000)
    with pytest.raises(NotEnoughMemory, match="attend needs a pool of 8192000 bytes"):
        replay(trace, ReplayOptions(blocks=1000, attend=True))
    with pytest.raises(NotEnoughMemory, match="attend needs a pool of 8192000 bytes"):
        replay(trace, ReplayOptions(blocks=900, bytes_per_token=1, swap_memory=1600, attend=True))


def test_a_report_is_available_as_json_and_as_a_table(trace):
    report = replay(trace, ReplayOptions(blocks=1000, requests=3))
    assert json.loads(json.dumps(report.as_json()))["requests_finished"] == 3
    assert "max_relative_error" not in report.as_json()
    rows = dict(replay_rows(report))
    assert rows["requests finished"] == "3 of 3"
    assert rows["computed"] == f"{report.computed_tokens:,} tokens"
    rate = report.computed_tokens / report.wall_s
    assert rows["wall time"] == f"{report.wall_s:.1f} s, {rate:,.0f} computed tokens per second of it"


def test_a_sparkline_is_at_most_as_long_as_requested():
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.5] * 1000, width=40)) == 40


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")])
def test_bytes_are_formatted_with_a_unit(count, text):
    assert human_bytes(count) == text


def test_the_memory_of_a_model_is_divided_as_a_cache_divides_it():
    model = PUBLISHED["gemma-2-9b"]
    options = ReplayOptions(model=model, memory="2GiB")
    cache = PagedKVCache(specs_from_config(model), memory="2GiB", device="none")
    assert tuple(options.group_blocks) == cache.num_blocks
    assert options.num_blocks == max(cache.num_blocks) > min(cache.num_blocks)
    assert ReplayOptions(model=model, blocks=77).group_blocks == [77, 77]
