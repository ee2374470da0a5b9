"""Statistics of a cache with tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagecore.tiers.host.methods.records import HostStats
from pagecore.tiers.store import StoreStats

__all__ = ["RequestStats", "StreamStats", "TierStats"]


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Counters of prefixes that pass through the host because it has no room for them.

    Attributes
    ----------
    num_streams : int
        Prefixes, or parts of them, whose blocks were streamed to the stores.
    num_stored_blocks : int
        Blocks of the prefix that one store at least has taken, each with the entries of all groups.
    bytes_stored : int
        Bytes of their entries.
    num_loaded_blocks, bytes_loaded : int
        Blocks and bytes that stores loaded and that were published on the device.
    num_dropped_blocks : int
        Blocks that were not stored: the device had lost them, a copy failed, no store took them, or the host had no
        block to lease.
    num_leased_blocks, num_open : int
        Leased blocks, and streams to the stores that have not ended.
    """

    num_streams: int = 0
    num_stored_blocks: int = 0
    bytes_stored: int = 0
    num_loaded_blocks: int = 0
    bytes_loaded: int = 0
    num_dropped_blocks: int = 0
    num_leased_blocks: int = 0
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Counters of the requests and stores of a cache with tiers.

    Attributes
    ----------
    num_requests, num_ready, num_late, num_open, num_retiring : int
        Requests made, those that ended in each way, those that have not ended, and those that have ended while stores
        still hold memory for them.
    loaded_tokens : dict
        Tokens of ended requests that were loaded, by medium.
    stores : dict
        Counters of each store, by name.
    """

    num_requests: int = 0
    num_ready: int = 0
    num_late: int = 0
    num_open: int = 0
    num_retiring: int = 0
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    stores: dict[str, StoreStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of `Tiers`.

    Attributes
    ----------
    hit_tokens : dict
        Tokens of prompts that were reused, by medium: "GPU" for the blocks of the cache, whatever its device; "CPU" for
        tokens that were promoted and had not just been loaded; "DISK" and "EXTERNAL" for tokens that requests loaded.
        Each sequence counts once, in its first step or when it is copied before it.
    host : HostStats
    requests : RequestStats
    streams : StreamStats
    """

    hit_tokens: dict[str, int]
    host: HostStats
    requests: RequestStats
    streams: StreamStats = field(default_factory=StreamStats)
