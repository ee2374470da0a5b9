"""Invalid user-defined specs are refused by caches, pools and plans before anything is allocated."""

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    KVPool,
    PagedKVCache,
    Plane,
    StaticKVCache,
    SwapSpace,
    TensorParallel,
    make_cache,
)
from pagecore.cache import PagedCacheConfig
from pagecore.errors import PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.planner import blocks_held, plan_memory
from pagecore.storage.specs.spec import check_spec
from tests.together import together

KEY, VALUE = Plane("key", (2, 8), "float32"), Plane("value", (2, 8), "float32")
STATE = Plane("state", (4, 16), "float32", per="sequence")


class Own:
    """A user-defined spec."""

    def __init__(self, *planes, window=None, **more):
        self.planes, self.window = planes, window
        vars(self).update(more)


def pool(spec):
    return KVPool(spec, 1, 4, 4)


def blocks_for(spec):
    return KVPool.blocks_for("1MiB", spec, 1, 4)


def paged(spec):
    return PagedKVCache(spec, num_blocks=4)


def paged_by_memory(spec):
    return PagedKVCache(spec, memory="1MiB")


def paged_in_a_list(spec):
    return PagedKVCache([AttentionSpec(2, 8), spec, Alias(1)], num_blocks=4)


def counted(spec):
    return PagedKVCache(spec, num_blocks=4, device="none")


def counted_by_memory(spec):
    return PagedKVCache(spec, memory="1MiB", device="none")


def configured(spec):
    return make_cache(PagedCacheConfig(num_blocks=4), spec)


def static(spec):
    return StaticKVCache(spec, max_length=8)


def planned(spec):
    return plan_memory(spec, "1MiB", context=[100])


STORES = [pool, blocks_for, counted, counted_by_memory, planned]
ATTENDS = [paged, paged_by_memory, paged_in_a_list, configured, static]


@together(
    ("spec", "error", "says"),
    [
        (Own(STATE), UnsupportedOption, "'state' per sequence, as recurrent states are"),
        (Own(KEY, VALUE, STATE), UnsupportedOption, "'state' per sequence"),
        (Own(), UnsupportedOption, "no planes"),
        (Own(KEY, VALUE, KEY), UnsupportedOption, "two planes named 'key'"),
        (Own(KEY, Plane("key", (4,), "int8"), VALUE), UnsupportedOption, "two planes named 'key'"),
        (Own(KEY, VALUE, window=0), ShapeError, "window of a Own is 0"),
        (Own(KEY, VALUE, window=-3), ShapeError, "window of a Own is -3"),
        (Own(KEY, VALUE, window=(4, 0)), ShapeError, r"window of a Own is \(4, 0\)"),
        (Own(KEY, VALUE, window=4.0), ShapeError, "window of a Own is 4.0"),
        (Own(KEY, VALUE, window="4"), ShapeError, "window of a Own is '4'"),
        (Own(KEY, VALUE, window=np.array([4, 4])), ShapeError, "window of a Own is array"),
        (Own(KEY, VALUE, num_query_heads=0), ShapeError, "num_query_heads of a Own is 0"),
        (Own(KEY, VALUE, num_query_heads="many"), ShapeError, "num_query_heads of a Own is 'many'"),
        (Own(KEY, "value"), UnsupportedOption, "'value' among its planes"),
        (Own((2, 8)), UnsupportedOption, r"\(2, 8\) among its planes"),
    ],
)
@together("make", [*STORES, *ATTENDS])
def test_an_unsupported_spec_is_refused_at_first_use(make, spec, error, says):
    with pytest.raises(error, match=says):
        make(spec)


@together("planes", [5, None, "key", KEY])
@together("make", [*STORES, *ATTENDS])
def test_planes_that_are_not_a_tuple_of_planes_are_refused(make, planes):
    spec = Own()
    spec.planes = planes
    with pytest.raises(PagecoreError, match="Plane"):
        make(spec)


@together("spec", [None, 7, "llama", KEY, AttentionSpec, np.zeros(3), [[AttentionSpec(2, 8)]]])
@together("make", [*STORES, *ATTENDS])
def test_an_object_that_is_not_a_spec_is_refused(make, spec):
    with pytest.raises(UnsupportedOption, match=r"expected a spec|give a spec"):
        make(spec)


