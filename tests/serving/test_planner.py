"""Memory plans, compared with caches that are made and filled as planned."""

import contextlib
import json

import numpy as np
import pytest

from pagecore.cache import Alias, PagedKVCache
from pagecore.errors import NotEnoughMemory, OutOfBlocks, PagecoreError, ShapeError, UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.serving.plan_tables import context_columns, group_columns, plan_rows
from pagecore.serving.planner import blocks_held, plan_memory, plan_model
from pagecore.storage import AttentionSpec, KVPool
from tests.models.published import PUBLISHED
from tests.together import together

LLAMA, GEMMA = PUBLISHED["llama-3-8b"], PUBLISHED["gemma-2-9b"]
FULL = AttentionSpec(2, 8)
WINDOW = AttentionSpec(2, 8, window=10)


def test_a_token_of_llama_3_8b_has_131072_bytes():
    plan = plan_model(LLAMA, "40GiB", context=8192).memory
    assert plan.bytes_per_token == 131072
    assert plan.num_blocks == 20480
    assert plan.num_tokens == 20479 * 16
    assert (plan.contexts[0].blocks_per_request, plan.contexts[0].requests) == ((512,), 39)
    assert (plan.contexts[0].best_requests, plan.contexts[0].best_num_blocks) == (39, (39 * 512 + 1,))


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_each_rank_holds_its_share_of_the_heads_or_one_copy(ranks, heads):
    plan = plan_model(LLAMA, "40GiB", ranks=ranks).memory
    assert plan.bytes_per_token == 131072 // 8 * heads
    assert plan.groups[0].spec.num_kv_heads == heads
    assert plan.num_blocks == 20480 * 8 // heads


def test_ranks_share_the_sinks_of_gpt_oss_with_their_heads():
    (sliding, full) = plan_model(PUBLISHED["gpt-oss-20b"], "1GiB", ranks=16).memory.groups
    assert (sliding.spec.num_kv_heads, len(sliding.spec.sinks), sliding.num_layers, full.num_layers) == (1, 4, 12, 12)


@pytest.mark.parametrize("memory", [10**6, "3MiB", 2**22 + 77])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_cache_made_with_the_same_memory_has_the_planned_blocks_and_groups(memory, block_size):
    layers = [FULL, WINDOW, Alias(0), AttentionSpec(1, 16, 4, dtype="float32"), WINDOW]
    plan = plan_memory(layers, memory, block_size=block_size)
    cache = PagedKVCache(layers, memory=memory, block_size=block_size)
    assert cache.num_blocks == tuple(group.num_blocks for group in plan.groups)
    assert max(cache.num_blocks) == cache.num_blocks[0] == cache.num_blocks[2] == plan.num_blocks
    assert [group.window for group in plan.groups] == [None, 10, None]
    assert [group.num_layers for group in plan.groups] == [1, 2, 1]
    assert cache.nbytes == sum(group.bytes_per_block * group.num_blocks for group in plan.groups) <= plan.memory
    one = KVPool(WINDOW, 2, 2, block_size)
    assert plan.groups[1].bytes_per_token == one.bytes_per_token
    assert plan.groups[1].bytes_per_block == one.bytes_per_block


def most_held(spec, context, block_size):
    """Return the largest number of blocks that a sequence holds while it grows token by token."""
    cache = PagedKVCache(spec, num_blocks=context + 2, block_size=block_size, max_sequences=1, device="none")
    sequence = cache.add_sequence(np.zeros(context, np.int32))
    most = 0
    for _ in range(context):
        batch = cache.prepare([sequence], 1)
        most = max(most, cache.stats().num_used_blocks)
        cache.commit(batch)
    return most


@together("block_size", [1, 3, 4])
@together("window", [None, 1, 2, 3, 4, 5, 8, 9, 10])
@together("context", [1, 4, 5, 40])
def test_a_request_holds_the_blocks_of_the_formula(context, window, block_size):
    spec = AttentionSpec(1, 8, window=window)
    assert most_held(spec, context, block_size) == blocks_held(spec, context, block_size)


