"""Memory plans of models with recurrent states."""

import json

import numpy as np
import pytest

from pagecore import Plane, StatePool, StateSpec
from pagecore.cache import Alias, PagedKVCache
from pagecore.errors import NotEnoughMemory, PagecoreError, ShapeError, UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.serving.hybrid import arrange_hybrid
from pagecore.serving.plan_tables import context_columns, group_columns, plan_rows, state_columns
from pagecore.serving.planner import plan_memory, plan_model
from pagecore.serving.replay.options import ReplayOptions
from pagecore.storage import AttentionSpec, TensorParallel
from tests.models.hybrids import HYBRIDS, QWEN_3_NEXT
from tests.models.published import PUBLISHED

GIB = 1 << 30
FULL, WINDOW = AttentionSpec(2, 8), AttentionSpec(2, 8, window=10)
STATE = StateSpec((Plane("temporal", (4, 8), "float32", per="sequence"),), chunk=16, interval=64)


def test_worked_example_d10_slots_of_qwen3_next():
    plan = plan_model(QWEN_3_NEXT, "40GiB", context=8192).memory
    assert (plan.states.bytes_per_slot, plan.states.num_layers) == (77_266_944, 36)
    assert plan.states.num_slots - 1 == 262
    assert plan.states.num_slots == StatePool.slots_for(20_344_581_928, plan.states.specs)
    assert plan.states.state_ratio == 0.9
    assert plan.num_blocks == (40 * GIB - 263 * 77_266_944) // (12 * 2 * 2 * 256 * 2 * 16)
    assert plan.bytes_per_token == 24_576


def test_contexts_of_qwen3_next_are_limited_by_slots_or_by_blocks():
    plan = plan_model(QWEN_3_NEXT, "40GiB", context=[63, 2048, 8192, 32768]).memory
    assert [context.slots_per_request for context in plan.contexts] == [1, 2, 2, 2]
    assert [context.requests for context in plan.contexts] == [262, 131, 112, 28]
    for context in plan.contexts:
        (blocks,) = context.best_num_blocks
        used = blocks * plan.groups[0].bytes_per_block + context.best_num_states * plan.states.bytes_per_slot
        one = context.blocks_per_request[0] * plan.groups[0].bytes_per_block
        one += context.slots_per_request * plan.states.bytes_per_slot
        assert plan.memory - one < used <= plan.memory
        assert context.best_requests == (blocks - 1) // context.blocks_per_request[0] >= context.requests
        assert context.best_requests == (context.best_num_states - 1) // context.slots_per_request


@pytest.mark.parametrize(("ranks", "slots"), [(1, 262), (2, 525), (4, 1052), (16, 4211)])
def test_ranks_share_the_states(ranks, slots):
    plan = plan_model(QWEN_3_NEXT, "40GiB", ranks=ranks).memory
    assert plan.states.bytes_per_slot * ranks == 77_266_944
    assert plan.states.num_slots - 1 == slots


def test_ranks_that_cannot_split_the_states_raise():
    with pytest.raises(ShapeError, match="key_heads is 16, which 6 ranks cannot split"):
        plan_model(QWEN_3_NEXT | {"num_key_value_heads": 3, "num_attention_heads": 6}, "40GiB", ranks=6)
    with pytest.raises(UnsupportedOption, match="the planes of one of 1 ranks, and the cache is one of 2"):
        plan_memory([FULL, STATE], 10**6, ranks=2)


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1, 3.0])
def test_the_ratio_is_that_of_the_bytes(ratio):
    plan = plan_memory([FULL, STATE, WINDOW], "64MiB", state_ratio=ratio)
    blocks = sum(group.num_blocks * group.bytes_per_block for group in plan.groups)
    states = plan.states.num_slots * plan.states.bytes_per_slot
    assert states / blocks == pytest.approx(ratio, rel=0.01)
    assert 0.99 * plan.memory < blocks + states <= plan.memory
    assert [group.window for group in plan.groups] == [None, 10]


