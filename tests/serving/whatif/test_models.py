"""Hit curves of models with windows, several groups or recurrent states, against replays of the same models."""

import json

import numpy as np
import pytest

from pagecore.errors import NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.whatif import WhatIfOptions, what_if
from pagecore.serving.whatif.modelled import _prompt
from tests.models.parameters.test_count import config_of
from tests.serving.whatif.traffic import mooncake

GIB = 1 << 30
# Two groups of windows and full attention; one of windows; states; two groups without windows.
MODELS = {
    "gemma-2-9b": "2GiB..16GiB",
    "mistral-7b-v0.1": "1GiB..6GiB",
    "qwen3-next-80b-a3b": "1GiB..12GiB",
    "llama-4-scout": "2GiB..10GiB",
    "falcon-h1-7b": "1GiB..6GiB",
    "deepseek-v3.2": "600MiB..6GiB",
    "mamba-2.8b": "100MiB..2GiB",
}


def replayed(path, model, block_size, **options):
    options = ReplayOptions(model=model, block_size=block_size, prefill_only=True, max_running=1, **options)
    return replay(path, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"), [*((name, "lru") for name in MODELS), ("gemma-2-9b", "slru"), ("qwen3-next-80b-a3b", "lfu")]
)
def test_curves_of_models_equal_replays(tmp_path, name, policy):
    path, model = mooncake(tmp_path / "trace.jsonl", 3, requests=50), config_of(name)
    options = WhatIfOptions(memory=MODELS[name], points=5, block_sizes=(64,), policies=(policy,), model=model)
    assert options.is_simulated == (name != "deepseek-v3.2")
    result = what_if(path, options)
    (curve,) = result.curves
    assert curve.method == ("exact" if name == "deepseek-v3.2" and policy == "lru" else "simulated")
    for i, memory in enumerate(curve.memory):
        report = replayed(path, model, 64, memory=memory, evict=policy)
        slots = report.states.num_states if name == "mamba-2.8b" else report.num_blocks
        assert slots - 1 == curve.blocks[i]
        assert report.requests_refused == curve.refused[i]
        assert report.prefix_query_tokens == curve.query_tokens[i]
        assert report.prefix_hit_tokens == curve.hit_tokens[i]
    assert len(set(curve.hit_tokens)) > 2
    unbounded = replayed(path, model, 64, blocks="unbounded")
    assert result.unbounded_hit_rate == unbounded.prefix_token_hit_rate
    assert result.unbounded_memory > 0
    json.dumps(result.as_json())


@pytest.mark.slow
def test_block_sizes_policies_and_tiers_together(tmp_path):
    path, model = mooncake(tmp_path / "trace.jsonl", 4, requests=40), config_of("gemma-2-9b")
    tiers = {"GPU": "3GiB", "CPU": "6GiB", "DISK": "40GiB"}
    options = WhatIfOptions(
        memory="4GiB..16GiB", points=3, block_sizes=(64, 128), policies=("lru", "lfu"), model=model, tiers=tiers
    )
    result = what_if(path, options)
    assert [(c.block_size, c.policy, len(c.memory)) for c in result.curves] == [
        (64, "lru", 3),
        (64, "lfu", 3),
        (128, "lru", 3),
        (128, "lfu", 3),
    ]
    assert not any(sum(curve.refused) for curve in result.curves)
    hits = [replayed(path, model, 64, memory=size).prefix_hit_tokens for size in tiers.values()]
    assert [tier.hit_tokens for tier in result.tiers] == np.diff(hits, prepend=0).tolist()
    assert hits == sorted(hits)
    timeline = result.timeline
    assert len(timeline.hit_rates) == len(result.timeline_memory) == 3
    assert timeline.num_blocks[-1] * 64 * result.bytes_per_token == result.unbounded_memory


def test_traces_of_token_ids_are_served_too(tmp_path):
    random = np.random.default_rng(0)
    system = random.integers(0, 1000, 300).tolist()
    turns = [
        {"timestamp": n, "token_ids": [*system, *([n % 3] * 200), *random.integers(0, 9, n).tolist()]}
        for n in range(12)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, turns)))
    (curve,) = what_if(path, WhatIfOptions(memory="4GiB", model=config_of("gemma-2-9b"))).curves
    # Two prompts find the blocks of the common part, and nine those of an earlier prompt as a whole.
    assert curve.hit_tokens == [2 * 288 + 9 * 496]


def test_prompts_have_equal_blocks_where_the_trace_has():
    path = np.array([7, 9, 2], np.int32)
    assert _prompt(path, 14, 4).tolist() == [7] * 4 + [9] * 4 + [2] * 4 + [0, 0]
    assert _prompt(path, 12, 4).tolist() == [7] * 4 + [9] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"model": config_of("gemma-2-9b"), "sample": 0.5}, UnsupportedOption, "windows or states, whose hits are"),
        ({"model": config_of("whisper")}, UnsupportedOption, "the model has an encoder"),
        ({"model": config_of("mamba-2.8b"), "memory": "40MiB..1GiB"}, NotEnoughMemory, "at least two state slots"),
        ({"model": config_of("gemma-2-9b"), "bytes_per_token": 9}, UnsupportedOption, "exclude each other"),
        ({"model": config_of("gemma-2-9b"), "memory": "1MiB..1GiB"}, NotEnoughMemory, "memory"),
        ({"model": config_of("gemma-2-9b"), "tiers": {"GPU": "1MiB"}}, NotEnoughMemory, "memory"),
        ({"model": {"model_type": "unknown_text"}}, UnsupportedOption, "unknown_text"),
        ({"bytes_per_token": 0}, ShapeError, "bytes_per_token is 0; it must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        WhatIfOptions(**options)
