"""PagedKVCache with layers that keep states: construction and refused models."""

import math

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    PagedCacheConfig,
    PagedKVCache,
    Plane,
    StateSpec,
    StaticKVCache,
    TensorParallel,
    make_cache,
)
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.storage import StatePool, state_budget
from pagecore.storage.state_shapes import delta_planes, mamba2_planes
from tests.cache.hybrids import CHUNKED, FULL, PLANE, make, temporal


def test_layers_keep_their_model_index():
    wide = StateSpec((Plane("conv", (3, 2), "bfloat16", per="sequence"), PLANE), chunk=64, interval=256)
    cache = PagedKVCache([CHUNKED, FULL, wide, FULL], num_blocks=5, num_states=7, max_sequences=2)
    assert (cache.num_layers, cache.num_groups, cache.num_states) == (4, 1, 7)
    assert cache.plane("temporal", 0).shape == cache.plane("temporal", 2).shape == (7, 2)
    assert cache.plane("conv", 2).shape == (7, 3, 2)
    assert cache.key(1).shape == cache.key(3).shape == (5, 16, 1, 8)
    assert cache.spec(2) is wide
    assert cache.nbytes == 2 * 2 * 5 * 16 * 8 * 4 + 7 * (2 * 8 + 12)
    temporal(cache, 0)[1] = 3
    assert not (temporal(cache, 2)[1] == 3).all()


def test_layers_without_blocks_refuse_what_needs_blocks():
    cache = make()
    batch = cache.prepare([cache.add_sequence(range(3))], 3)
    calls = [
        lambda: cache.group_of(1),
        lambda: batch.group(3),
        lambda: batch.copied_blocks(1),
        lambda: cache.write(1, np.zeros((3, 1, 8)), np.zeros((3, 1, 8)), batch),
        lambda: cache.attend(1, np.zeros((3, 1, 8), np.float32), batch),
        lambda: cache.key(1),
        lambda: batch.draft_write,
    ]
    for call in calls:
        with pytest.raises(UnsupportedOption):
            call()
    plain = PagedKVCache(FULL, num_blocks=3)
    with pytest.raises(UnsupportedOption, match="no layer of the cache keeps a state"):
        _ = plain.make_batch().state_read
    assert plain.num_states == 0


@pytest.mark.parametrize("change", [{"chunk": 32}, {"interval": 512}, {"in_place": False}, {"draft_tokens": 1}])
def test_state_layers_must_have_equal_rules(change):
    other = StateSpec((PLANE,), **{"chunk": 64, "interval": 256} | change)
    with pytest.raises(UnsupportedOption, match="give all of them the same"):
        PagedKVCache([FULL, CHUNKED, other], num_blocks=5)


def test_refused_models():
    with pytest.raises(UnsupportedOption, match=r"layer 2 is Alias\(1\)"):
        PagedKVCache([FULL, CHUNKED, Alias(1)], num_blocks=5)
    with pytest.raises(UnsupportedOption, match="layer 0 is a StateSpec, which only a PagedKVCache serves"):
        StaticKVCache([CHUNKED, FULL], None, 2, 8)
    with pytest.raises(UnsupportedOption, match="num_states is given, but no layer keeps a state"):
        PagedKVCache(FULL, num_blocks=5, num_states=4)
    with pytest.raises(UnsupportedOption, match=r"state_ratio is 0\.5, but no layer keeps a state"):
        PagedKVCache(FULL, memory="1MiB", state_ratio=0.5)
    for sizes in ({"num_blocks": 5}, {"memory": "1MiB", "num_states": 5}):
        with pytest.raises(UnsupportedOption, match="a ratio divides memory"):
            PagedKVCache([FULL, CHUNKED], **sizes, state_ratio=0.5)
    with pytest.raises(ShapeError, match="num_states is 3; one sequence needs 5"):
        make(StateSpec((PLANE,), in_place=False, draft_tokens=2), num_states=3)


@pytest.mark.parametrize(("rules", "each"), [({}, 2), ({"in_place": False}, 3), ({"draft_tokens": 3}, 5)])
def test_by_default_every_sequence_has_a_state_and_a_checkpoint(rules, each):
    assert make(StateSpec((PLANE,), **rules), num_states=None).num_states == 1 + 6 * each


def test_a_memory_is_divided_by_the_ratio():
    """Budget D10, in megabytes."""
    spec = StateSpec(mamba2_planes(64, 1, 4, 16, 16), chunk=16, interval=64)
    cache = PagedKVCache([FULL, spec, spec], memory="40MiB", state_ratio=0.9, max_sequences=4)
    states = state_budget("40MiB", 0.9)
    assert states == math.floor(40 * 2**20 * 0.9 / 1.9)
    assert cache.num_states == StatePool.slots_for(states, spec, 2) == states // (2 * spec.nbytes)
    blocks = cache.num_blocks[0] * 16 * 2 * 8 * 4
    assert 40 * 2**20 - 1024 - 2 * spec.nbytes < cache.nbytes <= 40 * 2**20
    assert cache.nbytes == blocks + cache.num_states * 2 * spec.nbytes
    few = PagedKVCache([FULL, spec], memory="1MiB", num_states=5, max_sequences=4)
    assert few.num_states == 5
    for options in ({"memory": 100}, {"memory": 5 * spec.nbytes, "num_states": 5}):
        with pytest.raises(NotEnoughMemory):
            PagedKVCache([FULL, spec], **options)


def test_a_config_keeps_the_dtypes_of_states():
    config = PagedCacheConfig(num_blocks=5, dtype="float16", max_sequences=2, num_states=7)
    cache = make_cache(config, [FULL, CHUNKED])
    assert cache.num_states == 7
    assert (str(cache.key(0).dtype), str(cache.plane("temporal", 1).dtype)) == ("float16", "float32")


def test_a_rank_takes_planes_that_were_made_for_it():
    full = AttentionSpec(4, 8, dtype="float32")
    split = StateSpec(delta_planes(4, 4, 8, 8, ranks=2), ranks=2)
    cache = PagedKVCache([full, split], num_blocks=5, max_sequences=2, parallel=TensorParallel(1, 2))
    assert cache.plane("temporal", 1).shape == (5, 2, 8, 8)
    assert cache.key(0).shape[2] == 2
    for parallel, spec in ((TensorParallel(0, 2), StateSpec(delta_planes(4, 4, 8, 8))), (None, split)):
        with pytest.raises(UnsupportedOption, match="planes of one of"):
            PagedKVCache([full, spec], num_blocks=5, parallel=parallel)


def test_a_cache_without_bytes_lists_what_its_owner_moves():
    cache = make(device="none")
    first = cache.add_sequence(range(70))
    batch = cache.prepare([first], 70)
    assert batch.state_zeros.tolist() == [1]
    cache.commit(batch)
    child = cache.fork(first)
    batch = cache.prepare([child], 1)
    assert batch.state_copies.tolist() == [[1, batch.state_write.numpy()[0]]]
    with pytest.raises(DeviceError, match="stores no planes"):
        cache.plane("temporal", 1)