def room_for(layers, num_blocks, requests, context):
    """Return True if `requests` sequences can grow to `context` tokens at the same time."""
    cache = PagedKVCache(
        layers,
        num_blocks=num_blocks,
        block_size=4,
        max_sequences=requests,
        max_tokens_per_sequence=context,
        device="none",
    )
    sequences = [cache.add_sequence(np.zeros(context, np.int32)) for _ in range(requests)]
    try:
        for _ in range(context):
            cache.commit(cache.prepare(sequences, 1))
    except OutOfBlocks:
        return False
    return True


@pytest.mark.parametrize("context", [True, [True], [[3]], "3", 3.0])
def test_contexts_that_are_no_numbers_of_tokens_are_refused(context):
    with pytest.raises(ShapeError, match="context is"):
        plan_memory([AttentionSpec(1, 8)], 200_000, context=context)


@pytest.mark.parametrize("context", [3, 12, 40, 77])
def test_exactly_the_planned_number_of_requests_fits(context):
    layers = [FULL, WINDOW, WINDOW, WINDOW]
    planned = plan_memory(layers, 200_000, block_size=4, context=context)
    plan = planned.contexts[0]
    num_blocks = [group.num_blocks for group in planned.groups]
    assert room_for(layers, num_blocks, plan.requests, context)
    assert not room_for(layers, num_blocks, plan.requests + 1, context)
    assert room_for(layers, list(plan.best_num_blocks), plan.best_requests, context)
    assert not room_for(layers, list(plan.best_num_blocks), plan.best_requests + 1, context)
    assert plan.best_requests >= plan.requests


def test_the_best_split_keeps_within_the_memory():
    plan = plan_model(GEMMA, "40GiB", ranks=4, context=[2048, 8192, 100_000]).memory
    for context in plan.contexts:
        used = sum(n * group.bytes_per_block for n, group in zip(context.best_num_blocks, plan.groups, strict=True))
        one = sum(n * group.bytes_per_block for n, group in zip(context.blocks_per_request, plan.groups, strict=True))
        assert plan.memory - one < used <= plan.memory
    assert plan.contexts[1].blocks_per_request == (257, 512)
    assert (plan.contexts[1].requests, plan.contexts[1].best_requests) == (81, 81)
    assert plan.contexts[0].requests < plan.contexts[0].best_requests


def test_a_context_that_does_not_fit_is_planned_as_none():
    plan = plan_memory(FULL, 64 * 16 * 10, context=[16, 10_000])
    assert [context.requests for context in plan.contexts] == [9, 0]
    assert (plan.contexts[1].best_requests, plan.contexts[1].best_num_blocks) == (0, None)


def test_default_contexts_end_with_the_longest_of_the_model():
    def lengths(config):
        return [context.context for context in plan_model(config, "40GiB").memory.contexts]

    assert lengths(LLAMA) == [2048, 8192]
    assert lengths(PUBLISHED["gpt-oss-20b"]) == [2048, 8192, 32768, 131072]
    assert lengths({name: value for name, value in LLAMA.items() if not name.startswith("max_")}) == [2048, 8192, 32768]


@pytest.mark.parametrize(
    "context", [16, np.int64(16), np.array(16), [16], (16,), np.array([16]), iter([16]), range(16, 17)]
)
def test_a_context_may_be_any_integer_or_list_of_them(context):
    assert [plan.context for plan in plan_memory(FULL, 10**6, context=context).contexts] == [16]


