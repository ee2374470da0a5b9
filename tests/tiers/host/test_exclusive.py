"""Tiers that keep what the device evicts: hits like one LRU of both sizes, every eviction saved, stores written."""

from collections import OrderedDict

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache import SwapSpace
from pagecore.errors import DeviceError
from pagecore.tiers.host.operations._operations import save_victims
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.events.following import FULL, STATE
from tests.tiers.host.caches import cached, serve
from tests.tiers.memory_store import MemoryStore

SPANS = [(1, 7, b"cat"), (9, 11, -5)]


def chats(seed, count, chats, most):
    """Yield prompts of chats that grow by a turn each time they are asked."""
    random = np.random.default_rng(seed)
    histories = {}
    for _ in range(count):
        chat = int(random.zipf(1.3)) % chats
        history = histories.setdefault(chat, [7, 7, 7, 7, chat * 1000])
        history += random.integers(1, 2**30, int(random.integers(1, 12))).tolist()
        yield np.array(history, np.int32)
        if len(history) > most:
            del histories[chat]


def plain_lru(prompts, num_blocks, block_size):
    """Return the hit tokens of one LRU list of blocks, which gives up the end of a prefix before its beginning."""
    kept, hits = OrderedDict(), 0
    for ids in prompts:
        keys = [ids[:end].tobytes() for end in range(block_size, len(ids) + 1, block_size)]
        reusable = keys[: (len(ids) - 1) // block_size]
        found = next((index for index, key in enumerate(reusable) if key not in kept), len(reusable))
        hits += found * block_size
        for key in reversed(keys):
            kept[key] = True
            kept.move_to_end(key)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize(
    ("block_size", "device", "host"),
    [(1, 1000, 3000), (1, 2000, 1000), (1, 300, 900), (4, 250, 750), (4, 500, 250), (16, 100, 300), (16, 60, 500)],
)
def test_a_spilling_tier_hits_like_one_lru_of_both_sizes(block_size, device, host):
    prompts = list(chats(0, 1000, 400, 200))
    cache = cached(device + 1, block_size=block_size, max_sequences=2)
    with Tiers(cache, HostTier(cache, num_blocks=host + 1), write="on_evict", min_tokens=1) as tiers:
        hits = sum(serve(cache, ids) for ids in prompts)
        tiers.check_invariants()
        assert hits == pytest.approx(plain_lru(prompts, device + host, block_size), rel=0.01)


def test_a_copying_tier_hits_like_one_lru_of_its_own_size():
    hits = []
    for sizes in [(300, 900), (900, 0)]:
        cache = cached(sizes[0] + 1, block_size=1, max_sequences=2)
        tiers = Tiers(cache, HostTier(cache, num_blocks=sizes[1] + 1), min_tokens=1) if sizes[1] else None
        hits.append(sum(serve(cache, ids) for ids in chats(0, 800, 200, 150)))
        if tiers is not None:
            tiers.close()
    assert hits[0] == hits[1]


def spilling(num_blocks=9, host=41, **options):
    cache = cached(num_blocks, **options)
    return cache, Tiers(cache, HostTier(cache, num_blocks=host), write="on_evict", min_tokens=1)


def test_the_end_of_a_path_waits_for_its_beginning():
    cache, tiers = spilling()
    serve(cache, range(32))  # fills the device
    serve(cache, range(100, 112))  # takes the last three blocks of the first prompt
    assert tiers.host.stats().num_cached_blocks == 0
    assert (tiers.host._index.tail.num_device_tokens, len(tiers.host._index.tail.tokens)) == (20, 32)
    assert tiers.host.num_leases == 0
    tiers.check_invariants()
    serve(cache, range(200, 220))  # the rest of it
    assert tiers.host.stats().num_cached_blocks == 8
    assert serve(cache, range(32)) == 28
    tiers.check_invariants()
    tiers.close()


def test_a_prompt_publishes_the_end_that_it_asks_for():
    cache, tiers = spilling()
    serve(cache, range(32))
    serve(cache, range(100, 112))
    assert cache.match_length(range(23)) == 20
    assert tiers.host._index.tail is not None, "the device has all of it"
    assert cache.match_length([*range(20), 5, 5, 5, 5, 5]) == 20
    assert tiers.host._index.tail is not None, "another prompt"
    assert cache.match_length(range(32)) == 28
    assert tiers.host._index.tail is None
    tiers.check_invariants()
    tiers.close()


def test_an_end_that_waits_gives_up_only_the_blocks_for_which_the_host_has_no_room():
    cache, tiers = spilling(host=7)
    serve(cache, range(32))
    serve(cache, range(100, 124))  # the host is full of the last six blocks of the first prompt
    assert (tiers.host._index.tail.num_device_tokens, len(tiers.host._index.tail.tokens)) == (8, 32)
    serve(cache, range(200, 203))  # takes the block before them
    assert (tiers.host._index.tail.num_device_tokens, len(tiers.host._index.tail.tokens)) == (4, 28)
    tiers.check_invariants()
    assert cache.match_length(range(32)) == 24, "the host holds the first block as well"
    assert tiers.host._index.tail is None
    tiers.check_invariants()
    assert serve(cache, range(32)) == 24
    tiers.check_invariants()
    tiers.close()


@pytest.mark.parametrize(
    ("keep", "left", "freed"), [(0, 0, 3), (20, 20, 3), (21, 24, 2), (28, 28, 1), (31, 32, 0), (32, 32, 0), (99, 32, 0)]
)
def test_an_end_that_waits_is_evicted_with_its_prefix(keep, left, freed):
    cache, tiers = spilling()
    serve(cache, range(32))
    serve(cache, range(100, 112))
    assert tiers.host.evict_prefix(range(31), keep=keep) == 0, "a prefix of which the end that waits goes on"
    assert tiers.host.evict_prefix([*range(28), 0, 0, 0, 0], keep=keep) == 0
    assert tiers.host.evict_prefix(range(32), keep=keep, namespace="else") == 0
    assert tiers.host.evict_prefix(range(32), keep=keep, spans=SPANS) == 0
    assert tiers.host.evict_prefix(range(40), keep=keep) == freed
    tiers.check_invariants()
    assert (tiers.host._index.tail is None) == (freed == 3)
    assert cache.match_length(range(40)) == max(20, left)
    tiers.check_invariants()
    assert tiers.evict_prefix(range(32), keep=keep) >= 0
    assert cache.match_length(range(40)) == left
    tiers.check_invariants()
    tiers.close()


@pytest.mark.parametrize("window_blocks", [4, 5, 7, 9, 41])
def test_a_beginning_whose_windows_lack_room_costs_an_end_that_waits_nothing(window_blocks):
    layers = [AttentionSpec(1, 8, dtype="float32", window=window) for window in (None, 6)]
    cache = PagedKVCache(layers, num_blocks=10, block_size=4, device="none")
    tiers = Tiers(cache, HostTier(cache, num_blocks=[41, window_blocks]), write="on_evict", min_tokens=1)
    serve(cache, range(32))
    serve(cache, range(100, 116))
    assert (tiers.host._index.tail.num_device_tokens, len(tiers.host._index.tail.tokens)) == (20, 32)
    assert cache.match_length(range(30)) == 28
    assert tiers.host._index.tail is None
    tiers.check_invariants()
    tiers.close()


def test_a_failed_copy_of_an_end_that_waits_costs_only_hits(monkeypatch):
    cache, tiers = spilling()
    serve(cache, range(32))
    serve(cache, range(100, 112))

    def broken(*_args, **_options):
        raise DeviceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(tiers.host._transfers.copies, "run", broken)
        assert cache.match_length(range(32)) == 20
    assert tiers.host.stats().num_failed == 1
    assert tiers.host._index.tail is None
    assert serve(cache, range(32)) == 20
    tiers.check_invariants()
    tiers.close()


def test_a_spill_whose_copy_raises_keeps_none_of_the_blocks_that_it_took():
    cache = PagedKVCache([AttentionSpec(1, 8), AttentionSpec(1, 8, window=64)], num_blocks=40, block_size=4)
    host = HostTier(cache, num_blocks=60)
    host.is_exclusive = True
    index, state = host._index, cache._parts.state
    serve(cache, range(33))

    def spill(missing, copy=lambda one: False):
        return save_victims(state, index, missing, copy, lambda one: None)

    def fail(one):
        raise MemoryError

    assert spill([2, 0]) == 2
    with pytest.raises(MemoryError):
        spill([2, 0], fail)
    index.min_priority, least = 1000, index.min_priority
    assert spill([0, 6]) == 6  # the device gives up blocks of windows, one of which was to be copied, unsaved
    index.min_priority = least
    assert [spill([2, 0]) for _ in range(4)] == [2, 2, 2, 0]
    host.publish_spilled()
    host.check_invariants()


def test_a_failed_copy_of_a_spill_fails_its_promotion_once(monkeypatch):
    cache, tiers = spilling()
    serve(cache, range(32))
    serve(cache, range(100, 132))  # the host has the first prompt now
    assert tiers.host.match(range(33)) == 32

    def broken(*_args, to_device, **_options):
        assert not to_device
        raise DeviceError("planted")

    before = tiers.host.stats().num_failed
    with monkeypatch.context() as patch:
        patch.setattr(tiers.host._transfers.copies, "run", broken)
        with pytest.raises(DeviceError, match="planted"):
            tiers.host.promote(range(33))
    assert tiers.host.stats().num_failed == before + 1
    tiers.check_invariants()
    tiers.close()


def test_a_small_host_keeps_the_beginning_of_a_long_path():
    cache, tiers = spilling(host=5)
    serve(cache, range(32))
    serve(cache, range(100, 132))
    assert tiers.host.match(range(33)) == 16
    tiers.check_invariants()
    tiers.close()


def test_an_end_that_waits_makes_room_for_loads_and_swaps():
    cache, tiers = spilling(host=5)
    serve(cache, range(32))
    serve(cache, range(100, 116))
    assert tiers.host._index.tail is not None
    assert tiers.host.make_room([4])
    assert tiers.host._index.tail is None
    serve(cache, range(200, 208))
    with tiers.host.reserve([range(4)]) as lease:
        assert len(lease.blocks[0]) == 4
    tiers.close()


def test_swapping_in_saves_what_it_evicts():
    cache, tiers = spilling()
    space = SwapSpace(cache, num_blocks=9)
    sequence = cache.add_sequence(range(24))
    cache.commit(cache.prepare([sequence], 24))
    cache.swap_out(sequence, space)
    cache.clear_prefix_cache()
    serve(cache, range(100, 132))
    cache.swap_in(sequence)
    assert tiers.host.match(range(100, 133)) == 32
    tiers.check_invariants()
    cache.remove(sequence)
    tiers.close()


@pytest.mark.parametrize("layers", [[STATE], [FULL, STATE]])
def test_swapping_in_frees_the_states_that_idle_sequences_keep_as_checkpoints(layers):
    sizes = [{"num_blocks": 40}, {"num_blocks": 80}] if FULL in layers else [{}, {}]
    cache = PagedKVCache(layers, block_size=4, num_states=4, max_sequences=2, **sizes[0])
    tiers = Tiers(cache, HostTier(cache, num_states=8, **sizes[1]), write="on_evict", min_tokens=1)
    space = SwapSpace(cache, host=tiers.host)
    states = cache.plane("state", len(layers) - 1).numpy()
    pair = []
    for value in (1, 2):
        sequence = cache.add_sequence(range(100 * value, 100 * value + 9))
        batch = cache.prepare([sequence], 9)
        states[batch.state_write.numpy()] = value
        cache.commit(batch)
        pair.append(sequence)
        if value == 1:
            cache.swap_out(sequence, space)
    # Two slots are needed: the tree alone holds one, and the tree and the second sequence hold the other.
    assert cache.stats().num_free_states == 0
    cache.swap_in(pair[0])
    assert [states[cache.state_slot(each)].tolist() for each in pair] == [[1, 1], [2, 2]]
    tiers.check_invariants()
    for sequence in pair:
        cache.remove(sequence)
    tiers.close()


def test_compacting_saves_what_it_evicts():
    cache, tiers = spilling(max_sequences=2)
    serve(cache, range(100, 112))
    sequence = cache.add_sequence(range(20))
    cache.commit(cache.prepare([sequence], 20))
    shared = cache.fork(sequence)
    cache.compact(sequence, list(range(0, 20, 2)))
    assert tiers.host.match(range(100, 113)) == 12
    cache.remove(sequence)
    cache.remove(shared)
    tiers.close()


def test_states_that_a_step_evicts_are_saved():
    cache = PagedKVCache([FULL, STATE], block_size=4, num_blocks=40, num_states=5, max_sequences=1, device="none")
    tiers = Tiers(cache, HostTier(cache, num_blocks=80, num_states=40), write="on_evict", min_tokens=1)
    for start in range(0, 500, 100):
        serve(cache, range(start, start + 18))
    assert tiers.host._index.num_cached() > 0
    assert sum(serve(cache, range(start, start + 20)) for start in range(0, 500, 100)) >= 64
    tiers.check_invariants()
    tiers.close()


def test_states_next_to_sealed_blocks_are_saved():
    sealed = AttentionSpec(2, 64, 32, format="kivi4", residual=40)
    cache = PagedKVCache([sealed, STATE], num_blocks=60, num_states=5, max_sequences=1, device="none")
    tiers = Tiers(cache, HostTier(cache, num_blocks=80, num_states=40), write="on_evict", min_tokens=1)
    for start in range(0, 1500, 300):
        serve(cache, range(start, start + 140))
    assert tiers.host.stats().num_cached_states > 0
    assert sum(serve(cache, range(start, start + 150)) for start in range(0, 1500, 300)) >= 4 * 96
    tiers.check_invariants()
    tiers.close()


@pytest.mark.parametrize("namespace", [None, "tenant", ("tenant", 7, b"x", -2.5, None, True, ("in",), 2**70)])
def test_spilled_prefixes_reach_the_stores_under_their_own_keys(namespace):
    store = MemoryStore()
    cache = PagedKVCache(AttentionSpec(1, 8, dtype="float32"), num_blocks=9, block_size=4)
    fingerprint = Fingerprint.of(cache, model="m")
    host = HostTier(cache, num_blocks=41)
    with Tiers(cache, host, [store], fingerprint=fingerprint, write="on_evict", min_tokens=1) as tiers:
        serve(cache, range(32), namespace=namespace, spans=SPANS)
        assert not store.data
        serve(cache, range(100, 132))
        tiers.drain()
        assert len(store.data) >= 8
        cache.clear_prefix_cache()
        host.clear()
        request = tiers.wait(tiers.request(range(33), namespace=namespace, spans=SPANS), 20.0)
        assert request.num_tokens == 32
        assert tiers.wait(tiers.request(range(33)), 20.0).num_tokens == 0
        request.release()


def test_namespaces_of_the_process_stay_in_it():
    store = MemoryStore()
    cache = PagedKVCache(AttentionSpec(1, 8, dtype="float32"), num_blocks=9, block_size=4)
    fingerprint = Fingerprint.of(cache, model="m")
    host = HostTier(cache, num_blocks=41)
    with Tiers(cache, host, [store], fingerprint=fingerprint, write="on_evict", min_tokens=1) as tiers:
        serve(cache, range(32), namespace=frozenset([1]))
        serve(cache, range(100, 132), namespace=frozenset([2]))
        tiers.drain()
        assert not store.data
        assert host.match(range(33), namespace=frozenset([1])) == 32
