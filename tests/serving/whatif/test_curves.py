"""Curves of a trace against replays of it, and the stack distances against a plain list."""

import numpy as np
import pytest

from pagecore.errors import ShapeError
from pagecore.serving.replay import ReplayOptions, replay
from pagecore.serving.whatif import WhatIfOptions, read_requests, what_if
from pagecore.serving.whatif._stack import Numbers, Stack
from pagecore.serving.whatif.lru import lru_hits, sampled_hits
from pagecore.serving.whatif.simulate import simulated_hits
from tests.faults import is_full
from tests.serving.whatif.traffic import mooncake

TOKEN_BYTES = 1000


def replayed(path, block_size, memory, policy="lru"):
    options = ReplayOptions(
        memory=memory,
        bytes_per_token=TOKEN_BYTES,
        block_size=block_size,
        max_running=1,
        prefill_only=True,
        evict=policy,
        max_tokens_per_step=1024,
    )
    return replay(path, options)


def test_a_call_without_options_is_that_of_the_default_options(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", 0)
    assert what_if(path) == what_if(path, WhatIfOptions())


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "seed"), [(512, 0), (96, 2), (1024, 3), *([(256, 1)] if is_full() else [])])
def test_the_curve_equals_replays_at_twelve_sizes(tmp_path, block_size, seed):
    path = mooncake(tmp_path / "trace.jsonl", seed)
    # From sizes that refuse most requests to sizes that evict nothing.
    sizes = np.unique(np.geomspace(3 * block_size, 150 * 512, 12).astype(int) * TOKEN_BYTES)
    options = WhatIfOptions(
        memory=f"{sizes[0]}..{sizes[-1]}", points=12, block_sizes=(block_size,), bytes_per_token=TOKEN_BYTES
    )
    (curve,) = what_if(path, options).curves
    assert len(curve.memory) == 12
    for i, memory in enumerate(curve.memory):
        report = replayed(path, block_size, memory)
        assert report.num_blocks - 1 == curve.blocks[i]
        assert report.requests_refused == curve.refused[i]
        assert report.prefix_query_tokens == curve.query_tokens[i]
        assert report.prefix_hit_tokens == curve.hit_tokens[i]
    assert len(set(curve.hit_tokens)) > 6
    assert curve.refused[0] > 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "slru", "slru:0.5"])
def test_simulations_equal_replays(tmp_path, policy):
    path = mooncake(tmp_path / "trace.jsonl", 5)
    chunks = list(read_requests(path, 256))
    for capacity in (12, 40, 200):
        report = replayed(path, 256, (capacity + 1) * 256 * TOKEN_BYTES, policy)
        assert report.prefix_hit_blocks == simulated_hits(chunks, 256, capacity, policy, 1024)


