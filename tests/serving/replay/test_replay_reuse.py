"""Prefix reuse in a replay, compared with a dictionary of block prefixes, and checked with real attention."""

import json
import os
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.replay import replay
from pagecore.serving.replay.attend import ids_at, placeholder_id
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.trace import HASH_BLOCK, read_trace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.reuse import POLICIES
from pagecore.serving.tables import replay_rows, sparkline
from tests.serving.prefixes import count_hits

pytestmark = pytest.mark.slow

# Path of a recorded trace, such as Mooncake's, to compare with the dictionary.
RECORDED = os.environ.get("PAGECORE_TRACE")


@pytest.fixture
def chats(tmp_path):
    """Write a trace of forty requests, most of which continue an earlier one."""
    random = np.random.default_rng(3)
    known, lines, fresh = [[]], [], 0
    for number in range(40):
        earlier = known[random.integers(len(known))] if random.random() < 0.8 else []
        length = len(earlier) * HASH_BLOCK + int(random.integers(1, 900))
        blocks = -(-length // HASH_BLOCK)
        ids = [*earlier, *range(fresh, fresh + blocks - len(earlier))]
        fresh += blocks
        # The last id may belong to a partial block, which is not shared.
        known.append(ids[: length // HASH_BLOCK])
        output = int(random.integers(0, 40))
        lines.append({"timestamp": number, "input_length": length, "output_length": output, "hash_ids": ids})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def prompts(path):
    return [request.prompt().tolist() for request in read_trace(path)]


def whole_texts(path):
    """Yield each prompt and all computed tokens of its request; the last generated token is not computed."""
    for request in read_trace(path):
        prompt = request.prompt().tolist()
        generated = [placeholder_id(Request(request.number, prompt, 0))] * max(request.output_length - 1, 0)
        yield prompt, prompt + generated


@pytest.mark.parametrize("block_size", [1, 16, 100, 512, 1000])
@pytest.mark.parametrize("budget", [8192, 700])
def test_sequential_prefills_hit_the_blocks_of_a_dictionary_of_prefixes(chats, block_size, budget):
    options = ReplayOptions(
        blocks="unbounded", block_size=block_size, max_running=1, prefill_only=True, max_tokens_per_step=budget
    )
    report = replay(chats, options)
    query, hits = count_hits([(prompt, prompt) for prompt in prompts(chats)], block_size)
    assert (report.prefix_query_blocks, report.prefix_hit_blocks) == (query, hits)
    assert hits > 0
    assert report.prefix_query_tokens == report.prompt_tokens == sum(map(len, prompts(chats)))
    assert report.prefix_hit_tokens == report.saved_prefill_tokens == hits * block_size
    assert report.computed_tokens == report.prompt_tokens - report.prefix_hit_tokens
    assert report.num_blocks == 1 + sum(-(-len(prompt) // block_size) for prompt in prompts(chats))
    assert (report.generated_tokens, report.evicted_blocks, report.preemptions) == (0, 0, 0)
    assert report.prefix_token_hit_rate == report.prefix_hit_tokens / report.prefix_query_tokens
    assert report.prefix_block_hit_rate == hits / query


@pytest.mark.parametrize("block_size", [16, 512])
def test_sequential_requests_hit_the_blocks_of_a_dictionary_of_prefixes(chats, block_size):
    report = replay(chats, ReplayOptions(blocks="unbounded", block_size=block_size, max_running=1))
    assert (report.prefix_query_blocks, report.prefix_hit_blocks) == count_hits(whole_texts(chats), block_size)
    assert report.generated_tokens > 0


@pytest.mark.skipif(RECORDED is None, reason="PAGECORE_TRACE does not name a recorded trace")
def test_a_recorded_trace_hits_the_blocks_of_a_dictionary_of_its_ids():
    options = ReplayOptions(blocks="unbounded", block_size=HASH_BLOCK, max_running=1, prefill_only=True)
    report = replay(RECORDED, options)
    # The id of a full block identifies its tokens, so the dictionary does not need them.
    texts = (
        (request.input_length, request.hash_ids[: request.input_length // HASH_BLOCK])
        for request in read_trace(Path(RECORDED))
    )
    blocks = (([None] * (-(-length // HASH_BLOCK)), whole) for length, whole in texts)
    assert (report.prefix_query_blocks, report.prefix_hit_blocks) == count_hits(blocks, 1)


@pytest.mark.parametrize(("max_running", "block_size"), [(3, 16), (256, 16), (256, 512)])
def test_unbounded_blocks_hold_all_computed_tokens_and_evict_nothing(chats, max_running, block_size):
    report = replay(chats, ReplayOptions(blocks="unbounded", max_running=max_running, block_size=block_size))
    lengths = [len(computed) for _, computed in whole_texts(chats)]
    assert report.num_blocks == 1 + sum(-(-length // block_size) for length in lengths)
    assert (report.evicted_blocks, report.preemptions, report.recovered_tokens) == (0, 0, 0)
    assert report.computed_tokens + report.saved_prefill_tokens == sum(lengths)
    assert report.requests_finished == 40


def test_progress_counts_reused_tokens_and_ends_at_its_total(chats):
    seen = []
    replay(chats, ReplayOptions(blocks="unbounded"), lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(len(computed) for _, computed in whole_texts(chats))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_unbounded_blocks_are_refused_for_the_standard_input():
    with pytest.raises(UnsupportedOption, match="trace - is the standard input, which cannot be scanned"):
        replay("-", ReplayOptions(blocks="unbounded"))


def test_more_blocks_than_ids_are_refused(tmp_path):
    line = {"timestamp": 0, "input_length": 1, "output_length": 2**24 - 1, "hash_ids": [0]}
    trace = tmp_path / "long.jsonl"
    trace.write_text("\n".join([json.dumps(line)] * 129))
    with pytest.raises(ShapeError, match=f"fills {129 * (2**24 - 1)} blocks; the largest block id is 2147483647"):
        replay(trace, ReplayOptions(blocks="unbounded", block_size=1))


def test_unbounded_blocks_with_attention_must_fit_this_machine(chats, monkeypatch):
    monkeypatch.setattr("pagecore.serving.replay.build.free_memory", lambda: 10_000)
    with pytest.raises(NotEnoughMemory, match="attend needs a pool of"):
        replay(chats, ReplayOptions(blocks="unbounded", attend=True))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_attention_is_right_over_blocks_that_other_requests_computed(chats, policy):
    options = ReplayOptions(blocks=300, evict=policy, max_tokens_per_step=512, attend=True, requests=18)
    report = replay(chats, options)
    assert (report.requests_finished, report.evict) == (18, policy)
    assert report.prefix_hit_blocks > 20
    assert report.evicted_blocks > 100
    assert report.rows_checked > 50
    assert report.max_relative_error < 1e-5
    assert report.passed


def test_policies_evict_different_blocks(chats):
    found = {
        policy: replay(chats, ReplayOptions(blocks=300, evict=policy)).prefix_hit_blocks
        for policy in ("lru", "mru", "none")
    }
    assert found["none"] == 0
    assert len(set(found.values())) == 3


@pytest.mark.parametrize("swap", [None, 2400])
def test_attention_is_right_when_preempted_runs_reuse_their_own_blocks(tmp_path, swap):
    lengths = np.random.default_rng(7).integers([1, 50], [150, 160], (20, 2)).tolist()
    lines = [
        {"timestamp": 0, "input_length": inputs, "output_length": outputs, "hash_ids": [number % 3]}
        for number, (inputs, outputs) in enumerate(lengths)
    ]
    trace = tmp_path / "talk.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    options = ReplayOptions(
        blocks=60, bytes_per_token=10, swap_memory=swap, max_tokens_per_step=256, attend=True, max_running=8
    )
    report = replay(trace, options)
    assert (report.swaps > 0) == (swap is not None)
    assert report.preemptions > report.swaps
    assert report.recovered_tokens > 0
    assert report.prefix_hit_tokens > 0
    assert report.saved_prefill_tokens == report.prefix_hit_tokens + report.recovered_tokens
    assert report.max_relative_error < 1e-5
    rows = dict(replay_rows(report))
    assert rows["prefill saved"].endswith(f"{report.recovered_tokens:,} of these after preemptions")


def test_a_corrupted_cached_block_does_not_pass(chats, monkeypatch):
    add = PagedKVCache.add_sequence

    def spoilt(self, tokens, **options):
        sequence = add(self, tokens, **options)
        if sequence.num_cached_tokens:
            first = self.block_table(0).numpy()[sequence.row, 0]
            self.value(0).numpy()[first] *= -1
        return sequence

    monkeypatch.setattr(PagedKVCache, "add_sequence", spoilt)
    assert not replay(chats, ReplayOptions(blocks="unbounded", attend=True)).passed


def test_a_prefix_of_another_prompt_does_not_pass(chats, monkeypatch):
    """The lookup of any prompt returns the blocks of the first prompt."""
    add = PagedKVCache.add_sequence
    first = []

    def careless(self, tokens, **options):
        first.append(first[0] if first else np.asarray(tokens))
        length = min(len(tokens), len(first[0]))
        return add(self, np.concatenate([first[0][:length], tokens[length:]]), **options)

    monkeypatch.setattr(PagedKVCache, "add_sequence", careless)
    assert not replay(chats, ReplayOptions(blocks="unbounded", attend=True, requests=20)).passed


def test_without_a_prefix_cache_nothing_is_reused_or_evicted(chats):
    report = replay(chats, ReplayOptions(blocks=300, evict="none"))
    assert report.evict == "none"
    assert (report.prefix_hit_tokens, report.prefix_hit_blocks, report.saved_prefill_tokens) == (0, 0, 0)
    assert report.evicted_blocks == 0
    assert report.prefix_query_tokens > 0
    assert not {"prefix hits", "hits in blocks", "hits over time", "evicted"} & dict(replay_rows(report)).keys()


def test_series_of_hits_and_evictions_have_the_points_of_the_other_series(chats):
    report = replay(chats, ReplayOptions(blocks=300, max_tokens_per_step=64, max_running=4))
    points = len(report.utilization_series)
    assert len(report.prefix_hit_series) == len(report.evicted_series) == points > 100
    spans = [min(report.steps_per_point, report.steps - i * report.steps_per_point) for i in range(points)]
    assert sum(np.multiply(report.evicted_series, spans)) == pytest.approx(report.evicted_blocks)
    known = [share for share in report.prefix_hit_series if share is not None]
    assert None in report.prefix_hit_series
    assert all(0 <= share <= 1 for share in known)
    assert max(known) > 0
    assert json.loads(json.dumps(report.as_json()))["prefix_hit_series"] == report.prefix_hit_series
    rows = dict(replay_rows(report))
    assert rows["prefix hits"].startswith(
        f"{report.prefix_hit_tokens:,} of {report.prefix_query_tokens:,} prompt tokens"
    )
    assert rows["hits in blocks"].startswith(f"{report.prefix_hit_blocks:,} of {report.prefix_query_blocks:,} ")
    assert rows["evicted"] == f"{report.evicted_blocks:,} blocks (policy lru)"


def test_a_sparkline_has_gaps_for_unknown_shares():
    assert sparkline([1.0, None, 0.0]) == "█ ▁"
    assert sparkline([None, 1.0, None, None], width=2) == "█ "


def test_prefill_only_generates_nothing(chats):
    report = replay(chats, ReplayOptions(blocks=2000, prefill_only=True))
    assert (report.generated_tokens, report.requests_finished) == (0, 40)
    assert report.computed_tokens == report.prompt_tokens - report.saved_prefill_tokens


def test_ids_are_those_of_the_prompt_and_then_the_placeholder():
    request = Request(7, [5, 6, 4], 9)
    assert ids_at(request, np.arange(6)).tolist() == [5, 6, 4, *[2**31 - 8] * 3]
    assert ids_at(request, np.array([4, 1])).tolist() == [2**31 - 8, 6]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"evict": "random"}, "evict is 'random'; use one of lru, lfu"),
        ({"evict": "priority"}, "evict is 'priority'"),
        ({"evict": None}, "evict is None"),
        ({"blocks": "many"}, "blocks is 'many'; expected a number or 'unbounded'"),
        ({"blocks": "unbounded", "memory": "1GiB"}, "exclude each other"),
    ],
)
def test_invalid_options_are_refused(options, text):
    with pytest.raises(UnsupportedOption) as raised:
        ReplayOptions(**options)
    assert text in str(raised.value)


@pytest.mark.parametrize(("policy", "swap"), [*product(["lru", "slru"], [None, "1GiB"])])
def test_a_replay_is_deterministic(chats, policy, swap):
    options = ReplayOptions(blocks=300, evict=policy, swap_memory=swap)
    first, again = (replay(chats, options).as_json() for _ in range(2))
    timed = ("index_us_p50", "index_us_p99", "index_us_max", "wall_s")
    assert {**first, **dict.fromkeys(timed)} == {**again, **dict.fromkeys(timed)}


def test_a_repeated_prompt_keeps_no_earlier_answer_from_eviction(tmp_path):
    requests = [(4, 3, 1), (9, 0, 0), (4, 2, 1), (10, 1, 0)]  # tokens of input and output, content
    path = tmp_path / "repeated.jsonl"
    lines = [{"timestamp": 0, "input_length": a, "output_length": b, "hash_ids": [c]} for a, b, c in requests]
    path.write_text("\n".join(map(json.dumps, lines)))
    report = replay(path, ReplayOptions(blocks=16, block_size=1, max_running=1))
    # The third request evicts the two older answer tokens, and nothing of the nine tokens used after them.
    assert report.prefix_hit_tokens == 3 + 9
    assert report.evicted_blocks == 2
