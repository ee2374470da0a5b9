"""Names of the metrics, and their values from one reading.

The names of vLLM and SGLang are those that published dashboards query. A counter's name gets the suffix ``_total``, and
a histogram's the suffixes ``_bucket``, ``_count`` and ``_sum``, as Prometheus prescribes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pagecore.cache import CacheStats
from pagecore.cache.inspect.block_life import DurationHistogram
from pagecore.serving.scheduling.figures import SchedulerFigures

__all__ = ["FAMILIES", "Family", "Reading", "Value"]

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Reading:
    """Everything that one scrape reads; `host`, `requests` and `streams` are of `TierStats`, None without tiers."""

    figures: SchedulerFigures
    stats: CacheStats
    lives: Mapping[str, DurationHistogram] = field(default_factory=dict)
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    host: Any = None
    requests: Any = None
    streams: Any = None


# A number, a histogram, or a number for each value of the family's own label; None: the metric does not apply.
Value = float | DurationHistogram | Mapping[str, float] | None


@dataclass(frozen=True)
class Family:
    """One metric: its name, kind, help text, function of a reading, and own label, if it has one."""

    name: str
    kind: Kind
    help: str
    value: Callable[[Reading], Value]
    label: str | None = None


def _life(name: str) -> Callable[[Reading], Value]:
    return lambda reading: reading.lives.get(name)


def _lives(prefix: str) -> Iterator[Family]:
    texts = {
        "lifetime": "Seconds from caching a block to its eviction, of sampled blocks.",
        "idle_before_evict": "Seconds from the last use of a cached block to its eviction, of sampled blocks.",
        "reuse_gap": "Seconds between two uses of a cached block, of sampled blocks.",
    }
    for name, text in texts.items():
        yield Family(f"{prefix}block_{name}_seconds", "histogram", text, _life(name))


def _states(reading: Reading) -> Value:
    stats = reading.stats
    if not stats.num_states:
        return None
    return {"free": stats.num_free_states, "held": stats.num_states - stats.num_free_states}


def _checkpoints(reading: Reading) -> Value:
    stats = reading.stats
    if not stats.num_checkpoints:
        return None
    return {"free": stats.num_free_checkpoints, "held": stats.num_checkpoints - stats.num_free_checkpoints}


def _blocks(reading: Reading) -> Value:
    stats = reading.stats
    return {"free": stats.num_free_blocks, "used": stats.num_used_blocks, "evictable": stats.num_evictable_blocks}


def _of_host(name: str) -> Callable[[Reading], Value]:
    return lambda reading: None if reading.host is None else getattr(reading.host, name)


def _of_stores(name: str) -> Callable[[Reading], Value]:
    def read(reading: Reading) -> Value:
        stores = {} if reading.requests is None else reading.requests.stores
        return {store: getattr(stats, name) for store, stats in stores.items()} or None

    return read


def _ended_requests(reading: Reading) -> Value:
    requests = reading.requests
    return None if requests is None else {"ready": requests.num_ready, "late": requests.num_late}


def _of_streams(stored: str, loaded: str) -> Callable[[Reading], Value]:
    def read(reading: Reading) -> Value:
        streams = reading.streams
        return None if streams is None else {"store": getattr(streams, stored), "load": getattr(streams, loaded)}

    return read


def _drafts(name: str) -> Callable[[Reading], Value]:
    """Return a function for a figure of drafts; it does not apply before the first step with drafts."""

    def read(reading: Reading) -> Value:
        speculation = reading.figures.speculation
        value: Value = getattr(speculation, name)
        return value if speculation.num_drafts else None

    return read


def _draft_positions(reading: Reading) -> Value:
    counts = reading.figures.speculation.accepted_per_position
    return {str(place): count for place, count in enumerate(counts)} or None


VLLM = (
    Family(
        "vllm:num_requests_running",
        "gauge",
        "Sequences that run; samples of a request count one by one.",
        lambda r: r.figures.num_running,
    ),
    Family(
        "vllm:num_requests_waiting",
        "gauge",
        "Requests in the queue, preempted requests included.",
        lambda r: r.figures.num_waiting,
    ),
    Family(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the blocks that sequences use; 1 is all of them.",
        lambda r: r.stats.utilization,
    ),
    Family(
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens of admitted requests.",
        lambda r: r.figures.reuse.prefix_query_tokens,
    ),
    Family(
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens of admitted requests that were cached.",
        lambda r: r.figures.reuse.prefix_hit_tokens,
    ),
    Family("vllm:num_preemptions", "counter", "Preemptions.", lambda r: r.figures.num_preemptions),
    Family("vllm:spec_decode_num_drafts", "counter", "Rows with drafts that were verified.", _drafts("num_drafts")),
    Family("vllm:spec_decode_num_draft_tokens", "counter", "Drafts verified.", _drafts("num_draft_tokens")),
    Family("vllm:spec_decode_num_accepted_tokens", "counter", "Drafts accepted.", _drafts("num_accepted_tokens")),
    Family(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Drafts accepted, by their position after the last token of the run.",
        _draft_positions,
        "position",
    ),
    *_lives("vllm:kv_"),
)

SGLANG = (
    Family("sglang:num_running_reqs", "gauge", "Sequences that run.", lambda r: r.figures.num_running),
    Family("sglang:num_queue_reqs", "gauge", "Requests in the queue.", lambda r: r.figures.num_waiting),
    Family("sglang:token_usage", "gauge", "Share of the cache in use, in blocks.", lambda r: r.stats.utilization),
    Family(
        "sglang:cache_hit_rate",
        "gauge",
        "Share of the prompt tokens so far that were cached.",
        lambda r: r.figures.reuse.token_hit_rate,
    ),
    Family(
        "sglang:new_token_ratio",
        "gauge",
        "Share of its remaining tokens that admission reserves for each run.",
        lambda r: r.figures.new_token_ratio,
    ),
    Family(
        "sglang:spec_accept_length",
        "gauge",
        "Tokens that a row with drafts gains on average, the model's own included.",
        _drafts("mean_tokens"),
    ),
    Family("sglang:spec_accept_rate", "gauge", "Share of the drafts that was accepted.", _drafts("acceptance_rate")),
)

_HOST = (
    Family("pagecore_host_blocks", "gauge", "Blocks of the host tier.", _of_host("num_blocks")),
    Family(
        "pagecore_host_cached_blocks", "gauge", "Blocks that the host tier has cached.", _of_host("num_cached_blocks")
    ),
    Family(
        "pagecore_host_evicted_blocks", "counter", "Blocks that the host tier evicted.", _of_host("num_evicted_blocks")
    ),
    Family(
        "pagecore_host_promoted_tokens",
        "counter",
        "Tokens promoted from the host to the device.",
        _of_host("num_promoted_tokens"),
    ),
    Family(
        "pagecore_host_backed_up_blocks",
        "counter",
        "Blocks copied from the device to the host.",
        _of_host("num_backed_up_blocks"),
    ),
    Family("pagecore_host_failed_copies", "counter", "Promotions and backups that failed.", _of_host("num_failed")),
    Family(
        "pagecore_host_pending_copies", "gauge", "Copies between host and device that run.", _of_host("num_pending")
    ),
)
_STORES = (
    Family("pagecore_store_lookups", "counter", "Entries that were looked up.", _of_stores("num_lookups"), "store"),
    Family("pagecore_store_found", "counter", "Entries that a look-up found.", _of_stores("num_found"), "store"),
    Family("pagecore_store_loaded", "counter", "Entries that were loaded.", _of_stores("num_loaded"), "store"),
    Family(
        "pagecore_store_load_failures",
        "counter",
        "Entries whose load failed.",
        _of_stores("num_load_failures"),
        "store",
    ),
    Family("pagecore_store_stored", "counter", "Entries that were stored.", _of_stores("num_stored"), "store"),
    Family(
        "pagecore_store_store_failures",
        "counter",
        "Entries that could not be stored.",
        _of_stores("num_store_failures"),
        "store",
    ),
    Family("pagecore_store_removed", "counter", "Keys that were deleted.", _of_stores("num_removed"), "store"),
    Family("pagecore_store_loaded_bytes", "counter", "Bytes that were loaded.", _of_stores("bytes_loaded"), "store"),
    Family("pagecore_store_stored_bytes", "counter", "Bytes that were stored.", _of_stores("bytes_stored"), "store"),
    Family("pagecore_store_pending", "gauge", "Batches that have not ended.", _of_stores("num_pending"), "store"),
)

PAGECORE = (
    Family("pagecore_running", "gauge", "Sequences that run.", lambda r: r.figures.num_running),
    Family("pagecore_waiting", "gauge", "Requests in the queue.", lambda r: r.figures.num_waiting),
    Family(
        "pagecore_waiting_tokens",
        "gauge",
        "Tokens that the queued requests have to compute.",
        lambda r: r.figures.num_waiting_tokens,
    ),
    Family("pagecore_loading", "gauge", "Requests in the queue that wait for a load.", lambda r: r.figures.num_loading),
    Family("pagecore_idle", "gauge", "Sequences between two turns.", lambda r: r.figures.num_idle),
    Family(
        "pagecore_block_utilization", "gauge", "Share of the blocks that sequences use.", lambda r: r.stats.utilization
    ),
    Family("pagecore_blocks", "gauge", "Blocks of all groups by state.", _blocks, "state"),
    Family(
        "pagecore_cached_blocks", "gauge", "Blocks that the prefix cache holds.", lambda r: r.stats.num_cached_blocks
    ),
    Family(
        "pagecore_fragmentation",
        "gauge",
        "Share of the slots in used blocks without a token.",
        lambda r: r.stats.fragmentation,
    ),
    Family("pagecore_tokens", "gauge", "Computed tokens of all sequences.", lambda r: r.stats.num_tokens),
    Family("pagecore_swapped_blocks", "gauge", "Blocks in swap spaces.", lambda r: r.stats.num_swapped_blocks),
    Family("pagecore_state_slots", "gauge", "Slots of recurrent states by state.", _states, "state"),
    Family("pagecore_checkpoint_slots", "gauge", "Slots of quantised checkpoints by state.", _checkpoints, "state"),
    Family("pagecore_preemptions", "counter", "Preemptions.", lambda r: r.figures.num_preemptions),
    Family(
        "pagecore_reclaimed",
        "counter",
        "Sequences between two turns that gave their blocks up.",
        lambda r: r.figures.num_reclaimed,
    ),
    Family("pagecore_swaps", "counter", "Preemptions that swapped the run out.", lambda r: r.figures.num_swaps),
    Family(
        "pagecore_refused_requests",
        "counter",
        "Requests that a full queue refused.",
        lambda r: r.figures.num_refused,
    ),
    Family(
        "pagecore_displaced_requests",
        "counter",
        "Waiting requests that gave their places in a full queue to larger priorities.",
        lambda r: r.figures.num_displaced,
    ),
    Family(
        "pagecore_forks", "counter", "Samples forked from the first of their request.", lambda r: r.figures.num_forks
    ),
    Family(
        "pagecore_prefix_query_tokens",
        "counter",
        "Prompt tokens of requests at their first admission.",
        lambda r: r.figures.reuse.prefix_query_tokens,
    ),
    Family(
        "pagecore_prefix_hit_tokens",
        "counter",
        "Prompt tokens of requests that were cached at their first admission.",
        lambda r: r.figures.reuse.prefix_hit_tokens,
    ),
    Family(
        "pagecore_recovered_tokens",
        "counter",
        "Tokens that preempted requests found cached when they returned.",
        lambda r: r.figures.reuse.num_recovered_tokens,
    ),
    Family("pagecore_evicted_blocks", "counter", "Blocks evicted.", lambda r: r.stats.num_evicted_blocks),
    Family("pagecore_evicted_states", "counter", "Recurrent states evicted.", lambda r: r.stats.num_evicted_states),
    Family("pagecore_copied_blocks", "counter", "Blocks copied on write.", lambda r: r.stats.num_copied_blocks),
    Family("pagecore_drafts", "counter", "Rows with drafts that were verified.", _drafts("num_drafts")),
    Family("pagecore_draft_tokens", "counter", "Drafts that were verified.", _drafts("num_draft_tokens")),
    Family("pagecore_accepted_tokens", "counter", "Drafts that were accepted.", _drafts("num_accepted_tokens")),
    *_lives("pagecore_"),
    Family(
        "pagecore_tier_hit_tokens",
        "counter",
        "Prompt tokens that were reused, by the medium that had them.",
        lambda r: r.hit_tokens or None,
        "medium",
    ),
    *_HOST,
    Family("pagecore_tier_requests", "counter", "Requests for prefixes by their end.", _ended_requests, "state"),
    Family(
        "pagecore_tier_open_requests",
        "gauge",
        "Requests for prefixes that have not ended.",
        lambda r: None if r.requests is None else r.requests.num_open,
    ),
    Family(
        "pagecore_tier_streamed_blocks",
        "counter",
        "Blocks that passed through the host because it had no room for them.",
        _of_streams("num_stored_blocks", "num_loaded_blocks"),
        "direction",
    ),
    Family(
        "pagecore_tier_streamed_bytes",
        "counter",
        "Bytes of the blocks that passed through the host.",
        _of_streams("bytes_stored", "bytes_loaded"),
        "direction",
    ),
    Family(
        "pagecore_tier_unstreamed_blocks",
        "counter",
        "Blocks that were to pass through the host to the stores and did not.",
        lambda r: None if r.streams is None else r.streams.num_dropped_blocks,
    ),
    *_STORES,
)

FAMILIES: Mapping[str, tuple[Family, ...]] = MappingProxyType({"vllm": VLLM, "sglang": SGLANG, "pagecore": PAGECORE})