def test_a_cache_far_larger_than_the_trace_is_simulated_as_one_that_evicts_nothing(tmp_path):
    chunks = list(read_requests(mooncake(tmp_path / "trace.jsonl", 5), 256))
    blocks = sum(int((-(-chunk.tokens // 256)).sum()) for chunk in chunks)
    # A list of this many free blocks would not fit in any memory.
    assert simulated_hits(chunks, 256, 1 << 40, "filo") == simulated_hits(chunks, 256, blocks, "filo") > 0


class PlainCache:
    """An LRU cache of whole prefixes, as a list of blocks from the most to the least recent."""

    def __init__(self, capacity):
        self.capacity, self.blocks = capacity, []

    def serve(self, path, reusable, has_partial):
        hit = 0
        while hit < reusable and path[hit] in self.blocks:
            hit += 1
        is_copied = not has_partial and len(path) > reusable and path[-1] in self.blocks
        held = [block for block in self.blocks if block not in path[:hit]]
        needed = len(path) - hit + has_partial
        while len(held) + hit + needed > self.capacity:
            held.pop()
        is_copied = is_copied and path[-1] in held
        held = [block for block in held if not (is_copied and block == path[-1])]
        self.blocks = [*path, *held]
        return hit


@pytest.mark.parametrize("seed", range(4))
def test_stack_distances_equal_plain_caches_of_every_capacity(seed):
    random = np.random.default_rng(seed)
    paths, alive = [], [()]
    for _ in range(150):
        path = alive[random.integers(len(alive))][: random.integers(0, 9)]
        path = (*path, *random.integers(0, 3, random.integers(1, 3)).tolist())[:9]
        alive.append(path)
        paths.append(path)
    named = {}
    blocks = [[named.setdefault(path[: i + 1], len(named)) for i in range(len(path))] for path in paths]
    partial = random.integers(0, 2, len(paths)).astype(np.uint8)
    reusable = np.array([len(path) - 1 + has for path, has in zip(paths, partial, strict=True)], np.int64)
    starts = np.concatenate([[0], np.cumsum([len(path) for path in paths])])
    capacities = range(10, len(named) + 3)
    stack = Stack(1.0, capacities)
    flat = np.array([block for path in blocks for block in path], np.int32)
    hits, distinct = stack.add(flat, starts, np.zeros(len(paths), np.int64), reusable, partial)
    assert distinct[-1] == len(named)
    for column, capacity in enumerate(capacities):
        cache = PlainCache(capacity)
        expected = [cache.serve(*each) for each in zip(blocks, reusable.tolist(), partial.tolist(), strict=True)]
        assert hits[:, column].tolist() == expected
        assert np.cumsum(stack.hits())[min(capacity, len(stack.hits()) - 1)] == sum(expected)


def test_the_stack_compacts_and_keeps_its_order():
    random = np.random.default_rng(0)
    whole, parts = Stack(1.0, [8, 64]), Stack(1.0, [8, 64])
    blocks = np.sort(random.integers(0, 90, (4000, 4)), axis=1).astype(np.int32)
    blocks += np.arange(4, dtype=np.int32) * 90
    starts = np.arange(0, 4001 * 4, 4)
    rest = np.zeros(4000, np.int64), np.full(4000, 4), np.ones(4000, np.uint8)
    hits, _ = whole.add(blocks.reshape(-1), starts, *rest)
    again = [
        parts.add(blocks[i : i + 1].reshape(-1), np.array([0, 4]), *(each[i : i + 1] for each in rest))[0]
        for i in range(4000)
    ]
    assert (np.concatenate(again) == hits).all()
    assert (whole.hits() == parts.hits()).all()
    assert hits.sum() > 0


@pytest.mark.slow
def test_samples_estimate_the_curve(tmp_path):
    random = np.random.default_rng(1)
    lines = []
    for _ in range(6000):  # Zipf: documents of 20 blocks, some far more often asked for
        document = min(int(random.zipf(1.3)), 3000)
        lines.append(
            f'{{"timestamp": 0, "input_length": 640, "output_length": 1, "hash_ids": [{document}, {document}]}}'
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    capacities = [500, 2000, 8000, 20_000, 40_000]
    exact = lru_hits(list(read_requests(path, 32)), 32, capacities).blocks
    sampled = sampled_hits(read_requests(path, 32, rate=0.1), capacities, 0.1).blocks
    lookups = 6000 * 19
    errors = np.abs(exact - sampled) / lookups
    assert errors[0] < 0.06  # 50 blocks of the sample
    assert errors[1:].max() < 0.02
    assert exact[-1] / lookups > 0.5


def test_numbers_are_dense_and_stable():
    hashes = np.random.default_rng(0).integers(0, 2**63, 5000).astype(np.uint64)
    numbers = Numbers()
    assert (numbers.of(hashes) == np.arange(5000)).all()
    assert (numbers.of(hashes[::-1].copy()) == np.arange(5000)[::-1]).all()
    sample = Numbers(0.25).of(hashes)
    assert 0.22 < (sample >= 0).mean() < 0.28
    assert (sample[sample >= 0] == np.arange((sample >= 0).sum())).all()


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="different numbers"):
        Stack().add(np.zeros(1, np.int32), np.zeros(3, np.int64), *(np.zeros(1, np.int64),) * 2, np.zeros(1, np.uint8))
    with pytest.raises(ValueError, match="do not ascend"):
        Stack().add(np.zeros(1, np.int32), np.array([0, 2]), *(np.zeros(1, np.int64),) * 2, np.zeros(1, np.uint8))


def test_tiers_are_inclusive_caches(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", 7)
    block = 512 * TOKEN_BYTES
    options = WhatIfOptions(
        memory=200 * block,
        block_sizes=(512,),
        bytes_per_token=TOKEN_BYTES,
        tiers={"GPU": 13 * block, "CPU": 30 * block, "DISK": 200 * block},
    )
    result = what_if(path, options)
    hits = [replayed(path, 512, size).prefix_hit_tokens for size in options.tiers.values()]
    assert [tier.hit_tokens for tier in result.tiers] == [hits[0], hits[1] - hits[0], hits[2] - hits[1]]
    assert [tier.medium for tier in result.tiers] == ["GPU", "CPU", "DISK"]
    assert all(tier.hit_tokens > 0 for tier in result.tiers)


@pytest.mark.parametrize(
    "listed",
    [[100_000_000, "8MB", "8MB"], "100MB,8000000", (8_000_000, "100MB"), range(8_000_000, 100_000_001, 92_000_000)],
    ids=repr,
)
def test_a_list_of_sizes_has_the_hits_of_each(tmp_path, listed):
    path = mooncake(tmp_path / "trace.jsonl", 7)

    def hits(memory):
        (curve,) = what_if(path, WhatIfOptions(memory=memory, block_sizes=(512,), bytes_per_token=TOKEN_BYTES)).curves
        return curve.memory, curve.hit_tokens

    singles = [hits(size) for size in (8_000_000, 100_000_000)]
    assert hits(listed) == tuple([one[i][0] for one in singles] for i in range(2))
    assert singles[0][1] != singles[1][1]


def test_policies_are_simulated_at_each_size_of_a_list(tmp_path):
    sizes = list(range(8_000_000, 90_000_000, 5_000_000))
    options = WhatIfOptions(memory=sizes, block_sizes=(512,), bytes_per_token=TOKEN_BYTES, policies=("lfu",))
    assert what_if(mooncake(tmp_path / "trace.jsonl", 7), options).curves[0].memory == sizes


@pytest.mark.parametrize("memory", [[], ["x"], "1GB,", [1, "1GB..2GB"]], ids=repr)
def test_lists_that_have_no_sizes_are_refused(memory):
    with pytest.raises(ShapeError, match="memory is"):
        WhatIfOptions(memory=memory)


def test_the_summary_counts_the_trace(tmp_path):
    path = mooncake(tmp_path / "trace.jsonl", 7)
    options = WhatIfOptions(
        memory="10MB..1GB", points=9, block_sizes=(512, 128), policies=("lru", "lfu"), bytes_per_token=TOKEN_BYTES
    )
    result = what_if(path, options)
    unbounded = replayed(path, 512, 10**9)
    assert result.unbounded_hit_rate == unbounded.prefix_token_hit_rate
    assert result.prompt_tokens == unbounded.prompt_tokens
    assert result.num_requests == 80
    assert [(c.policy, c.block_size, c.method) for c in result.curves] == [
        ("lru", 512, "exact"),
        ("lfu", 512, "simulated"),
        ("lru", 128, "exact"),
        ("lfu", 128, "simulated"),
    ]
    assert result.curves[0].hit_rate == sorted(result.curves[0].hit_rate)
    timeline = result.timeline
    assert timeline.num_blocks[-1] * 512 * TOKEN_BYTES == result.unbounded_memory
    assert len(timeline.hit_rates) == len(result.timeline_memory)