LATENT = Own(Plane("latent", (576,), "bfloat16"))
UNATTENDED = [
    (Own(KEY), UnsupportedOption, "key and no plane 'value'"),
    (Own(Plane("key", (2, 8), "float8_e4m3fn"), VALUE), UnsupportedDtype, "'key' of float8_e4m3fn"),
    (Own(VALUE, LATENT.planes[0]), UnsupportedOption, "value, latent and no plane 'key'"),
    (Own(KEY, Plane("value", (2, 8), "int8")), UnsupportedDtype, "'value' of int8"),
    (Own(KEY, Plane("value", (4, 8), "float32")), ShapeError, "2 heads in plane 'key' and 4 in 'value'"),
    (Own(KEY, Plane("value", (8,), "float32")), UnsupportedOption, r"'value' of shape \(8,\) per token"),
    (Own(KEY, Plane("value", (2, 8), "float32", per="block")), UnsupportedOption, "per block"),
    (Own(KEY, VALUE, num_query_heads=3), ShapeError, "num_query_heads 3, not a multiple of its 2"),
]


@together(("spec", "error", "says"), UNATTENDED)
@together("make", ATTENDS)
def test_keys_and_values_that_cannot_be_attended_are_refused_by_a_cache_with_bytes(make, spec, error, says):
    with pytest.raises(error, match=says):
        make(spec)


@together("spec", [LATENT, *(spec for spec, _, _ in UNATTENDED)])
@together("make", STORES)
def test_planes_that_are_only_stored_or_counted_may_be_any(make, spec):
    make(spec)


@pytest.mark.parametrize("make", [make for make in ATTENDS if make is not static])
def test_a_paged_cache_stores_planes_of_other_names(make):
    make(LATENT)


def test_a_static_cache_needs_key_and_value():
    with pytest.raises(UnsupportedOption, match="a Own stores latent; a static cache"):
        static(LATENT)


def test_a_refusal_names_the_layer():
    with pytest.raises(UnsupportedOption, match=r"layer 2, a Own, stores key"):
        PagedKVCache([AttentionSpec(2, 8), Alias(0), UNATTENDED[0][0]], num_blocks=4)
    with pytest.raises(ShapeError, match="window of a Own is 0"):
        check_spec(Own(KEY, VALUE, window=0))


def test_the_part_returned_by_shard_is_checked_too():
    whole = Own(KEY, VALUE)
    whole.shard = lambda parallel: Own(KEY, Plane("value", (1, 8), "float32"))
    with pytest.raises(ShapeError, match="2 heads in plane 'key' and 1"):
        PagedKVCache(whole, num_blocks=4, parallel=TensorParallel(0, 2))


def test_a_window_may_be_numpys_and_counts_as_an_int():
    for window in (np.int8(6), np.uint8(6), np.int64(6), np.array(6)):
        own, plain = Own(KEY, VALUE, window=window), AttentionSpec(2, 8, dtype="float32", window=6)
        assert blocks_held(own, 10_000, 4) == blocks_held(plain, 10_000, 4) == 3
        cache = PagedKVCache([own, plain], num_blocks=400, block_size=4)
        assert cache.num_groups == 1
        sequence = cache.add_sequence(range(1000))
        cache.commit(cache.prepare([sequence], 1000))
        assert cache.stats().num_used_blocks == 2
        cache.truncate([sequence], [999])
        cache.check_invariants()
        assert plan_memory(own, "1MiB", block_size=1000, context=100).contexts[0].blocks_per_request == (1,)


def test_a_cache_without_bytes_counts_planes_of_any_kind():
    cache = counted(Own(Plane("latent", (576,), "float8_e4m3fn"), Plane("scale", (2,), "float32", per="block")))
    space = SwapSpace(cache, num_blocks=4)
    sequence = cache.add_sequence(range(20))
    cache.commit(cache.prepare([sequence], 20))
    cache.swap_out([sequence], space)
    cache.swap_in([sequence])
    assert cache.stats().num_used_blocks == 2


def test_a_memory_budget_is_refused_for_planes_per_sequence():
    for make in (blocks_for, paged_by_memory, counted_by_memory, planned):
        with pytest.raises(UnsupportedOption, match="per sequence"):
            make(Own(STATE))
