"""Helpers for tests of caches on CUDA, and a cache that takes host arrays, for the state machines of host caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pagecore import KVPool, PagedKVCache
from tests.cache.swaps import poison_of
from tests.cuda.kit import Kit


class DeviceCache(PagedKVCache):
    """A cache on a device whose `write` and `attend` take host arrays; `attend` returns a host array."""

    def __init__(self, cuda: Kit, layers: Any, **options: Any) -> None:
        super().__init__(layers, **options, device=cuda.device)
        self.cuda = cuda

    def write(self, layer, key, value, batch, **options):
        super().write(layer, self.cuda.put(key), self.cuda.put(value), batch, **options)

    def attend(self, layer, query, batch, **options):
        parts = tuple(map(self.cuda.put, query)) if isinstance(query, tuple) else self.cuda.put(query)
        return self.cuda.get(super().attend(layer, parts, batch, **options))


# Counters of the emulator that count runtime calls; the others count the work of kernels.
CALLS = ("allocations", "pinned_allocations", "copies", "fills", "launches", "records", "waits", "synchronizes")
CALLS += ("event_synchronizes", "loads")


def requests_of(cuda: Kit, work: Callable[[], object]) -> dict[str, int]:
    """Return the number of runtime calls that `work` makes, by name; empty on a GPU, which does not count them."""
    if not cuda.is_emulated:
        work()
        return {}
    before = cuda.runtime.counts.copy()
    work()
    return {
        name: cuda.runtime.counts[name] - before[name] for name in CALLS if cuda.runtime.counts[name] > before[name]
    }


def on_host(cuda: Kit, pool: KVPool) -> KVPool:
    """Copy a pool to the host."""
    buffers = [cuda.get(buffer) for buffer in pool.buffers]
    return KVPool(pool.spec, pool.num_layers, pool.num_blocks, pool.block_size, pool.layout, buffers=buffers)


def poison(cuda: Kit, cache: PagedKVCache, number: float = np.nan) -> None:
    """Overwrite every free block of a cache and of its swap spaces, so that a read of one shows."""
    stores = [(space.block_pools, space.kv_pools) for space in cache._parts.swap_spaces]
    for pools, kv_pools in ((cache._parts.tables.pools, cache._parts.store.pools), *stores):
        for pool, kv_pool in zip(pools, kv_pools, strict=True):
            free = pool.ref_counts() == 0
            free[0] = False
            copy = on_host(cuda, kv_pool)
            for plane in copy.planes():
                plane.numpy()[free] = poison_of(plane.numpy().dtype, number)
            for target, source in zip(kv_pool.buffers, copy.buffers, strict=True):
                cuda.runtime.copy(target.pointer, source.pointer, source.nbytes, 0)
    cuda.runtime.synchronize(0)


class DeviceBytes:
    """Access of a walk or a state machine to the bytes of its cache on a device: `self.cache`."""

    kit: Kit
    cache: Any

    def poison(self) -> None:
        poison(self.kit, self.cache)

    def read(self, tensor: Any) -> Any:
        return self.kit.get(tensor)

    def put(self, plane: Any, slot: Any, values: Any) -> None:
        values = np.ascontiguousarray(values)
        self.kit.runtime.copy(plane[int(slot)].pointer, values.ctypes.data, values.nbytes, 0)
        self.kit.runtime.synchronize(0)


def run_machine(machine, cuda: Kit, examples: int, steps: int, more=lambda layers, **options: {}) -> None:
    """Run a state machine of the host cache against a cache on a device; `more` returns further cache options."""

    class OnDevice(DeviceBytes, machine):
        kit = cuda

        def make_cache(self, layers, **options):
            return DeviceCache(cuda, layers, **options, **more(layers, **options))

    limits = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(OnDevice, settings=settings(max_examples=examples, stateful_step_count=steps, **limits))


def random_step(cuda: Kit, cache, count, seed=0):
    """Return random keys and values of one step, a pair for each layer."""
    random = np.random.default_rng(seed)
    sides = [(cache.key(layer), cache.value(layer)) for layer in range(cache.num_layers)]
    return [[cuda.put(random.normal(size=(count, *s.shape[2:])).astype(np.float32)) for s in pair] for pair in sides]


def write_step(cache, sequences, counts, arrays, stream=None):
    """Write `arrays` in one step; return its batch, which the caller keeps alive until the stream is done."""
    batch = cache.prepare(sequences, counts, stream=stream)
    for layer, (key, value) in enumerate(arrays):
        cache.write(layer, key, value, batch, stream=stream)
    cache.commit(batch)
    return batch


def block_bytes(cuda: Kit, cache, sequence):
    """Return the bytes of each computed block of a sequence, a list for each plane; None for a hole."""
    found = []
    for group, pool in enumerate(cache._parts.store.pools):
        row = cache._parts.tables.blocks(sequence.row, group)[: -(-sequence.num_computed_tokens // cache.block_size)]
        planes = [plane.numpy() for plane in on_host(cuda, pool).planes()]
        found += [[plane[block].tobytes() if block else None for block in row] for plane in planes]
    return found


def assert_device_tables(cuda: Kit, cache, batch=None, stream=0):
    """Assert that tables and batch on the device equal those of the host, after all work of `stream`."""
    cuda.runtime.synchronize(stream)
    for group in range(cache.num_groups):
        np.testing.assert_array_equal(cuda.get(cache.block_table(group)), cache._parts.tables.table(group))
    np.testing.assert_array_equal(cuda.get(cache.row_lengths), cache._parts.tables.row_lengths)
    if batch is not None:
        assert_device_batch(cuda, batch)


def assert_device_batch(cuda: Kit, batch):
    """Assert that the arrays of a batch on the device equal those of its host side."""
    for field in fields(batch.host):
        expected = getattr(batch.host, field.name)
        if field.name == "slot_mappings":
            for layer, slots in enumerate(expected):
                np.testing.assert_array_equal(cuda.get(batch.group(layer).slot_mapping), slots.numpy())
        elif field.name == "states":
            for name in fields(expected) if expected else ():
                if (array := getattr(expected, name.name)) is not None:
                    np.testing.assert_array_equal(cuda.get(getattr(batch, name.name)), array.numpy(), err_msg=name.name)
        elif expected is not None:  # the bits of trees, of a batch without room for any
            np.testing.assert_array_equal(cuda.get(getattr(batch, field.name)), expected.numpy(), err_msg=field.name)
