"""Caches on CUDA that take and give host arrays, so that the tests of the host's caches drive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagecore import KVPool, PagedKVCache
from tests.cuda.kit import Kit


class DeviceCache(PagedKVCache):
    """A cache on a device; `write` puts host arrays there, `attend` brings the result back."""

    def __init__(self, cuda: Kit, layers: Any, **options: Any) -> None:
        super().__init__(layers, **options, device=cuda.device)
        self.cuda = cuda

    def write(self, layer, key, value, batch, **options):
        super().write(layer, self.cuda.put(key), self.cuda.put(value), batch, **options)

    def attend(self, layer, query, batch, **options):
        return self.cuda.get(super().attend(layer, self.cuda.put(query), batch, **options))


# What a runtime is asked for, of all that the emulator counts.
CALLS = ("allocations", "pinned_allocations", "copies", "fills", "launches", "records", "waits", "synchronizes")
CALLS += ("event_synchronizes", "loads")


def requests_of(cuda: Kit, work: Callable[[], object]) -> dict[str, int]:
    """Return which calls of the runtime some work makes, and how many; none are seen where the device is a real one."""
    if not cuda.is_emulated:
        work()
        return {}
    before = cuda.runtime.counts.copy()
    work()
    return {
        name: cuda.runtime.counts[name] - before[name] for name in CALLS if cuda.runtime.counts[name] > before[name]
    }


def on_host(cuda: Kit, pool: KVPool) -> KVPool:
    """A copy of a pool."""
    buffers = [cuda.get(buffer) for buffer in pool.buffers]
    return KVPool(pool.spec, pool.num_layers, pool.num_blocks, pool.block_size, pool.layout, buffers=buffers)


def poison(cuda: Kit, cache: PagedKVCache, number: float = np.nan) -> None:
    """Overwrite every block of a cache and of its swap spaces that nobody holds: none may be seen again."""
    stores = [(space.block_pools, space.kv_pools) for space in cache._parts.swap_spaces]
    for pools, kv_pools in ((cache._parts.tables.pools, cache._parts.store.pools), *stores):
        for pool, kv_pool in zip(pools, kv_pools, strict=True):
            free = pool.ref_counts() == 0
            free[0] = False
            copy = on_host(cuda, kv_pool)
            for plane in copy.planes():
                plane.numpy()[free] = np.asarray(number).astype(plane.numpy().dtype)
            for target, source in zip(kv_pool.buffers, copy.buffers, strict=True):
                cuda.runtime.copy(target.pointer, source.pointer, source.nbytes, 0)
    cuda.runtime.synchronize(0)
