"""The exporter: names and values of scheduler, cache and tiers."""

import re
from contextlib import suppress

import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.serving.prometheus import Exporter
from pagecore.serving.scheduling.request import QueueFull, Request
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.tiers.disk.store import DiskStore
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers as CachedTiers
from tests.capabilities import require
from tests.serving.prometheus.kit import SPEC, STATES, Tiers, samples, scheduler, scraped, used_scheduler
from tests.serving.runs import drain, request

client = require("prometheus_client")
parser = require("prometheus_client.parser")


def test_values_are_those_of_scheduler_and_cache():
    made = used_scheduler()
    values, stats, reuse = scraped(made), made.cache.stats(), made.reuse
    assert made.num_preemptions > 0
    assert stats.num_evicted_blocks > 0
    assert reuse.prefix_hit_tokens > 0
    expected = {
        "vllm:num_requests_running": 1,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": stats.utilization,
        "vllm:prefix_cache_queries_total": reuse.prefix_query_tokens,
        "vllm:prefix_cache_hits_total": reuse.prefix_hit_tokens,
        "vllm:num_preemptions_total": made.num_preemptions,
        "sglang:token_usage": stats.utilization,
        "sglang:cache_hit_rate": reuse.token_hit_rate,
        "sglang:num_running_reqs": 1,
        "sglang:num_queue_reqs": 0,
        "pagecore_running": 1,
        "pagecore_waiting_tokens": 0,
        "pagecore_preemptions_total": made.num_preemptions,
        "pagecore_evicted_blocks_total": stats.num_evicted_blocks,
        "pagecore_prefix_hit_tokens_total": reuse.prefix_hit_tokens,
        "pagecore_recovered_tokens_total": reuse.num_recovered_tokens,
        "pagecore_fragmentation": stats.fragmentation,
        "pagecore_tokens": stats.num_tokens,
    }
    assert {name: values[name,] for name in expected} == pytest.approx(expected)
    blocks = {state: values["pagecore_blocks", ("state", state)] for state in ("free", "used", "evictable")}
    assert blocks == {
        "free": stats.num_free_blocks,
        "used": stats.num_used_blocks,
        "evictable": stats.num_evictable_blocks,
    }
    assert sum(blocks.values()) == 23


def test_requests_that_a_full_queue_refuses_and_displaces_are_counted():
    cache = PagedKVCache(SPEC, num_blocks=24, device="none")
    made = Scheduler(cache, policy="priority", max_queued=1)
    for number, priority in enumerate((0, 0, 1, 0)):
        with suppress(QueueFull):
            made.add(Request(number, [1, 2], 1, priority=priority))
    values = scraped(made)
    assert (values["pagecore_refused_requests_total",], values["pagecore_displaced_requests_total",]) == (2, 1)


def test_drafts_are_counted_under_the_names_of_each_engine():
    made = scheduler()
    assert not {name for name, *_ in scraped(made) if "spec_" in name or "draft" in name or "accepted" in name}
    for number in range(2):
        made.add(request(number, 4, 9))
    for accepted in ([], [2, 4], [1, 2]):
        step = made.schedule(3)
        made.commit(step, accepted or [1, 1])
        made.accept(step, [[number] * count for number, count in enumerate(accepted or [1, 1])])
    values = scraped(made)
    expected = {
        "vllm:spec_decode_num_drafts_total": 4,
        "vllm:spec_decode_num_draft_tokens_total": 12,
        "vllm:spec_decode_num_accepted_tokens_total": 5,
        "sglang:spec_accept_length": 2.25,
        "sglang:spec_accept_rate": 5 / 12,
        "pagecore_drafts_total": 4,
        "pagecore_draft_tokens_total": 12,
        "pagecore_accepted_tokens_total": 5,
    }
    assert {name: values[name,] for name in expected} == pytest.approx(expected)
    by_position = [values["vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", str(k))] for k in range(3)]
    assert by_position == [3, 1, 1]


def test_histograms_count_the_lives_of_blocks_under_each_name():
    made = scheduler()
    registry = client.CollectorRegistry()
    with Exporter(made, registry, block_share=1):
        for number in range(12):
            made.add(request(number, 24, 20, shared=12))
        drain(made)
        values = samples(registry)
    evicted = made.cache.stats().num_evicted_blocks
    assert evicted > 0
    for prefix in ("vllm:kv_block", "pagecore_block"):
        for name in ("lifetime", "idle_before_evict"):
            assert values[f"{prefix}_{name}_seconds_count",] >= evicted
            assert values[f"{prefix}_{name}_seconds_bucket", ("le", "+Inf")] >= evicted
        assert values[f"{prefix}_reuse_gap_seconds_count",] > 0


@pytest.mark.parametrize("names", ["vllm", ["sglang"], ("pagecore", "vllm", "vllm")])
def test_only_the_chosen_names_are_exported(names):
    chosen = {names} if isinstance(names, str) else set(names)
    found = {re.match("[a-z]+", key[0])[0] for key in scraped(used_scheduler(), names=names)}
    assert found == chosen


def test_labels_are_on_every_sample():
    values = scraped(used_scheduler(), labels={"model_name": "m", "engine": "0"}, tiers=Tiers(CPU=1))
    assert values
    assert all({("model_name", "m"), ("engine", "0")} <= set(key) for key in values)