def test_a_model_of_states_alone_has_slots_and_no_blocks():
    plan = plan_model(HYBRIDS["falcon-mamba-7b"], "10GiB", context=[100, 10**6])
    memory = plan.memory
    one = 64 * (8192 * 3 * 2 + 8192 * 16 * 4)
    assert (memory.groups, memory.num_blocks, memory.num_tokens, memory.bytes_per_token) == ((), 0, 0, 0)
    assert (memory.states.bytes_per_slot, memory.states.state_ratio) == (one, None)
    assert memory.states.num_slots == 10 * GIB // one
    # The kernel keeps a state after any token: with blocks of 16 a request of 100 tokens has a checkpoint.
    assert [context.requests for context in memory.contexts] == [(memory.states.num_slots - 1) // 2] * 2
    assert [context.blocks_per_request for context in memory.contexts] == [(), ()]
    assert "blocks" not in dict(plan_rows(plan))
    assert len(context_columns(plan)[0]) == 4
    json.dumps(plan.as_json())


@pytest.mark.parametrize("context", [5, 40, 130])
def test_the_planned_number_of_requests_fits(context):
    layers = [FULL, STATE, WINDOW, STATE]
    plan = plan_memory(layers, 60_000, block_size=4, context=context)
    planned = plan.contexts[0]
    splits = [
        (planned.requests, [group.num_blocks for group in plan.groups], plan.states.num_slots),
        (planned.best_requests, list(planned.best_num_blocks), planned.best_num_states),
    ]
    for requests, num_blocks, num_states in splits:
        assert requests > 0
        cache = PagedKVCache(
            layers,
            num_blocks=num_blocks,
            num_states=num_states,
            block_size=4,
            max_sequences=requests,
            max_tokens_per_sequence=context,
            device="none",
        )
        sequences = [cache.add_sequence(np.arange(context) + 1000 * n) for n in range(requests)]
        for _ in range(context):
            cache.commit(cache.prepare(sequences, 1))
        assert {sequence.num_computed_tokens for sequence in sequences} == {context}
    cache = PagedKVCache(layers, memory=60_000, block_size=4, device="none")
    assert (list(cache.num_blocks), cache.num_states) == ([g.num_blocks for g in plan.groups], plan.states.num_slots)


def test_a_rank_of_a_cache_has_the_planned_blocks_and_slots():
    specs = specs_from_config(QWEN_3_NEXT)
    plan = plan_memory(specs, "40GiB", ranks=2)
    cache = PagedKVCache(specs, memory="40GiB", parallel=TensorParallel(1, 2), device="none")
    assert (list(cache.num_blocks), cache.num_states) == ([plan.num_blocks], plan.states.num_slots) == ([115094], 526)
    assert [plane.shape for plane in cache.spec(0).planes] == [(4096, 3), (16, 128, 128)]


def test_layers_without_memory_are_not_planned():
    plan = plan_model(HYBRIDS["nemotron-h-8b"], "1GiB")
    assert (plan.model.num_layers, plan.memory.states.num_layers, plan.memory.groups[0].num_layers) == (52, 24, 4)
    assert plan.as_json()["num_layers"] == 52


def test_a_plan_is_available_as_json_and_as_tables():
    plan = plan_model(QWEN_3_NEXT, "40GiB", context=8192)
    report = json.loads(json.dumps(plan.as_json()))
    assert report["states"]["planes"] == [
        {
            "conv": {"shape": [8192, 3], "dtype": "bfloat16"},
            "temporal": {"shape": [32, 128, 128], "dtype": "float32"},
        }
    ]
    assert (report["states"]["num_slots"], report["states"]["chunk"], report["states"]["interval"]) == (263, 64, 256)
    assert report["contexts"][0]["best_num_states"] == 241
    assert dict(plan_rows(plan))["state slots"] == "262, 0.9 times the bytes of the blocks"
    assert dict(plan_rows(plan))["bytes per state"] == "73.7 MiB of a sequence in all layers"
    headings, lines = context_columns(plan)
    line = dict(zip(headings, lines[0], strict=True))
    assert (line["blocks"], line["slots"], line["requests"]) == ("512", "2", "112")
    assert (line["its num_blocks"], line["its num_states"]) == ("[61441]", "241")
    assert len(group_columns(plan)[1]) == len(state_columns(plan)[1]) == 1
    plain = plan_model(PUBLISHED["llama-3-8b"], "1GiB")
    assert (plain.as_json()["states"], plain.memory.states, state_columns(plain)[1]) == (None, None, [])


def test_aliases_count_attention_layers_alone():
    layers = [STATE, FULL, STATE, WINDOW, Alias(1), Alias(3), STATE]
    groups, states = arrange_hybrid(layers, TensorParallel())
    assert ([group.num_layers for group in groups], len(states)) == ([1, 1], 3)
    with pytest.raises(UnsupportedOption, match=r"layer 1 is Alias\(0\), but layer 0 keeps a state"):
        arrange_hybrid([STATE, Alias(0)], TensorParallel())
    for wrong in (Alias(2), Alias(-1), Alias(7), Alias("x")):
        with pytest.raises(ShapeError):
            arrange_hybrid([STATE, FULL, wrong], TensorParallel())


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"state_ratio": 0}, ShapeError, "state_ratio is 0"),
        ({"state_ratio": -1.0}, ShapeError, "state_ratio is -1.0"),
        ({"state_ratio": float("nan")}, ShapeError, "state_ratio is nan"),
        ({"state_ratio": "much"}, PagecoreError, "state_ratio is 'much'"),
        ({"memory": 1100, "state_ratio": 0.1}, NotEnoughMemory, "at least two (state )?slots of 128 bytes"),
        ({"memory": 2300}, NotEnoughMemory, "two blocks"),
        ({"specs": [STATE], "memory": 200}, NotEnoughMemory, "at least two (state )?slots of 128 bytes"),
    ],
)
def test_invalid_arguments_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        plan_memory(**{"specs": [FULL, STATE], "memory": 10**6} | options)


def test_quantised_checkpoints_are_planned_and_replayed():
    config = {"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 48}
    config["max_position_embeddings"] = 262144
    plan = plan_model(config, "40GiB", context=[2048], checkpoint_format="int8").memory
    assert (plan.states.num_slots, plan.states.num_checkpoints) == (206, 208)
    context = plan.contexts[0]
    assert (context.requests, context.best_requests) == (205, 287)
    assert (context.best_num_states, context.best_num_checkpoints) == (288, 288)
    options = ReplayOptions(model=config, memory="40GiB", checkpoint_format="int8", max_running=8)
    assert options.num_slots == 1 + 2 * 8
    assert options.num_checkpoints == 896
    with pytest.raises(UnsupportedOption, match="checkpoint_format is given without a model"):
        ReplayOptions(checkpoint_format="int8")
