"""Operations of layers: keys and values are written and attended to, other planes are stored and moved."""

import numpy as np
import pytest

from pagecore import Alias, DeviceError, Plane, ShapeError, StaticKVCache, SwapSpace, UnsupportedOption
from tests.cache.caches import SPEC, Planes, advance, make, normal
from tests.reference.dense import dense_attention

BLOCK = 4
# One latent vector per token and one scale per block, as a user-defined compressed cache might have.
LATENT = Planes(Plane("latent", (12,), "float32"), Plane("scale", (4,), "float16", per="block"))


def fill(cache, batch, layer, seed):
    """Write random latents to the slots of a step, and a scale to each block, as a kernel of the user would."""
    slots = np.asarray(batch.group(layer).slot_mapping)[: batch.num_tokens]
    latents, scales = normal(len(slots), 12, seed=seed), normal(len(slots), 4, seed=seed + 1).astype(np.float16)
    cache.plane("latent", layer).numpy().reshape(-1, 12)[slots] = latents
    cache.plane("scale", layer).numpy()[slots // BLOCK] = scales


def content(cache, sequence, layer):
    """Return the latents of the computed tokens, and the scales of their blocks."""
    row = cache.block_table(cache.group_of(layer)).numpy()[sequence.row]
    positions = np.arange(sequence.num_computed_tokens)
    latents = cache.plane("latent", layer).numpy()[row[positions // BLOCK], positions % BLOCK]
    return latents.copy(), cache.plane("scale", layer).numpy()[row[: -(-len(positions) // BLOCK)]].copy()


def computed(cache, count, layer=0, **options):
    sequence = cache.add_sequence(range(count), **options)
    batch = cache.prepare([sequence], count)
    fill(cache, batch, layer, seed=count)
    cache.commit(batch)
    return sequence


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_plane_aliases_the_pool_and_key_and_value_are_shorthands():
    cache = make([SPEC, LATENT, Alias(1)])
    assert cache.plane("key", 0).pointer == cache.key(0).pointer
    assert cache.plane("value", 0).pointer == cache.value(0).pointer
    latent, scale = cache.plane("latent", 1), cache.plane("scale", 1)
    assert (latent.shape, scale.shape) == ((17, BLOCK, 12), (17, 4))
    assert (str(latent.dtype), str(scale.dtype)) == ("float32", "float16")
    latent.numpy()[3] = 5
    assert cache.plane("latent", 2).numpy()[3].min() == 5


def test_a_plane_that_a_layer_does_not_have_is_refused():
    cache = make([SPEC, LATENT])
    for name, layer, planes in (("latent", 0, "key, value"), ("key", 1, "latent, scale"), (7, 1, "latent, scale")):
        with pytest.raises(UnsupportedOption, match=planes):
            cache.plane(name, layer)
    with pytest.raises(UnsupportedOption, match="latent, scale"):
        cache.value(1)
    with pytest.raises(ShapeError, match="layers 0 to 1"):
        cache.plane("key", 2)
    with pytest.raises(DeviceError, match="none"):
        make(LATENT, device="none").plane("latent", 0)


def test_planes_of_a_static_cache_are_key_and_value():
    cache = StaticKVCache(SPEC, max_length=8)
    assert cache.plane("key", 0).pointer == cache.key(0).pointer
    assert cache.plane("value", 0).shape == cache.value(0).shape
    with pytest.raises(UnsupportedOption, match=r"'latent'.*key, value"):
        cache.plane("latent", 0)


def test_write_and_attend_refuse_a_layer_without_key_and_value():
    cache = make([SPEC, LATENT])
    batch = cache.prepare([cache.add_sequence(range(5))], 5)
    key, query = normal(5, 2, 8), normal(5, 4, 8)
    says = r"a Planes stores latent, scale; use a kernel of your own on cache\.plane\('latent', layer\)"
    with pytest.raises(UnsupportedOption, match=f"write serves .*{says}"):
        cache.write(1, key, key, batch)
    with pytest.raises(UnsupportedOption, match=f"attend serves .*{says}"):
        cache.attend(1, query, batch)
    cache.write(0, key, key, batch)
    np.testing.assert_allclose(cache.attend(0, query, batch), dense_attention(query, key, key), atol=1e-5)
    assert batch.group(1).plan is None
    cache.commit(batch)
    cache.check_invariants()


def test_a_fork_shares_other_planes_and_copies_them_on_write():
    cache = make(LATENT)
    parent = computed(cache, 6)
    before = content(cache, parent, 0)
    child = cache.fork(parent)
    batch = cache.prepare([child], 3)
    assert len(batch.copied_blocks(0)) == 1
    assert_equal(content(cache, child, 0), before)
    fill(cache, batch, 0, seed=50)
    cache.commit(batch)
    assert_equal(content(cache, parent, 0), before)
    np.testing.assert_array_equal(content(cache, child, 0)[0][:6], before[0])
    cache.check_invariants()


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNHD"])
def test_other_planes_are_swapped_out_and_in_bit_for_bit(layout):
    cache = make([SPEC, LATENT], layout=layout)
    space = SwapSpace(cache, num_blocks=9)
    sequence = computed(cache, 10, layer=1)
    before = content(cache, sequence, 1)
    cache.swap_out([sequence], space)
    for name in ("latent", "scale"):
        cache.plane(name, 1).numpy()[1:] = -1
    cache.swap_in([sequence])
    assert_equal(content(cache, sequence, 1), before)


def test_other_planes_are_reused_as_a_cached_prefix_and_reordered():
    cache = make(LATENT)
    first = computed(cache, 8)
    before = content(cache, first, 0)
    second = cache.add_sequence(range(9))
    assert second.num_cached_tokens == 8
    assert_equal(content(cache, second, 0), before)
    other = computed(cache, 5, namespace="other")
    cache.reorder([other], [first])
    assert_equal(content(cache, other, 0), before)


def test_other_planes_are_zeroed_between_namespaces():
    cache = make(LATENT, num_blocks=3, scrub=True)
    first = computed(cache, 8, namespace="a")
    assert np.abs(content(cache, first, 0)[0]).min() > 0
    cache.remove(first)
    cache.clear_prefix_cache()
    second = cache.add_sequence(range(8), namespace="b")
    batch = advance(cache, [second], 8)
    assert batch.num_tokens == 8
    assert all(not part.any() for part in content(cache, second, 0))