@together(
    ("options", "error", "reason"),
    [
        ({"ranks": 0}, ShapeError, "ranks is 0"),
        ({"ranks": "two"}, ShapeError, "ranks is 'two'"),
        ({"ranks": 3}, PagecoreError, "num_kv_heads is 2"),
        ({"ranks": 8, "specs": AttentionSpec(2, 8, num_query_heads=4)}, PagecoreError, "num_query_heads is 4"),
        ({"block_size": 0}, ShapeError, "block_size is 0"),
        ({"state_ratio": -1.0}, ShapeError, "state_ratio is -1.0"),
        ({"state_ratio": float("nan")}, ShapeError, "state_ratio is nan"),
        ({"context": 0}, ShapeError, "context is 0"),
        ({"context": [1, -5]}, ShapeError, "context is -5"),
        ({"context": 2**31}, ShapeError, "must be at most"),
        ({"context": 1.5}, ShapeError, "context is 1.5"),
        ({"context": None}, ShapeError, "context is None"),
        ({"context": "16"}, ShapeError, "context is '1'"),
        ({"memory": 2047}, NotEnoughMemory, "two blocks"),
        ({"memory": "lots"}, ShapeError, "memory is 'lots'"),
        ({"memory": "100000PiB"}, ShapeError, "ids are int32"),
        ({"specs": []}, ShapeError, "layers is empty"),
        ({"specs": ["llama"]}, UnsupportedOption, "layer 0 is 'llama'"),
        ({"specs": ["llama"], "ranks": 2}, UnsupportedOption, "llama"),
        ({"specs": None}, UnsupportedOption, "layers is None"),
    ],
)
def test_invalid_arguments_are_refused(options, error, reason):
    with pytest.raises(error, match=reason):
        plan_memory(**{"specs": FULL, "memory": 10**6} | options)


def test_a_plan_is_available_as_json_and_as_tables():
    plan = plan_model(GEMMA, "40GiB", ranks=4, context=8192)
    report = json.loads(json.dumps(plan.as_json()))
    assert (report["model_type"], report["num_layers"], report["max_length"]) == ("gemma2", 42, 8192)
    assert [group["window"] for group in report["groups"]] == [4096, None]
    assert report["groups"][0]["planes"]["key"] == {"shape": [2, 256], "dtype": "bfloat16"}
    assert report["contexts"][0]["blocks_per_request"] == [257, 512]
    assert report["bytes_per_token"] == 86016
    assert dict(plan_rows(plan))["tokens"] == "664,528"
    headings, lines = group_columns(plan)
    assert lines[0] == ["0", "21", "4,096", "key, value 2 x 256 bfloat16", "43,008", "688,128", "20,879"]
    headings, lines = context_columns(plan)
    assert dict(zip(headings, lines[0], strict=True))["its num_blocks"] == "[20850, 41473]"
    assert len(context_columns(plan_model(LLAMA, "1GiB"))[0]) == 3


def test_specs_of_a_config_and_the_config_give_the_same_plan():
    assert plan_memory(specs_from_config(GEMMA), "8GiB", context=100) == plan_model(GEMMA, "8GiB", context=100).memory


STRANGE = [
    None, 0, -1, 1.5, "1", "many", b"1", [], [1.5], object(), float("nan"), True, np.float32(2), np.array([1, 2]),
    np.int8(-1), np.uint64(2**64 - 1), 2**31, 10**400, 10**5000, -(10**5000), {"a": 1}, [10**5000], np.int16(300),
]  # fmt: skip
ARGUMENTS = ["specs", "memory", "ranks", "block_size", "context"]


@together("name", ARGUMENTS)
@together("value", STRANGE)
def test_foreign_values_are_accepted_or_raise_our_errors(name, value):
    arguments = {"specs": FULL, "memory": 10**7, "ranks": 1, "block_size": 16, "context": [100]} | {name: value}
    with contextlib.suppress(PagecoreError):
        json.dumps(plan_memory(**arguments).as_json())


def test_narrow_integers_of_numpy_do_not_wrap():
    plan = plan_memory(FULL, np.uint32(4_000_000_000), block_size=np.int8(100), context=np.int16(30_000))
    assert plan == plan_memory(FULL, 4_000_000_000, block_size=100, context=30_000)
    assert blocks_held(FULL, np.uint8(200), np.int8(3)) == 67
    assert KVPool.blocks_for(np.uint32(4_000_000_000), FULL, np.int8(2), np.int8(100)) == plan.num_blocks // 2
