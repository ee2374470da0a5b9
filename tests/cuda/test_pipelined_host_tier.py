"""Loads of a pipelined host tier on CUDA: each layer is waited for alone."""

from __future__ import annotations

import threading

import pytest

from tests.cuda.caches import block_bytes, poison, requests_of
from tests.cuda.host_tiers import LAYERS, back_up_and_forget, computed, ended, make, tier_of


def loading(cuda, cache):
    """Return a pipelined tier that loads 12 tokens, which the cache had computed and forgotten."""
    tier = tier_of(cache, pipelined=True)
    back_up_and_forget(cuda, cache, tier)
    assert tier.promote(range(13)) == 12
    return tier


def test_two_threads_can_wait_for_layers_at_once(cuda, monkeypatch):
    cache = make(cuda, LAYERS[:2])
    tier = loading(cuda, cache)
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


def test_layers_compute_while_later_layers_load(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator counts waits")
    cache = make(cuda)
    tier = tier_of(cache, pipelined=True)
    sequence, _ = computed(cuda, cache, range(13))
    cuda.runtime.synchronize(0)
    before = block_bytes(cuda, cache, sequence)
    tier.backup(sequence)
    ended(tier)
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
    tier = loading(cuda, cache)
    other = tier_of(cache, pipelined=True)
    assert requests_of(cuda, lambda: cache.key(0)).get("waits") == 1
    assert requests_of(cuda, tier.wait_for_loads).get("waits") == 1
    for one in (tier, other):
        ended(one)
        one.close()


def test_other_work_waits_for_every_layer(cuda):
    if not cuda.is_emulated:
        pytest.skip("only the emulator counts waits")
    cache = make(cuda, LAYERS[:2])
    tier = loading(cuda, cache)
    spent = requests_of(cuda, tier.wait_for_loads)
    assert spent.get("waits") == 2
    assert requests_of(cuda, tier.wait_for_loads) == {}
    ended(tier)
    tier.close()
