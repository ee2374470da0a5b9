"""Tiers of caches whose layers all keep states: prefixes come back from host and stores with their states."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    NotEnoughMemory,
    PagecoreError,
    PagedKVCache,
    Plane,
    ShapeError,
    StateSpec,
    SwapSpace,
    UnsupportedOption,
)
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.memory_store import MemoryStore

STATE = StateSpec((Plane("temporal", (2, 4), "float32", per="sequence"),), chunk=4, interval=8)
QUANTISED = replace(STATE, checkpoint_format="int8")
PROMPT = np.arange(30, dtype=np.int32)
EACH = 4096  # bytes of a slot in host memory


def make(spec=STATE, num_states=6, **options):
    return PagedKVCache([spec] * 3, num_states=num_states, block_size=4, max_sequences=3, **options)


def compute(cache, tokens, **options):
    """Compute a prompt whose state is the sum of its ids, and remove it; return the tokens that were reused."""
    with cache.add_sequence(tokens, **options) as sequence:
        start = sequence.num_computed_tokens
        batch = cache.prepare([sequence], len(tokens) - start)
        read, write, kept, length = (
            int(each.numpy()[0])
            for each in (batch.state_read, batch.state_write, batch.checkpoint_write, batch.checkpoint_lengths)
        )
        for layer in range(3):
            state = cache.plane("temporal", layer).numpy()
            np.testing.assert_allclose(state[read], tokens[:start].sum(), rtol=1e-5)
            if kept:
                state[kept] = tokens[:length].sum()
            state[write] = tokens.sum()
        cache.commit(batch)
        return start


@pytest.mark.parametrize("spec", [STATE, QUANTISED], ids=["exact", "int8"])
@pytest.mark.parametrize("write", ["through", "second_hit", "on_release", "on_evict"])
def test_evicted_states_come_back_from_the_host(write, spec):
    cache = make(spec)
    with Tiers(cache, HostTier(cache, num_states=40, huge_pages=False), write=write, min_tokens=1) as tiers:
        for _ in range(2):
            for start in range(0, 500, 50):
                compute(cache, PROMPT + start)
        assert [compute(cache, PROMPT + start) for start in range(0, 500, 50)] == [28] * 10
        tiers.check_invariants()
        stats = tiers.stats()
        assert stats.hit_tokens["CPU"] >= 28 * 5
        assert stats.host.num_backed_up_blocks == stats.host.num_cached_states >= 5
        assert stats.host.num_cached_blocks == stats.host.num_evicted_blocks == 0


@pytest.mark.parametrize("spec", [STATE, QUANTISED], ids=["exact", "int8"])
def test_a_second_hit_copies_the_state_that_the_device_had(spec):
    cache = make(spec)
    turns = [np.concatenate([PROMPT, PROMPT + 50 * turn]) for turn in range(3)]
    with Tiers(cache, HostTier(cache, num_states=9, huge_pages=False), write="second_hit", min_tokens=1) as tiers:
        compute(cache, PROMPT)
        assert compute(cache, turns[1]) == 28  # its own state is after the tokens that were asked for twice
        assert tiers.host.match(turns[2]) == 28
        cache.clear_prefix_cache()
        assert compute(cache, turns[2]) == 28
        tiers.check_invariants()
        assert tiers.stats().hit_tokens["CPU"] == 28


@pytest.mark.parametrize("spec", [STATE, QUANTISED], ids=["exact", "int8"])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_store_of_another_run_has_the_states(kind, spec, tmp_path):
    data = {}
    for run in range(2):
        cache = make(spec)
        fingerprint = Fingerprint.of(cache, model="mamba")
        store = MemoryStore(data=data)
        if kind == "disk":
            store = DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 22)
        store = Guard(store, deadline=Deadline(20.0))  # a busy machine is not a fault
        host = HostTier(cache, num_states=9, huge_pages=False)
        with Tiers(cache, host, [store], fingerprint=fingerprint, min_tokens=1) as tiers:
            for namespace in (None, "tenant"):
                request = tiers.wait(tiers.request(PROMPT, namespace=namespace), 20.0)
                assert request.num_tokens == 28 * run
                assert compute(cache, PROMPT, namespace=namespace) == 28 * run
                request.release()
            assert tiers.wait(tiers.request(PROMPT[:20]), 20.0).num_tokens == 0  # no state ends there
            assert tiers.drain(20.0)
            tiers.check_invariants()


def test_swapped_sequences_take_slots_of_the_tier():
    cache = make()
    tier = HostTier(cache, num_states=4, huge_pages=False)
    space = SwapSpace(cache, host=tier)
    for start in range(0, 150, 50):
        with cache.add_sequence(PROMPT + start) as sequence:
            cache.commit(cache.prepare([sequence], 30))
            assert tier.backup(sequence) == 1
    assert (space.num_available, tier.stats().num_cached_states) == (3, 3)
    sequence = cache.add_sequence(PROMPT + 900)
    cache.commit(cache.prepare([sequence], 30))
    cache.swap_out([sequence], space)
    assert (space.num_available, tier.stats().num_cached_states, tier.stats().num_evicted_states) == (1, 1, 2)
    tier.check_invariants()
    cache.swap_in([sequence])
    cache.check_invariants()


def test_running_states_of_swapped_sequences_take_slots_of_the_space():
    cache = make(QUANTISED)
    tier = HostTier(cache, num_states=8, huge_pages=False)
    space = SwapSpace(cache, host=tier, num_states=3)
    assert (tier.num_available, space.num_available) == (7, 2)
    sequence = cache.add_sequence(PROMPT)
    cache.commit(cache.prepare([sequence], 30))
    before = [plane.numpy()[cache.state_slot(sequence)].tobytes() for plane in cache._parts.store.states.planes()]
    cache.swap_out([sequence], space)
    assert (tier.num_available, space.num_available) == (6, 1)
    space.check_invariants()
    lost = space.state_slots.allocate(1)
    tier.check_invariants()
    with pytest.raises(PagecoreError, match="reference counts do not match the holders"):
        space.check_invariants()
    space.state_slots.free(lost)
    space.check_invariants()
    cache.swap_in([sequence])
    after = [plane.numpy()[cache.state_slot(sequence)].tobytes() for plane in cache._parts.store.states.planes()]
    assert after == before
    cache.check_invariants()
    tier.check_invariants()


@pytest.mark.parametrize(
    ("options", "slots"),
    [({"num_states": 7}, 7), ({"ratio": 2}, 11), ({"ratio": 0.01}, 2), ({"memory": 65536}, 65536 // EACH)],
)
def test_sizes_follow_slots_ratio_or_memory(options, slots):
    cache = make()
    with HostTier(cache, huge_pages=False, **options) as tier:
        assert (tier.num_blocks, tier.num_available, tier.num_groups) == ((slots,), slots - 1, 0)
        assert "memory" not in options or tier.nbytes == options["memory"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ShapeError, "give exactly one of memory, num_states and ratio"),
        ({"num_states": 4, "ratio": 1}, ShapeError, "given are num_states, ratio"),
        ({"num_blocks": 9}, UnsupportedOption, "num_blocks is 9, but every layer keeps a state"),
        ({"num_states": 1}, ShapeError, "num_states is 1"),
        ({"memory": 4096}, NotEnoughMemory, "memory is 4096 bytes; two state slots take 65536"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        HostTier(make(), **options)


def test_second_hits_reach_to_the_end_of_the_longest_prompt():
    length = 4096
    cache = PagedKVCache(
        STATE, num_states=6, block_size=4, max_sequences=1, max_tokens_per_sequence=length, device="none"
    )
    with Tiers(cache, HostTier(cache, num_states=2, huge_pages=False), write="second_hit") as tiers:
        for _ in range(2):
            with cache.add_sequence(range(length)) as sequence:
                cache.commit(cache.prepare([sequence], length - sequence.num_cached_tokens))
        tiers.drain()
        assert tiers.host.match(range(length + 1)) == length
