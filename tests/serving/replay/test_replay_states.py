"""Replays of models with recurrent states, compared with sets of prefixes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.serving.state_placement import best_state_hits
from bench.serving.synthetic_trace import write_shared_prompts
from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.replay import replay
from pagecore.serving.replay.attend import placeholder_id
from pagecore.serving.replay.options import ReplayOptions
from pagecore.serving.replay.trace import HASH_BLOCK, read_trace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.tables import replay_rows
from tests.faults import is_full
from tests.models.hybrids import HYBRIDS, QWEN_3_NEXT
from tests.models.published import PUBLISHED
from tests.serving.state_hits import count_state_hits
from tests.together import together

# Twelve layers are enough: the cache has no bytes.
SMALL = QWEN_3_NEXT | {"num_hidden_layers": 12}


@pytest.fixture
def chats(tmp_path):
    """Write a trace of thirty requests that share four prompts or continue an earlier request."""
    random = np.random.default_rng(8)
    shared, lines, fresh = [list(range(n * 10, n * 10 + n + 1)) for n in range(4)], [], 100
    for number in range(30):
        earlier = shared[random.integers(len(shared))]
        length = len(earlier) * HASH_BLOCK + int(random.integers(1, 900))
        blocks = -(-length // HASH_BLOCK)
        ids = [*earlier, *range(fresh, fresh + blocks - len(earlier))]
        fresh += blocks
        if random.random() < 0.2:
            shared.append(ids[: length // HASH_BLOCK])
        output = int(random.choice([1, 40, 120]))
        lines.append({"timestamp": number, "input_length": length, "output_length": output, "hash_ids": ids})
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def whole_texts(path):
    """Yield each prompt and all computed tokens of its request; the last generated token is not computed."""
    for request in read_trace(path):
        prompt = request.prompt().tolist()
        generated = [placeholder_id(Request(request.number, prompt, 0))] * max(request.output_length - 1, 0)
        yield prompt, prompt + generated


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 64, 100])
@pytest.mark.parametrize("budget", [8192, 700])
def test_sequential_requests_hit_the_states_of_sets_of_prefixes(chats, block_size, budget):
    options = ReplayOptions(
        model=SMALL, blocks="unbounded", block_size=block_size, max_running=1, max_tokens_per_step=budget
    )
    report = replay(chats, options)
    matched, hit = np.sum(count_state_hits(whole_texts(chats), block_size, 64, 256, budget), axis=0).tolist()
    states = report.states
    assert (states.matched_tokens, states.hit_tokens, report.prefix_hit_tokens) == (matched, hit, hit)
    # Steps of 700 tokens have states, too: a part ends at 1,600 tokens, the first common multiple of chunk and block.
    assert 0 < hit < matched
    assert states.share_lost == 1 - hit / matched
    assert (states.evicted_states, report.evicted_blocks) == (0, 0)
    assert report.computed_tokens == sum(len(computed) for _, computed in whole_texts(chats)) - hit
    assert (states.cached_peak > 0) == (hit > 0)
    assert 0 < states.held_mean < states.held_peak + 1e-9 < 1


@pytest.mark.slow
def test_the_report_has_the_slots_of_quantised_checkpoints(chats):
    options = {"model": SMALL, "blocks": 5000, "max_running": 2}
    exact, quantised = (
        replay(chats, ReplayOptions(**options, checkpoint_format=each)).states for each in (None, "int8")
    )
    assert (exact.num_checkpoints, exact.bytes_per_checkpoint, exact.checkpoints_held_peak) == (0, 0, 0)
    assert quantised.num_checkpoints > quantised.num_states
    assert 0 < quantised.bytes_per_checkpoint < quantised.bytes_per_state
    assert quantised.checkpoints_held_peak * (quantised.num_checkpoints - 1) >= quantised.cached_peak > 0
    assert 0 < quantised.checkpoints_held_mean < quantised.checkpoints_held_peak <= 1
    assert quantised.hit_tokens == exact.hit_tokens


@pytest.mark.slow
def test_states_that_few_slots_hold_are_evicted(chats):
    many, few = (
        replay(chats, ReplayOptions(model=SMALL, blocks=5000, num_states=num_states, max_running=2))
        for num_states in (500, 9)
    )
    assert (many.states.evicted_states, many.states.num_states, few.states.num_states) == (0, 500, 9)
    assert few.states.evicted_states > 0
    assert few.states.held_peak == 1
    assert few.states.cached_peak <= 8
    assert few.states.hit_tokens <= many.states.hit_tokens
    assert few.requests_finished == many.requests_finished == 30
    assert few.states.bytes_per_state == 9 * 2_146_304


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "num_states", "max_running", "memory_blocks"),
    [(8, 24, 4, 3000), (16, 60, 16, 6000), *([(24, 70, 8, 8000)] if is_full() else [])],
)
def test_few_slots_keep_the_states_that_shared_prompts_need(tmp_path, prompts, num_states, max_running, memory_blocks):
    path = tmp_path / "shared.jsonl"
    write_shared_prompts(path, 140, prompts, 0.5)
    options = ReplayOptions(model=SMALL, blocks=memory_blocks, num_states=num_states, max_running=max_running)
    report = replay(path, options)
    best = replay(path, replace(options, blocks="unbounded", num_states=None))
    assert report.states.evicted_states > 100
    assert best.states.evicted_states == 0
    share = report.states.hit_tokens / report.states.matched_tokens
    assert share >= 0.95 * best.states.hit_tokens / best.states.matched_tokens
    assert report.states.hit_tokens >= 0.95 * best.states.hit_tokens


@pytest.mark.slow
def test_checkpoints_before_the_end_of_prompts_serve_the_second_request_with_a_shared_prompt(tmp_path):
    path = tmp_path / "shared.jsonl"
    write_shared_prompts(path, 240, 60, 1.0)
    best = sum(best_state_hits([request.prompt() for request in read_trace(path)], 64, 10_000))
    options = ReplayOptions(model=SMALL, blocks="unbounded", max_running=8, prefill_only=True)
    with_none, with_some = (replay(path, replace(options, prompt_checkpoints=n)).states for n in (0, None))
    assert with_none.hit_tokens < 0.9 * best
    assert 0.97 * best < with_some.hit_tokens <= best
    # Few slots: most prompts are asked for again after many others.
    few = replay(path, replace(options, num_states=100)).states
    assert few.evicted_states > 300
    assert few.hit_tokens > 0.9 * best


def test_a_memory_is_divided_as_by_the_planner(chats):
    report = replay(chats, ReplayOptions(model=QWEN_3_NEXT, memory="40GiB", requests=3))
    assert (report.states.num_states, report.num_blocks) == (263, (40 * 2**30 - 263 * 77_266_944) // 393_216)
    options = ReplayOptions(model=QWEN_3_NEXT, memory="40GiB", num_states=100)
    assert (options.num_slots, options.num_blocks) == (100, (40 * 2**30 - 100 * 77_266_944) // 393_216)
    options = ReplayOptions(model=QWEN_3_NEXT, blocks=10_000, state_ratio=0.5)
    assert options.num_slots == 10_000 * 393_216 // 2 // 77_266_944 + 1
    assert [replace(options, state_ratio=ratio).num_slots for ratio in (1e-300, 1e300)] == [3, 2**31 - 1]


@pytest.mark.slow
def test_preempted_requests_are_swapped_out_with_their_states(chats):
    few = ReplayOptions(model=SMALL, blocks=220, num_states=40, max_running=16)
    recomputed = replay(chats, few)
    swapped = replay(chats, replace(few, swap_memory="4GiB"))
    assert recomputed.preemptions > 0
    assert 0 < swapped.swaps <= swapped.preemptions
    assert swapped.requests_finished == recomputed.requests_finished == 30
    assert (swapped.num_swap_blocks, few.num_swap_states) == ((2**32 - 105 * 19_316_736) // 98_304, 0)
    assert 0 < swapped.swapped_blocks_peak < swapped.num_swap_blocks


def test_without_a_prefix_cache_nothing_is_matched(chats):
    report = replay(chats, ReplayOptions(model=SMALL, blocks=5000, evict="none", requests=5))
    assert (report.states.matched_tokens, report.states.hit_tokens, report.states.share_lost) == (0, 0, 0.0)
    assert [name for name, _ in replay_rows(report) if "state" in name] == ["state slots"]


def test_rows_and_json_of_states(chats):
    report = replay(chats, ReplayOptions(model=SMALL, blocks=5000, num_states=200))
    rows = dict(replay_rows(report))
    assert rows["state slots"].startswith("199 of 18.4 MiB each, in use mean")
    assert rows["blocks matched"] == f"{report.states.matched_tokens:,} prompt tokens in cached blocks"
    assert rows["reused by states"].endswith(f"{report.states.share_lost:.1%} lost after the deepest state")
    assert rows["states evicted"].startswith("0; at most")
    assert json.loads(json.dumps(report.as_json()))["states"]["num_states"] == 200
    plain = replay(chats, ReplayOptions(model=PUBLISHED["llama-3-8b"], requests=2))
    assert plain.states is None
    assert "states" not in plain.as_json()


def test_a_layer_with_both_counts_both(chats):
    config = HYBRIDS["falcon-h1-7b"]
    report = replay(chats, ReplayOptions(model=config, memory="64GiB", requests=3))
    assert report.states.bytes_per_state == 44 * (3584 * 3 * 2 + 24 * 128 * 256 * 4)
    assert report.requests_finished == 3


@together(
    ("options", "error", "words"),
    [
        (
            {"model": PUBLISHED["llama-3-8b"], "num_states": 5},
            UnsupportedOption,
            "num_states is 5, but the model has no",
        ),
        ({"num_states": 5}, UnsupportedOption, "num_states is 5, but the model has no"),
        ({"model": SMALL, "num_states": 2}, ShapeError, "num_states is 2"),
        ({"model": SMALL, "state_ratio": 0}, ShapeError, "state_ratio is 0"),
        (
            {"model": SMALL, "swap_memory": "20MiB"},
            NotEnoughMemory,
            "^swap_memory: .* two state slots of 19316736 bytes",
        ),
        ({"model": SMALL, "host": "20MiB"}, NotEnoughMemory, "^host: .* two state slots of 19316736 bytes"),
        ({"model": HYBRIDS["mamba-2.8b"], "blocks": 9}, UnsupportedOption, "blocks is 9, but no layer of the model"),
        ({"model": HYBRIDS["mamba-2.8b"], "host": "20MiB"}, NotEnoughMemory, "^host: .* two state slots of 24903680"),
        ({"model": HYBRIDS["mamba-2.8b"], "swap_memory": "20MiB"}, NotEnoughMemory, "^swap_memory: .* of 24903680"),
        ({"model": SMALL, "memory": "20MiB"}, NotEnoughMemory, "at least two (state )?slots of 19316736 bytes"),
        (
            {"model": SMALL, "memory": "1GiB", "num_states": 60},
            NotEnoughMemory,
            "gives 60 state slots of .* and 0 bytes",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        ReplayOptions(**options).num_blocks  # noqa: B018
