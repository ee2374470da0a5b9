"""Tiers of a replay: host memory, a disk and a remote store, real or counted, and the time that loads take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from pagecore.cache import PagedKVCache
from pagecore.errors import NotEnoughMemory
from pagecore.serving.replay.simulated_store import SimulatedStore
from pagecore.serving.replay.tier_options import TierPlace
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.stats import TierStats
from pagecore.tiers.manager.tiers import Tiers
from pagecore.tiers.store import BlockStore, Medium

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ReplayTiers", "TierReport"]

# The option of each medium.
MEDIUM_OPTIONS = {"CPU": "host", "DISK": "disk", "EXTERNAL": "remote"}
# A disk store of a replay takes at most this share of the free space of its folder.
DISK_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """Tiers of a replay.

    `host_blocks` are those of the largest group, and `host_states` the slots of recurrent states, null ones included; 0
    if the model has none. Bytes are those of the modelled machine; with attend, those that were moved. `hit_tokens` are
    the prompt tokens that were reused, by medium: "GPU", "CPU", "DISK" and "EXTERNAL". Tokens that preempted requests
    found when they returned are included. `read_bytes` and `written_bytes` are by medium, too; reads of "CPU" are
    promotions, writes of "CPU" backups. `modelled_s` is the time of the reads at the given bandwidths, by medium, and
    `waited_s` the measured time for which requests waited for stores.
    """

    host_blocks: int
    host_states: int
    hit_tokens: dict[str, int]
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    requests: int
    late_requests: int
    failed_entries: int
    evicted_host_blocks: int
    evicted_host_states: int
    modelled_s: dict[str, float]
    waited_s: float


class ReplayTiers:
    """Host tier and stores of the cache of a replay.

    Parameters
    ----------
    cache : PagedKVCache
    num_blocks : list of int
        Blocks of each group of the host, the null block counted; empty for a cache whose layers all keep states.
    num_states : int or None
        State slots of the host, the null slot counted.
    disk, remote : TierPlace or None
    scale : float
        Bytes of an entry of the modelled machine over its bytes in the cache.
    bandwidth : mapping of str to float
        Bytes per second of "host", "disk" and "remote".
    trace_bytes : int
        Bytes that all blocks of the trace take, for the size of a disk store.
    seed : int
        Seed of the keys and values: stores keep those of another seed apart.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        num_blocks: list[int],
        num_states: int | None,
        disk: TierPlace | None,
        remote: TierPlace | None,
        *,
        scale: float,
        bandwidth: Mapping[str, float],
        trace_bytes: int,
        seed: int,
    ) -> None:
        self._scale = scale
        self._bandwidth = bandwidth
        self._waited_s = self._modelled_s = 0.0
        fingerprint = Fingerprint.of(cache, model=f"pagecore replay, seed {seed}")
        stores: list[BlockStore] = []
        host = HostTier(cache, num_blocks=num_blocks or None, num_states=num_states)
        try:
            places: tuple[tuple[Medium, TierPlace | None], ...] = (("DISK", disk), ("EXTERNAL", remote))
            for medium, place in places:
                if place is not None:
                    stores.append(self._open(medium, place, fingerprint, trace_bytes))
            # Host and stores of given sizes keep what the device evicts: they add to it. One that has room for the
            # whole trace takes all that is published.
            has_room = any(place is not None and place.nbytes is None for _, place in places)
            self._tiers = Tiers(
                cache,
                host,
                stores,
                fingerprint=fingerprint,
                write="through" if has_room else "on_evict",
                min_tokens=cache.block_size,
            )
        except BaseException:
            for store in stores:
                store.close()
            host.close()
            raise

    def fetch(self, prompt: NDArray[np.int32], namespace: str | None = None) -> None:
        """Load what the stores have of a prompt into the host, and wait for it."""
        start = perf_counter()
        request = self._tiers.wait(self._tiers.request(prompt, namespace=namespace))
        request.release()
        self._waited_s += perf_counter() - start

    def poll(self) -> None:
        """Take the ends of writes."""
        self._tiers.poll()

    def reading_time(self) -> float:
        """Return the seconds that the reads since the last call take at the given bandwidths."""
        if not self._bandwidth:
            return 0.0
        before, self._modelled_s = self._modelled_s, sum(self._reading_times(self._read_bytes()).values())
        return self._modelled_s - before

    def stats(self) -> TierStats:
        """Return the statistics of the tiers so far."""
        return self._tiers.stats()

    def close(self) -> None:
        """Close stores and host; a second call does nothing."""
        self._tiers.close()

    def report(self) -> TierReport:
        """Return the report of the replay, after all writes have ended."""
        self._tiers.drain()
        stats = self._tiers.stats()
        host, requests = stats.host, stats.requests
        read, num_groups = self._read_bytes(), self._tiers.host.num_groups
        written = {"CPU": round(self._tiers.host.backed_up_bytes * self._scale)}
        failed = 0
        for store in self._tiers.stores:
            counted = requests.stores[store.name]
            written[store.medium] = round(counted.bytes_stored * self._scale)
            failed += counted.num_load_failures + counted.num_store_failures
        return TierReport(
            host_blocks=max(self._tiers.host.num_blocks[:num_groups], default=0),
            host_states=self._tiers.host.num_blocks[-1] if self._tiers.host.num_lanes > num_groups else 0,
            hit_tokens=stats.hit_tokens,
            read_bytes=read,
            written_bytes=written,
            requests=requests.num_requests,
            late_requests=requests.num_late,
            failed_entries=failed,
            evicted_host_blocks=host.num_evicted_blocks,
            evicted_host_states=host.num_evicted_states,
            modelled_s=self._reading_times(read),
            waited_s=self._waited_s,
        )

    def _read_bytes(self) -> dict[str, int]:
        """Return the bytes of the modelled machine that were read from each medium so far."""
        read = {"CPU": round(self._tiers.host.promoted_bytes * self._scale)}
        for store in self._tiers.stores:
            read[store.medium] = round(store.stats().bytes_loaded * self._scale)
        return read

    def _reading_times(self, read: dict[str, int]) -> dict[str, float]:
        """Return the seconds that reads take, of each medium with a bandwidth."""
        names = {medium: MEDIUM_OPTIONS[medium] for medium in read}
        return {
            medium: nbytes / self._bandwidth[names[medium]]
            for medium, nbytes in read.items()
            if names[medium] in self._bandwidth
        }

    def _open(self, medium: Medium, place: TierPlace, fingerprint: Fingerprint, trace_bytes: int) -> BlockStore:
        if place.target is None:
            nbytes = None if place.nbytes is None else int(place.nbytes / self._scale)
            return SimulatedStore(medium, nbytes, fingerprint if medium == "DISK" else None)
        if medium == "DISK":
            return _open_disk(Path(place.target), fingerprint, trace_bytes)
        return _open_remote(place.target, fingerprint)


def _open_disk(folder: Path, fingerprint: Fingerprint, trace_bytes: int) -> BlockStore:
    """Return a disk store that holds the trace, if the folder has twice the room."""
    from pagecore.tiers.disk import DiskStore

    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = int(shutil.disk_usage(existing).free * DISK_SHARE)
    # Entries are aligned, and files begin with their tables.
    needed = max(trace_bytes * 5 // 4, 1 << 20)
    if room < 1 << 20:
        raise NotEnoughMemory(
            f"disk {folder} has {2 * room} bytes free; a replay needs 2 MiB: free space or use another"
        )
    return DiskStore(folder, fingerprint=fingerprint, max_bytes=min(needed, room))


def _open_remote(url: str, fingerprint: Fingerprint) -> BlockStore:
    """Return the store of a URL: Redis or Valkey, or else an object store."""
    if url.startswith(("redis://", "rediss://", "valkey://", "valkeys://", "unix://")):
        from pagecore.tiers.remote.resp.store import RespStore

        return RespStore(url, fingerprint=fingerprint)
    from pagecore.tiers.remote.objects import ObjectStore

    return ObjectStore(url, fingerprint=fingerprint)
