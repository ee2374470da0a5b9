"""Memory that a cache with tiers gives back: the host keeps the prefixes, and they are promoted after it is resumed."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, StateSpec
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.tiers import Tiers
from tests.arrays.fake_runtime import FakeRuntime
from tests.cache.hybrid_models import CONV

SPEC = AttentionSpec(1, 8, dtype="float32", num_query_heads=1)
WINDOW = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=6)
STATE = StateSpec((CONV,), chunk=4, interval=8)


def make(layers=SPEC, write="through", host_blocks=40, **options):
    given = {"block_size": 4, "num_blocks": 17, "max_sequences": 3, "memory_saver": True} | options
    cache = PagedKVCache(layers, **given)
    return cache, Tiers(cache, HostTier(cache, num_blocks=host_blocks), write=write, min_tokens=1)


def values(ids, layer):
    """Return one row for each token, which depends on all tokens before it."""
    chain = np.cumsum(np.asarray(ids, np.float64) + 1) * (layer + 1)
    return np.repeat(chain.astype(np.float32), 8).reshape(-1, 1, 8)


def compute(cache, ids, num_layers=1):
    """Compute what a prompt lacks; return the tokens that it reused, and the output of all layers' attention."""
    sequence = cache.add_sequence(ids)
    reused = sequence.num_cached_tokens
    batch = cache.prepare([sequence], len(ids) - reused)
    outputs = []
    for layer in range(num_layers):
        rows = values(ids, layer)[reused:]
        cache.write(layer, rows, rows, batch)
        outputs.append(np.asarray(cache.attend(layer, rows, batch)).copy())
    cache.commit(batch)
    cache.remove(sequence)
    return reused, [rows[-1] for rows in outputs]


@pytest.mark.parametrize("write", ["through", "on_release", "on_evict", "second_hit"])
@pytest.mark.parametrize("layers", [SPEC, [SPEC, WINDOW]], ids=["full", "windows"])
def test_prefixes_stay_in_the_host_and_are_promoted_after_the_resumption(write, layers):
    cache, tiers = make(layers, write)
    count = 1 if layers is SPEC else 2
    prompts = [range(21), range(100, 122), [*range(12), *range(50, 58)]]
    before = [compute(cache, ids, count)[1] for ids in prompts for _ in range(2)][::2]
    tiers.check_invariants()
    cache.release_memory()
    assert cache.stats().num_cached_blocks == 0
    for view in (cache.key(0), cache.value(0)):
        view.numpy()[...] = np.nan  # only promoted rows may be read
    cache.resume_memory()
    for ids, expected in zip(prompts, before, strict=True):
        assert tiers.host.match(ids) == len(ids) // 4 * 4 - 4 * (len(ids) % 4 == 0)
        reused, outputs = compute(cache, ids, count)
        assert reused == len(ids) // 4 * 4 - 4 * (len(ids) % 4 == 0)
        for got, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
    tiers.check_invariants()
    tiers.close()


def test_states_are_moved_to_the_host():
    cache, tiers = make([SPEC, STATE], "on_evict", num_states=9)

    def serve(ids, mark):
        sequence = cache.add_sequence(ids)
        reused = sequence.num_cached_tokens
        batch = cache.prepare([sequence], len(ids) - reused)
        cache.plane(CONV.name, 1).numpy()[...] = mark
        cache.commit(batch)
        cache.remove(sequence)
        return reused

    assert serve(range(19), 5.0) == 0
    assert tiers.host.match(range(19)) == 0
    cache.release_memory()
    assert tiers.host.match(range(19)) == 16
    cache.resume_memory()
    assert serve(range(19), 6.0) == 16
    tiers.check_invariants()
    tiers.close()


def test_a_host_that_is_too_small_keeps_what_fits():
    cache, tiers = make(write="on_evict", host_blocks=4)
    compute(cache, range(21))
    cache.release_memory()
    cache.resume_memory()
    assert compute(cache, range(21))[0] <= 12
    tiers.check_invariants()
    tiers.close()


def test_nothing_is_promoted_into_released_memory():
    cache, tiers = make()
    compute(cache, range(21))
    cache.release_memory()
    cache.release_memory()
    assert cache.match_length(range(21)) == 0
    sequence = cache.add_sequence(range(21))
    assert sequence.num_cached_tokens == 0
    with pytest.raises(DeviceError, match=r"released; call resume_memory\(\)"):
        tiers.host.promote(range(21))
    assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 0}
    assert tiers.host.stats().num_failed == 0
    cache.remove(sequence)
    cache.resume_memory()
    assert cache.match_length(range(21)) == 20
    assert compute(cache, range(21))[0] == 20
    tiers.close()


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_a_refused_release_moves_nothing(write):
    cache, tiers = make(write=write)
    compute(cache, range(21))
    sequence = cache.add_sequence(range(200, 204))
    batch = cache.prepare([sequence], 4)
    cached, held = cache.stats().num_cached_blocks, tiers.host.stats().num_cached_blocks
    with pytest.raises(UnsupportedOption, match="hold 1 blocks"):
        cache.release_memory()
    assert (cache.stats().num_cached_blocks, tiers.host.stats().num_cached_blocks) == (cached, held)
    cache.abandon(batch)
    cache.remove(sequence)
    tiers.close()


@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_copies_of_cuda_end_before_the_memory_is_unmapped(write):
    runtime = FakeRuntime(num_devices=1)
    with use_runtime(runtime):
        cache, tiers = make(write=write, device="cuda:0")
        with cache.add_sequence(range(21)) as sequence:
            cache.commit(cache.prepare([sequence], 21))
        cache.release_memory()
        assert not any(is_mapped for _, is_mapped in runtime.ranges.values())
        assert tiers.host.stats().num_pending == 0
        with cache.add_sequence(range(21)) as sequence:
            assert sequence.num_cached_tokens == 0
        cache.release_memory()
        cache.resume_memory()
        with cache.add_sequence(range(21)) as sequence:
            assert sequence.num_cached_tokens == 20
        tiers.drain()
        tiers.check_invariants()
        tiers.close()
        del cache, tiers, sequence
