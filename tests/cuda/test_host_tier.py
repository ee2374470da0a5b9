"""The host tier of a cache on CUDA: backups on a stream of their own, promotions in the order of the cache's stream."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    PagedKVCache,
    StateSpec,
    SwapSpace,
    UnsupportedOption,
    dequantize_state,
    quantize_state,
)
from pagecore.cache.state._state import Held
from pagecore.cache.swap import _swap
from pagecore.errors import DeviceError, InvalidBlock
from pagecore.storage.memory.host_memory import HostMemory
from pagecore.storage.pools import host_pool
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.cuda.caches import block_bytes, on_host, poison, random_step, requests_of, write_step

LAYERS = [AttentionSpec(2, 8, dtype="float32", num_query_heads=4)] * 2
LAYERS += [AttentionSpec(1, 16, 4, dtype="bfloat16", num_query_heads=2, window=6)]
WIDE = [AttentionSpec(8, 128, dtype="float32")]  # a plane of a block of 16 tokens has 64 KiB


def make(cuda, layers=LAYERS, **options):
    sizes = {"block_size": 4, "num_blocks": 20, "max_sequences": 4}
    return PagedKVCache(layers, **sizes | options, device=cuda.device)


def tier_of(cache, **options):
    tier = HostTier(cache, num_blocks=20, huge_pages=False, **options)
    assert tier.pool.memory.wait_registered(60)
    return tier


def computed(cuda, cache, ids, seed=0):
    sequence = cache.add_sequence(ids)
    left = sequence.num_tokens - sequence.num_computed_tokens
    return sequence, write_step(cache, [sequence], left, random_step(cuda, cache, left, seed=seed))


@pytest.mark.parametrize("io", ["auto", "dma", "kernel"])
@pytest.mark.parametrize("layout", [None, "blockwise"])
def test_a_prefix_comes_back_bit_for_bit(cuda, layout, io):
    cache = make(cuda, layout=layout)
    tier = tier_of(cache, io=io)
    sequence, _ = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    assert tier.backup(sequence) > 0
    cache.check_invariants()
    tier.check_invariants()
    assert tier.drain()
    (ended,) = tier.poll()
    assert (ended.start, ended.stop, ended.error) == (0, 12, None)
    cache.remove(sequence)
    cache.clear_prefix_cache()
    poison(cuda, cache)
    assert tier.promote(range(13)) == 12
    cache.check_invariants()
    again = cache.add_sequence(range(13))
    assert again.num_cached_tokens == 12
    cuda.runtime.synchronize(0)
    assert tier.poll() == []
    tier.check_invariants()
    for old, new in zip(before, block_bytes(cuda, cache, again), strict=True):
        both = [(one, two) for one, two in zip(old, new, strict=False) if one is not None and two is not None]
        assert both
        assert all(one == two for one, two in both)
    tier.close()


@pytest.mark.parametrize("io", ["dma", "kernel"])
@pytest.mark.parametrize("number", [-1, 0, 12, 99])
def test_blocks_that_a_caller_names_are_checked_before_a_copy(cuda, io, number):
    """A copy engine would copy bytes next to the pool."""
    cache = make(cuda, LAYERS[:1], num_blocks=12)
    tier = tier_of(cache, io=io)
    before = planes_of(cuda, cache), tier.pool.memory.tensor("cpu").numpy().copy()
    good, bad = [2, 1], [3, number]
    with pytest.raises(InvalidBlock, match=f"target of pair 1 is {number} .* 12 blocks; expected 1 to 11 "):
        tier.load_to_device_per_layer(0, good, bad)
    with pytest.raises(InvalidBlock, match=f"source of pair 1 is {number} .* 12 blocks; expected 1 to 11 "):
        tier.backup_from_device_all_layers(bad, good)
    number += 8 * (number == 12)  # the host has 20 blocks
    with pytest.raises(InvalidBlock, match=f"source of pair 1 is {number} .* 20 blocks; expected 1 to 19 "):
        tier.load_to_device_per_layer(0, [3, number], good)
    with pytest.raises(InvalidBlock, match=f"target of pair 1 is {number} .* 20 blocks; expected 1 to 19 "):
        tier.backup_from_device_all_layers(good, [3, number])
    cuda.runtime.synchronize(0)
    assert planes_of(cuda, cache) == before[0]
    np.testing.assert_array_equal(tier.pool.memory.tensor("cpu").numpy(), before[1])
    tier.close()


def test_copies_by_dma_cross_no_border_of_registered_chunks(cuda, monkeypatch):
    """Of adjacent blocks in memory that is registered block by block, or two by two."""
    for limit in (4096, 8192):
        monkeypatch.setattr(host_pool, "CHUNK_BYTES", limit)
        cache = make(cuda, LAYERS[:2])
        tier = tier_of(cache, io="dma")
        assert len(tier.pool.chunk_starts(0)) == 81920 // limit - 1
        sequence, _ = computed(cuda, cache, range(33))
        before = block_bytes(cuda, cache, sequence)
        assert tier.backup(sequence) > 0
        assert tier.drain()
        assert tier.poll()[0].error is None
        cache.remove(sequence)
        cache.clear_prefix_cache()
        poison(cuda, cache)
        assert tier.promote(range(33)) == 32
        again = cache.add_sequence(range(33))
        cuda.runtime.synchronize(0)
        tier.poll()
        for old, new in zip(before, block_bytes(cuda, cache, again), strict=True):
            assert [one == other for one, other in zip(old[:8], new[:8], strict=True)] == [True] * 8
        tier.close()


def test_adjacent_blocks_go_in_one_copy_for_each_plane(cuda):
    cache = make(cuda, LAYERS[:2], num_blocks=40)
    tier = tier_of(cache, io="dma")
    sequence, _ = computed(cuda, cache, range(65))
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    if spent:
        assert spent["copies"] == 4, "key and value of two layers, 16 blocks each"
    tier.drain()
    tier.close()


def test_large_fragments_go_by_dma(cuda):
    cache = make(cuda, WIDE, block_size=16, num_blocks=4)
    tier = HostTier(cache, num_blocks=4, huge_pages=False)
    assert tier.pool.memory.wait_registered(60)
    sequence, _ = computed(cuda, cache, range(33))
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    if spent:
        assert spent["copies"] == 2, "two blocks, each of two planes"
        assert "launches" not in spent
    tier.drain()
    tier.poll()
    assert tier.match(range(33)) == 32
    tier.close()


def test_copies_run_in_order_and_the_host_does_not_wait(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, kept = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    cuda.runtime.streams.deferred = True
    spent = requests_of(cuda, lambda: tier.backup(sequence))
    assert tier.match(range(13)) == 0, "published when the copy is done, not before"
    assert tier.poll() == []
    cache.remove(sequence)
    assert cache.clear_prefix_cache() == 0, "the copy pins the device's blocks"
    cache.check_invariants()
    tier.check_invariants()
    assert tier.drain()
    assert len(tier.poll()) == 1
    assert cache.clear_prefix_cache() == 3
    other, more = computed(cuda, cache, range(100, 160), seed=1)  # overwrites every block
    cache.remove(other)
    spent |= requests_of(cuda, lambda: tier.promote(range(13)))
    assert not {"synchronizes", "event_synchronizes"} & set(spent)
    assert tier.stats().num_pending == 1
    tier.clear()
    assert tier.match(range(13)) == 12, "the copy pins the host's blocks"
    again = cache.add_sequence(range(13))
    cuda.runtime.streams.deferred = False
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, again)[0][:3] == before[0][:3]
    tier.poll()
    assert tier.stats().num_pending == 0
    tier.clear()
    assert tier.match(range(13)) == 0
    tier.close()
    del kept, more


def test_a_backup_does_not_repeat_copies_that_have_ended(cuda):
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, first = computed(cuda, cache, range(8))
    assert tier.backup(sequence) == 2
    assert tier.drain()
    cache.append_tokens([sequence], [range(8, 16)])
    second = write_step(cache, [sequence], 8, random_step(cuda, cache, 8, seed=1))
    assert tier.backup(sequence) == 2, "the call publishes what has ended"
    assert tier.drain()
    assert [(ended.start, ended.stop) for ended in tier.poll()] == [(0, 8), (8, 16)]
    assert tier.match(range(17)) == 16
    tier.check_invariants()
    tier.close()
    del first, second


def test_copies_that_run_are_queried_once_a_call(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cache = make(cuda, LAYERS[:1], num_blocks=40, max_sequences=8)
    tier = tier_of(cache)
    made = [computed(cuda, cache, range(50 * i, 50 * i + 8), seed=i) for i in range(8)]
    cuda.runtime.finish()
    cuda.runtime.streams.deferred = True
    before = cuda.runtime.counts["event_queries"]
    for sequence, _ in made:
        tier.backup(sequence)
    assert tier.stats().num_pending == 8
    assert cuda.runtime.counts["event_queries"] - before == 7, (
        "one stream has all copies: only the first of those that run is queried"
    )
    cuda.runtime.streams.deferred = False
    assert tier.drain()
    assert len(tier.poll()) == 8
    tier.check_invariants()
    tier.close()


def test_a_backup_in_a_capture_is_refused_before_the_capture_ends(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator begins a capture here")
    cuda.runtime.stream = stream = cuda.runtime.make_stream(0)
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence, max_tokens=8)
    assert tier.stats().num_pending == 1
    cuda.runtime.finish()
    cuda.runtime.streams.begin_capture(stream)
    with pytest.raises(DeviceError, match="is being captured"):
        tier.backup(sequence)
    cuda.runtime.streams.end_capture(stream)
    assert tier.backup(sequence) == 1
    assert tier.drain()
    tier.poll()
    tier.close()
    del kept


CALLS = {
    "promote": lambda tier: tier.promote(range(13)),
    "load": lambda tier: tier.load_to_device_per_layer(0, [1], [2]),
    "back up": lambda tier: tier.backup_from_device_all_layers([1], [2]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_capture_does_not_wait_for_a_registration_that_waits_for_its_end(cuda, monkeypatch, call):
    if not cuda.is_emulated:
        pytest.skip("only the emulator begins a capture here")
    cuda.runtime.stream = stream = cuda.runtime.make_stream(0)
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence)
    cache.remove(sequence)
    assert tier.drain()
    tier.poll()
    cache.clear_prefix_cache()
    cuda.runtime.streams.begin_capture(stream)
    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers, "_is_ready", False)
        patch.setattr(HostMemory, "is_registered", lambda *_: False)
        patch.setattr(HostMemory, "wait_registered", lambda *_: pytest.fail("the call waits"))
        with pytest.raises(DeviceError, match="is being captured"):
            CALLS[call](tier)
    cuda.runtime.streams.end_capture(stream)
    CALLS[call](tier)
    cuda.runtime.synchronize(stream)
    tier.poll()
    tier.check_invariants()
    tier.close()
    del kept


@pytest.mark.parametrize("call", ["backup", "spill", "promote"])
def test_a_call_that_fails_after_some_copies_waits_for_them(cuda, monkeypatch, call):
    """Its blocks are free again: what others write there would be overwritten by a copy that comes later."""
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=call == "promote")
    sequence, kept = computed(cuda, cache, range(13))
    if call == "promote":
        tier.backup(sequence)
        assert tier.drain()
        tier.poll()
    if call != "backup":
        cache.remove(sequence)
    if call == "promote":
        cache.clear_prefix_cache()
    cuda.runtime.finish()
    cuda.runtime.streams.deferred = True
    record = tier._transfers._recorded
    calls = {
        "backup": lambda: tier.backup(sequence),
        "spill": lambda: tier.spill([3]),
        "promote": lambda: tier.promote(range(13)),
    }

    records = []

    def recorded(stream):
        if len(records) == (call == "promote"):  # a load records an event before the first layer
            raise DeviceError("planted")
        records.append(record(stream))
        return records[-1]

    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers, "_recorded", recorded)
        with pytest.raises(DeviceError, match="planted"):
            calls[call]()
    tier.pool.memory.tensor("cpu").numpy()[...] = 7
    poison(cuda, cache)
    before = planes_of(cuda, cache)
    cuda.runtime.finish()
    assert (tier.pool.memory.tensor("cpu").numpy() == 7).all()
    assert planes_of(cuda, cache) == before
    cache.check_invariants()
    tier.check_invariants()
    tier.close()
    del kept


def test_later_steps_wait_for_a_load_whose_publication_failed(cuda, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence)
    assert tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    cuda.runtime.finish()
    cuda.runtime.streams.deferred = True
    promote = tier._transfers.promote

    def fails(pairs, hold):
        promote(pairs, hold)
        raise DeviceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers, "promote", fails)
        with pytest.raises(DeviceError, match="planted"):
            tier.promote(range(13))
    poison(cuda, cache)
    before = planes_of(cuda, cache)
    cuda.runtime.finish()
    assert planes_of(cuda, cache) == before
    tier.poll()
    tier.check_invariants()
    tier.close()
    del kept


@pytest.mark.parametrize("call", ["promote", "deliver"])
@pytest.mark.parametrize("error", [DeviceError, KeyboardInterrupt])
def test_no_thread_takes_the_blocks_of_a_failed_load_before_steps_wait_for_it(cuda, monkeypatch, call, error):
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence)
    assert tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    promote, await_arrivals, state = tier._transfers.promote, cache._parts.store.await_arrivals, cache._parts.state
    locked, others = [], []

    def fails(pairs, hold):
        promote(pairs, hold)
        raise error("planted")

    def take_lock():
        with Held(state.lock):
            locked.append("another thread")

    def waits():
        others.append(threading.Thread(target=take_lock))
        others[0].start()
        others[0].join(0.05)
        await_arrivals()
        locked.append("this thread")

    monkeypatch.setattr(tier._transfers, "promote", fails)
    monkeypatch.setattr(cache._parts.store, "await_arrivals", waits)
    lease = tier.reserve([[0, 1, 2]])
    load = {
        "promote": partial(tier.promote, range(13)),
        "deliver": partial(tier.deliver, lease, range(13), ok=[[True] * 3]),
    }
    with pytest.raises(error, match="planted"):
        load[call]()
    lease.release()
    others[0].join()
    assert locked == ["this thread", "another thread"]
    assert tier.stats().num_failed == 1
    tier.drain()
    tier.poll()
    tier.check_invariants()
    tier.close()
    del kept


def test_two_threads_can_wait_for_layers_at_once(cuda, monkeypatch):
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    sequence, kept = computed(cuda, cache, range(13))
    tier.backup(sequence)
    assert tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    assert tier.promote(range(13)) == 12
    arrivals, wait_event, others, waited = cache._parts.store.arrivals, cuda.runtime.wait_event, [], []

    def waits(stream, event):
        if not others:
            others.append(threading.Thread(target=arrivals.wait_all))
            others[0].start()
            others[0].join(0.05)
        waited.append(event)
        wait_event(stream, event)

    monkeypatch.setattr(cuda.runtime, "wait_event", waits)
    arrivals.wait_all()
    others[0].join()
    assert len(waited) == 2
    tier.drain()
    tier.close()
    del kept


def test_a_lease_waits_for_the_copies_of_a_swap_that_failed(cuda, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("only the emulator runs work as late as possible")
    cache = make(cuda, LAYERS[:1])
    tier = tier_of(cache)
    space = SwapSpace(cache, host=tier)
    sequence, kept = computed(cuda, cache, range(13))
    cuda.runtime.finish()
    cuda.runtime.streams.deferred = True
    transfer, planes = _swap.transfer_blocks, []

    def fails(*arrays, **options):
        planes.append(arrays)
        if len(planes) == 2:
            raise DeviceError("planted")
        transfer(*arrays, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_swap, "transfer_blocks", fails)
        with pytest.raises(DeviceError, match="planted"):
            cache.swap_out([sequence], space)
    with tier.reserve([range(4)]):
        tier.pool.memory.tensor("cpu").numpy()[...] = 7
        cuda.runtime.finish()
        assert (tier.pool.memory.tensor("cpu").numpy() == 7).all()
    cache.check_invariants()
    tier.check_invariants()
    tier.close()
    del kept


def planes_of(cuda, cache):
    """Return the bytes of all planes of a cache."""
    return [plane.numpy().tobytes() for pool in cache._parts.store.pools for plane in on_host(cuda, pool).planes()]


def test_tiers_serve_more_than_the_device_holds(cuda):
    cache = make(cuda, LAYERS[:1], num_blocks=9)
    tiers = Tiers(cache, tier_of(cache), write="on_evict", min_tokens=4)
    first, _ = computed(cuda, cache, range(21))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, first)
    cache.remove(first)
    other, _ = computed(cuda, cache, range(100, 128), seed=1)
    cache.remove(other)
    assert tiers.drain()
    tiers.poll()
    assert cache.match_length(range(21)) == 20
    again = cache.add_sequence(range(21))
    assert again.num_cached_tokens == 20
    cuda.runtime.synchronize(0)
    assert block_bytes(cuda, cache, again)[0][:5] == before[0][:5]
    tiers.poll()
    tiers.check_invariants()
    tiers.close()


def test_states_come_back(cuda):
    layers = [StateSpec(delta_planes(2, 4, 8, 8), chunk=4, interval=8), LAYERS[0]]
    cache = make(cuda, layers, num_states=6)
    tier = tier_of(cache)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 8)
    slot = int(cuda.get(batch.checkpoint_write)[0])
    planes = [cache.plane(plane.name, 0) for plane in layers[0].planes]
    for number, plane in enumerate(planes):
        cuda.runtime.fill(plane[slot].pointer, number + 1, plane[slot].nbytes, 0)
    cache.commit(batch)
    tier.backup(sequence)
    tier.drain()
    assert tier.poll()[0].state_tokens == 8
    cache.remove(sequence)
    cache.clear_prefix_cache()
    assert tier.promote(range(9)) == 8
    again = cache.add_sequence(range(9))
    cuda.runtime.synchronize(0)
    found = cache.state_slot(again)
    for number, plane in enumerate(planes):
        assert (cuda.get(plane[found]).view(np.uint8) == number + 1).all()
    tier.poll()
    tier.close()


def test_quantised_states_come_back(cuda):
    planes = delta_planes(2, 4, 8, 8)
    layers = [StateSpec(planes, chunk=4, interval=8, checkpoint_format="int8"), LAYERS[0]]
    cache = make(cuda, layers, num_states=6, num_checkpoints=5)
    tier = tier_of(cache)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 8)
    state = np.random.default_rng(0).standard_normal(planes[1].shape).astype(np.float32)
    for slots in (batch.state_write, batch.checkpoint_write):
        slot = int(cuda.get(slots)[0])
        cuda.runtime.copy(cache.plane("temporal", 0)[slot].pointer, state.ctypes.data, state.nbytes, 0)
    cache.commit(batch)
    tier.backup(sequence)
    tier.drain()
    assert tier.poll()[0].state_tokens == 8
    cache.remove(sequence)
    cache.clear_prefix_cache()
    for name in ("temporal", "temporal_scale"):
        plane = cache.checkpoint_plane(name, 0)
        cuda.runtime.fill(plane.pointer, 0xFF, plane.nbytes, 0)
    assert tier.promote(range(9)) == 8
    again = cache.add_sequence(range(9))
    batch = cache.prepare([again], 1)
    found = cuda.get(cache.plane("temporal", 0)[int(cuda.get(batch.state_read)[0])])
    np.testing.assert_array_equal(found, dequantize_state(*quantize_state(state)))
    cache.abandon(batch)
    tier.poll()
    tier.close()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("format", [None, "int8"])
def test_tiers_serve_more_states_than_a_cache_of_states_alone_holds(cuda, format, pipelined):
    planes = delta_planes(2, 4, 8, 8)
    layers = [StateSpec(planes, chunk=4, interval=8, checkpoint_format=format)] * 3
    slots = {"num_states": 7} if format is None else {"num_states": 4, "num_checkpoints": 4}
    cache = PagedKVCache(layers, block_size=4, max_sequences=2, device=cuda.device, **slots)
    host = HostTier(cache, num_states=20, huge_pages=False, pipelined=pipelined)
    assert host.pool.memory.wait_registered(60)
    tiers = Tiers(cache, host, write="on_evict", min_tokens=4)
    states = np.random.default_rng(0).standard_normal((8, 3, *planes[1].shape)).astype(np.float32)
    for turn in range(2):
        for prompt in range(8):
            sequence = cache.add_sequence(range(50 * prompt, 50 * prompt + 17 + turn))
            assert sequence.num_computed_tokens == 16 * turn
            batch = cache.prepare([sequence], 17 - 15 * turn)
            read, *written = (
                int(cuda.get(each)[0]) for each in (batch.state_read, batch.state_write, batch.checkpoint_write)
            )
            for layer in range(3):
                state, plane = states[prompt, layer], cache.plane("temporal", layer)
                if turn:
                    expected = state if format is None else dequantize_state(*quantize_state(state))
                    np.testing.assert_array_equal(cuda.get(plane[read]), expected)
                    continue
                for slot in written:
                    cuda.runtime.copy(plane[slot].pointer, state.ctypes.data, state.nbytes, 0)
            cache.commit(batch)
            cache.remove(sequence)
            assert tiers.drain()
            tiers.poll()
    assert tiers.stats().hit_tokens["CPU"] >= 16 * 4
    tiers.check_invariants()
    tiers.close()


def test_io_is_checked(cuda):
    with pytest.raises(UnsupportedOption, match="kernel"):
        HostTier(make(cuda), num_blocks=4, io="copy")


def test_layers_compute_while_later_layers_load(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator counts waits")
    cache = make(cuda)
    tier = tier_of(cache, pipelined=True)
    sequence, _ = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    tier.backup(sequence)
    tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    poison(cuda, cache)
    cuda.runtime.streams.deferred = True
    assert tier.promote(range(13)) == 12
    again = cache.add_sequence(range(13))
    batch = cache.prepare([again], 1)
    waits = [requests_of(cuda, lambda layer=layer: cache.key(layer)).get("waits", 0) for layer in (0, 0, 1, 2)]
    assert waits == [1, 0, 1, 1], "each layer is waited for once"
    cache.abandon(batch)
    tier.wait_for_loads()
    cuda.runtime.streams.deferred = False
    cuda.runtime.synchronize(0)
    after = block_bytes(cuda, cache, again)
    assert [each[:3] for each in after[:4]] == [each[:3] for each in before[:4]]
    tier.poll()
    tier.check_invariants()
    tier.close()


def test_a_later_pipelined_tier_leaves_the_loads_of_an_earlier_one_to_wait_for(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator counts waits")
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    sequence, _ = computed(cuda, cache, range(13))
    tier.backup(sequence)
    tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    tier.promote(range(13))
    other = tier_of(cache, pipelined=True)
    assert requests_of(cuda, lambda: cache.key(0)).get("waits") == 1
    assert requests_of(cuda, tier.wait_for_loads).get("waits") == 1
    for one in (tier, other):
        one.drain()
        one.poll()
        one.close()


def test_other_work_waits_for_every_layer(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator counts waits")
    cache = make(cuda, LAYERS[:2])
    tier = tier_of(cache, pipelined=True)
    sequence, _ = computed(cuda, cache, range(13))
    tier.backup(sequence)
    tier.drain()
    tier.poll()
    cache.remove(sequence)
    cache.clear_prefix_cache()
    tier.promote(range(13))
    spent = requests_of(cuda, tier.wait_for_loads)
    assert spent.get("waits") == 2
    assert requests_of(cuda, tier.wait_for_loads) == {}
    tier.drain()
    tier.poll()
    tier.close()