def pass_through(tiers):
    """Store a prompt that the host has no room for, and load it."""
    prompt = range(1000, 1061)
    with tiers.add_sequence(prompt) as sequence:
        tiers.cache.commit(tiers.cache.prepare([sequence], 61))
    assert tiers.drain(30)
    tiers.cache.clear_prefix_cache()
    tiers.host.clear()
    tiers.wait(tiers.request(prompt, deadline=30), 30).release()


def test_counters_of_tiers_are_those_of_their_statistics(tmp_path):
    made = scheduler(num_blocks=24)
    cache = made.cache
    fingerprint = Fingerprint.of(cache, model="metrics")
    disk = DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=8 << 20)
    # A patient guard: a busy machine is not a fault.
    store = Guard(disk, deadline=Deadline(30.0), breaker=Breaker(failures=100))
    with CachedTiers(cache, HostTier(cache, num_blocks=12), [store], fingerprint=fingerprint, min_tokens=1) as tiers:
        pass_through(tiers)
        for number in range(8):
            made.add(request(number, 24, 2, shared=12))
            drain(made)
        assert tiers.drain(30)
        tiers.wait(tiers.request(list(range(50)), deadline=30), 30)
        values, stats = scraped(made, tiers=tiers), tiers.stats()
        host, (stored,) = stats.host, stats.requests.stores.values()
        name = next(iter(stats.requests.stores))
        assert values["pagecore_host_blocks",] == 11
        assert values["pagecore_host_cached_blocks",] == host.num_cached_blocks > 0
        assert values["pagecore_host_evicted_blocks_total",] == host.num_evicted_blocks
        assert values["pagecore_host_backed_up_blocks_total",] == host.num_backed_up_blocks > 0
        assert values["pagecore_host_promoted_tokens_total",] == host.num_promoted_tokens
        assert values["pagecore_host_failed_copies_total",] == values["pagecore_host_pending_copies",] == 0
        assert values["pagecore_tier_requests_total", ("state", "ready")] == stats.requests.num_ready == 2
        assert values["pagecore_tier_open_requests",] == 0
        streams = stats.streams
        for direction, blocks, nbytes in (
            ("store", streams.num_stored_blocks, streams.bytes_stored),
            ("load", streams.num_loaded_blocks, streams.bytes_loaded),
        ):
            assert values["pagecore_tier_streamed_blocks_total", ("direction", direction)] == blocks > 0
            assert values["pagecore_tier_streamed_bytes_total", ("direction", direction)] == nbytes > 0
        assert values["pagecore_tier_unstreamed_blocks_total",] == streams.num_dropped_blocks
        assert values["pagecore_store_stored_total", ("store", name)] == stored.num_stored > 0
        assert values["pagecore_store_stored_bytes_total", ("store", name)] == stored.bytes_stored > 0
        assert values["pagecore_store_lookups_total", ("store", name)] == stored.num_lookups > 0
        assert values["pagecore_store_load_failures_total", ("store", name)] == 0
        assert sum(key[0].startswith("pagecore_store_") for key in values) == 10


def test_hits_of_tiers_are_counted_by_medium():
    made = used_scheduler()
    values = scraped(made, tiers=Tiers(GPU=70, CPU=20, DISK=10))
    found = {medium: values["pagecore_tier_hit_tokens_total", ("medium", medium)] for medium in ("GPU", "CPU", "DISK")}
    assert found == {"GPU": 70, "CPU": 20, "DISK": 10}
    assert not any(key[0].startswith("pagecore_tier") for key in scraped(made))


def test_the_ratio_of_future_tokens_is_exported_if_admissions_use_it():
    made = Scheduler(
        PagedKVCache(AttentionSpec(1, 8), num_blocks=9, device="none"), new_token_ratio=0.7, conservativeness=0.5
    )
    assert scraped(made)["sglang:new_token_ratio",] == made.new_token_ratio == 0.35


def test_metrics_that_do_not_apply_are_left_out():
    names = {key[0] for key in scraped(scheduler(prefix_cache=False))}
    assert not {name for name in names if "lifetime" in name or "new_token_ratio" in name or "state_slots" in name}


def test_state_slots_are_counted_by_state():
    values = scraped(scheduler([SPEC, STATES], num_states=9))
    assert {state: values["pagecore_state_slots", ("state", state)] for state in ("free", "held")} == {
        "free": 8,
        "held": 0,
    }


def test_slots_of_quantised_checkpoints_are_counted_by_state():
    plane = Plane("temporal", (2, 2), "float32", per="sequence")
    quantised = StateSpec((plane,), chunk=4, interval=8, checkpoint_format="int8")
    made = scheduler([SPEC, quantised], num_states=9, num_checkpoints=7)
    sequence = made.cache.add_sequence(range(12))
    made.cache.commit(made.cache.prepare([sequence], 10))
    values = scraped(made)
    for family, expected in (("pagecore_state_slots", (7, 1)), ("pagecore_checkpoint_slots", (5, 1))):
        assert tuple(values[family, ("state", state)] for state in ("free", "held")) == expected
    assert not any("checkpoint" in key[0] for key in scraped(scheduler([SPEC, STATES], num_states=9)))
