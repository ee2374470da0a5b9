"""Eviction of all prefixes of a namespace that nothing uses."""

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, StateSpec, UnsupportedDtype, UnsupportedOption
from pagecore.index import RadixTree
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.test_evict_prefix import CHAT, OTHER, SPEC, cached, make
from tests.tiers.memory_store import MemoryStore

NAMES = [None, "tenant", ("adapter", 1), ("adapter", 2), 1, True, 1.0, b"tenant", ""]


@pytest.mark.parametrize("name", NAMES)
def test_only_the_prefixes_of_the_namespace_go(name):
    cache = make(num_blocks=129)
    for each in NAMES:
        cached(cache, CHAT, OTHER, namespace=each)
    free = cache.stats().num_free_blocks
    assert cache.evict_namespace(name) == 8
    assert cache.stats().num_free_blocks == free + 8
    for each in NAMES:
        left = 0 if type(each) is type(name) and each == name else 24
        assert cache.match_length([*CHAT, 0], namespace=each) == left
    assert cache.evict_namespace(name) == cache.evict_namespace("unknown") == 0
    cache.check_invariants()


def test_what_a_sequence_uses_stays_until_it_is_removed():
    cache = cached(make(), CHAT, OTHER, namespace="tenant")
    reader = cache.add_sequence(CHAT[:17], namespace="tenant")
    assert cache.evict_namespace("tenant") == 4
    assert cache.match_length([*CHAT, 0], namespace="tenant") == 16
    cache.commit(cache.prepare([reader], 1))
    cache.remove(reader)
    assert cache.evict_namespace("tenant") == 4
    assert cache.stats().num_cached_blocks == 0
    cache.check_invariants()


def test_windows_and_states_go_with_their_blocks():
    window = AttentionSpec(1, 8, dtype="float32", window=6)
    state = StateSpec(delta_planes(1, 1, 4, 4), chunk=4, interval=8)
    for layers, sizes in [
        ([SPEC, window, state], {"num_blocks": [33, 33], "num_states": 9}),
        ([state], {"num_blocks": None, "num_states": 9}),
        ([window], {"num_blocks": 33}),
    ]:
        cache = make(layers, **sizes)
        cached(cached(cache, CHAT, OTHER, namespace="tenant"), CHAT)
        before = cache.match_length([*CHAT, 0])
        assert before > 0
        cache.evict_namespace("tenant")
        assert cache.match_length([*CHAT, 0], namespace="tenant") == 0
        assert cache.match_length([*CHAT, 0]) == before
        cache.evict_namespace(None)
        assert (cache.stats().num_cached_blocks, cache.stats().num_cached_states) == (0, 0)
        cache.check_invariants()


def test_prefixes_of_an_encoder_output_have_a_namespace_of_their_own():
    cross = CrossSpec(1, 8, dtype="float32")
    cache = make([SPEC, cross], num_blocks=[33, 33])
    for digest in (b"x", 5):
        with cache.add_sequence(CHAT, namespace="tenant", cross_tokens=4, cross_digest=digest) as sequence:
            cache.commit(cache.prepare([sequence], len(CHAT)))
    assert cache.evict_namespace("tenant") == 0
    assert cache.evict_namespace("tenant", cross_digest=5) == 6
    assert cache.match_length([*CHAT, 0], namespace="tenant", cross_digest=b"x") == 24
    with pytest.raises(UnsupportedDtype, match="cross_digest"):
        cache.evict_namespace("tenant", cross_digest="x")


def test_namespaces_that_cannot_be_compared_are_refused():
    tree, cache = RadixTree(4), make()
    for call in (tree.evict_namespace, cache.evict_namespace, make(prefix_cache=False).evict_namespace):
        with pytest.raises(UnsupportedDtype):
            call([])
    assert make(prefix_cache=False).evict_namespace("tenant") == 0


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_tiers_evict_it_from_device_and_host_and_stores_keep_it(write):
    cache = make(num_blocks=13)
    fingerprint, store = Fingerprint.of(cache, model="m"), MemoryStore()
    host = HostTier(cache, num_blocks=65)
    with Tiers(cache, host, [store], fingerprint=fingerprint, write=write, min_tokens=4) as tiers:
        for name in ("tenant", None):  # with "on_evict", an end of the first one waits outside of the host's tree
            cached(cache, CHAT, OTHER, namespace=name)
        assert tiers._stores.drain(10)
        entries = len(store.data)
        assert tiers.evict_namespace("tenant") > 0
        assert cache.match_length([*CHAT, 0], namespace="tenant") == 0
        assert cache.match_length([*CHAT, 0]) == 24
        assert host.path_length([*CHAT, 0], namespace="tenant") == 0
        tiers.check_invariants()
        assert len(store.data) == entries
        assert tiers.evict_namespace(None) > 0
        assert host.stats().num_cached_blocks == cache.stats().num_cached_blocks == 0
        assert sum(pool.num_used for pool in host.block_pools) == 0
        tiers.check_invariants()
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.evict_namespace(None)
    with pytest.raises(UnsupportedOption, match="closed"):
        host.evict_namespace(None)
    np.testing.assert_equal(sum(pool.num_used for pool in host.block_pools), 0)
