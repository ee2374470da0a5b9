"""A prompt longer than the host tier passes through it to a store and back, on the streams of a cache on CUDA."""

import pytest

from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.cuda.caches import block_bytes, poison
from tests.cuda.host_tiers import computed, make
from tests.tiers.memory_store import MemoryStore

PROMPT = range(61)  # 15 blocks


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_prompt_longer_than_the_host_comes_back_bit_for_bit(cuda, pipelined):
    cache = make(cuda, num_blocks=24)
    host = HostTier(cache, num_blocks=7, huge_pages=False, pipelined=pipelined)
    assert host.pool.memory.wait_registered(60)
    fingerprint = Fingerprint.of(cache, model="m")
    store = MemoryStore()
    guarded = Guard(store, deadline=Deadline(60.0))
    with Tiers(cache, host, [guarded], fingerprint=fingerprint, min_tokens=1, stream_blocks=3) as tiers:
        if cuda.is_emulated:
            cuda.runtime.streams.deferred = True
        sequence, _ = computed(cuda, cache, PROMPT)
        before = block_bytes(cuda, cache, sequence)
        cache.remove(sequence)
        tiers.check_invariants()
        while not tiers.drain(0):
            host.drain()
        tiers.check_invariants()
        assert host.num_leases == 0
        assert tiers.stats().streams.num_dropped_blocks == 0
        assert len({key[:16] for key in store.data}) == 15
        cache.clear_prefix_cache()
        host.clear()
        poison(cuda, cache)
        request = tiers.request(PROMPT)
        while not request.has_ended:
            tiers.poll()
            host.drain()  # leased blocks come back with the ends of copies
        assert (request.state, request.num_tokens, request.loaded_tokens) == ("ready", 60, {"EXTERNAL": 60})
        tiers.check_invariants()
        again = cache.add_sequence(PROMPT)
        assert again.num_cached_tokens == 60
        if cuda.is_emulated:
            cuda.runtime.streams.deferred = False
        host.wait_for_loads()
        cuda.runtime.synchronize(0)
        after = block_bytes(cuda, cache, again)
        counts = set()
        for old, new in zip(before, after, strict=True):
            both = [(one, two) for one, two in zip(old, new, strict=False) if one is not None and two is not None]
            counts.add(len(both))
            assert all(one == two for one, two in both)
        assert counts == {15, 1}  # the window has its last block
        request.release()
        cache.remove(again)
        host.drain()  # nothing above waits for the stream of the last copy
        host.poll()
        assert host.num_leases == 0
        tiers.check_invariants()
