"""Configs as values, the caches that they make, and the interface that both caches share."""

import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, KVLayout, PagedKVCache, Plane
from pagecore.cache import (
    KVCache,
    PagedCacheConfig,
    StaticCacheConfig,
    StaticKVCache,
    effective_length,
    make_cache,
)
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import TensorParallel
from tests.cache.caches import owned_memory
from tests.together import together

SPEC = AttentionSpec(4, 8, dtype="bfloat16", num_query_heads=8)


@pytest.mark.parametrize(
    ("configured", "maximum", "expected"), [(0, 1024, 1024), (None, 1024, 1024), (2048, 1024, 1024), (512, 1024, 512)]
)
def test_worked_example_8_effective_length(configured, maximum, expected):
    assert effective_length(configured, maximum) == expected


def test_the_configured_length_decides_alone_if_the_models_is_unknown():
    assert effective_length(512, None) == 512
    assert effective_length(np.int32(512), np.int64(64)) == 64


@pytest.mark.parametrize(
    ("configured", "maximum"), [(-1, 1024), (1.5, 1024), ("8", 8), (8, 0), (8, -1), (None, None), (0, None), (8, "8")]
)
def test_invalid_lengths_are_refused(configured, maximum):
    with pytest.raises(ShapeError, match="is"):
        effective_length(configured, maximum)


def test_configs_are_values():
    paged = PagedCacheConfig(block_size=np.int64(32), num_blocks=[np.int64(9), 5], dtype=np.float16, layout="blockwise")
    assert paged == PagedCacheConfig(block_size=32, num_blocks=(9, 5), dtype="float16", layout="blockwise")
    assert replace(paged, num_blocks=np.array([9, 5])) == paged
    static = StaticCacheConfig(2, 0, dtype="bfloat16")
    assert static == StaticCacheConfig(max_batch_size=2, max_length=None, dtype="bfloat16")
    for config in (paged, static, PagedCacheConfig(), StaticCacheConfig()):
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(config) == hash(replace(config))
        with pytest.raises(FrozenInstanceError):
            config.dtype = "float32"
    assert replace(static, dtype="auto").dtype == "auto"


@together(
    ("options", "error"),
    [
        ({"block_size": 0}, ShapeError),
        ({"block_size": 1.5}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": [9, 1]}, ShapeError),
        ({"num_blocks": "9"}, ShapeError),
        ({"num_blocks": 9, "memory": "1GiB"}, ShapeError),
        ({"memory": -1}, ShapeError),
        ({"memory": "8 gigs"}, ShapeError),
        ({"memory": 1.5}, ShapeError),
        ({"max_sequences": 0}, ShapeError),
        ({"max_tokens_per_sequence": -1}, ShapeError),
        ({"device": "tpu"}, DeviceError),
        ({"layout": "rowwise"}, UnsupportedOption),
        ({"layout": 5}, UnsupportedOption),
        ({"prefix_cache": "yes"}, UnsupportedOption),
        ({"eviction_policy": "best"}, UnsupportedOption),
        ({"index_dtype": "uint8"}, UnsupportedOption),
        ({"dtype": "float7"}, UnsupportedDtype),
        ({"dtype": None}, UnsupportedDtype),
    ],
)
def test_an_invalid_paged_config_is_refused(options, error):
    with pytest.raises(error):
        PagedCacheConfig(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch_size": 0}, ShapeError),
        ({"max_length": -1}, ShapeError),
        ({"max_length": "8"}, ShapeError),
        ({"device": "none"}, DeviceError),
        ({"dtype": "auto "}, UnsupportedDtype),
        ({"dtype": 16}, UnsupportedDtype),
    ],
)
def test_an_invalid_static_config_is_refused(options, error):
    with pytest.raises(error):
        StaticCacheConfig(**options)


def test_a_paged_config_makes_the_cache_with_every_field():
    layout = KVLayout("blockwise", "NHD")
    config = PagedCacheConfig(
        block_size=8, num_blocks=(9, 5), max_sequences=3, max_tokens_per_sequence=40, layout=layout, index_dtype="int32"
    )
    cache = make_cache(config, [SPEC, replace(SPEC, window=6), Alias(0)], parallel=TensorParallel(1, 2))
    assert isinstance(cache, PagedKVCache)
    assert (cache.block_size, cache.num_blocks, cache.max_sequences) == (8, (9, 5), 3)
    assert (cache.max_tokens_per_sequence, cache.index_dtype, cache.num_layers) == (40, "int32", 3)
    assert cache.parallel == TensorParallel(1, 2)
    assert cache.key(0).shape == (9, 8, 2, 8)
    assert cache.key(0).strides == (2 * 2 * 8 * 2 * 8, 2 * 8 * 2, 8 * 2, 2)
    assert make_cache(PagedCacheConfig(num_blocks=9, device="none"), SPEC).device == "none"


def test_buffers_are_adopted_and_set_the_number_of_blocks_unless_the_config_does():
    options = {"block_size": 4, "num_blocks": [9]}
    for config, expected in ((PagedCacheConfig(block_size=4), 9), (PagedCacheConfig(block_size=4, num_blocks=5), 5)):
        (owned,) = owned_memory(SPEC, "layerwise", **options)
        cache = make_cache(config, SPEC, buffers=owned)
        assert cache.num_blocks == (expected,)
        cache.key(0).numpy()[1] = 2
        assert np.shares_memory(cache.key(0).numpy(), owned[0])
    with pytest.raises(UnsupportedOption, match="buffers is given for a static cache"):
        make_cache(StaticCacheConfig(max_length=8), SPEC, buffers=owned)


def test_the_clock_is_that_of_the_paged_cache():
    asked = []
    config = PagedCacheConfig(num_blocks=9, eviction_policy="priority")
    cache = make_cache(config, SPEC, clock=lambda: asked.append(1) or 0.0)
    cache.add_sequence(range(4))
    assert asked
    with pytest.raises(UnsupportedOption, match="clock is given for a static cache"):
        make_cache(StaticCacheConfig(max_length=8), SPEC, clock=lambda: 0.0)


def test_memory_is_the_budget_and_half_of_the_free_memory_by_default(monkeypatch):
    assert make_cache(PagedCacheConfig(memory=2**20), SPEC, num_layers=2).num_blocks == (2**20 // (2 * 16 * 128),)
    monkeypatch.setattr("pagecore.storage.memory.budgets.free_memory", lambda device: 2**20)
    assert make_cache(PagedCacheConfig(), SPEC).num_blocks == (2**19 // (16 * 128),)
    with pytest.raises(NotEnoughMemory):
        make_cache(PagedCacheConfig(memory=100), SPEC)


def test_the_models_maximum_length_limits_that_of_the_config():
    for configured, expected in ((None, 64), (0, 64), (32, 32), (100, 64)):
        config = PagedCacheConfig(num_blocks=17, max_tokens_per_sequence=configured)
        assert make_cache(config, SPEC, model_max_length=64).max_tokens_per_sequence == expected
        assert make_cache(StaticCacheConfig(1, configured), SPEC, model_max_length=64).max_length == expected
    assert make_cache(PagedCacheConfig(num_blocks=17), SPEC).max_tokens_per_sequence == 256
    with pytest.raises(ShapeError, match="give one of them"):
        make_cache(StaticCacheConfig(), SPEC)


def test_a_static_config_makes_the_cache_with_every_field():
    cache = make_cache(StaticCacheConfig(3, 16), [SPEC, Alias(0), SPEC], parallel=TensorParallel(7, 8))
    assert isinstance(cache, StaticKVCache)
    assert cache.key_array.shape == (2, 3, 1, 16, 8)
    assert make_cache(StaticCacheConfig(max_length=16), SPEC, num_layers=5).num_layers == 5


class Bytes:
    """A user-defined spec that can be stored as any dtype."""

    window = None

    def __init__(self, dtype="float32"):
        self.planes = (Plane("key", (2, 8), dtype), Plane("value", (2, 8), dtype))

    def with_dtype(self, dtype):
        return Bytes(dtype)


class Fixed:
    window = None
    planes = Bytes().planes


class Wrong(Fixed):
    def with_dtype(self, dtype):
        return None


def paged(**options):
    return PagedCacheConfig(num_blocks=9, **options)


def static(**options):
    return StaticCacheConfig(1, 8, **options)


@pytest.mark.parametrize("kind", [paged, static])
def test_dtype_auto_takes_the_models_and_any_other_replaces_it(kind):
    mixed = [SPEC, Alias(0), SPEC.with_dtype("bfloat16")]
    assert [make_cache(kind(), mixed).key(layer).dtype for layer in range(3)] == ["bfloat16"] * 3
    for dtype in ("float32", np.float16, "bfloat16"):
        cache = make_cache(kind(dtype=dtype), mixed)
        assert {cache.key(layer).dtype for layer in range(3)} == {
            np.dtype(dtype).name if dtype == np.float16 else dtype
        }
        assert cache.spec(0).num_query_heads == 8
        assert make_cache(kind(dtype=dtype), SPEC, num_layers=2).value(1).dtype == cache.key(0).dtype
    assert SPEC.dtype == "bfloat16"
    assert make_cache(kind(dtype="float16"), Bytes()).key(0).dtype == "float16"
    assert make_cache(kind(), Fixed()).key(0).dtype == "float32"
    with pytest.raises(UnsupportedOption, match="Fixed has no method with_dtype"):
        make_cache(kind(dtype="float16"), Fixed())
    with pytest.raises(UnsupportedOption, match="with_dtype of Wrong returned None"):
        make_cache(kind(dtype="float16"), [Wrong()])
    with pytest.raises(UnsupportedDtype, match="int8"):
        make_cache(kind(dtype="int8"), SPEC)


@together("dtype", ["auto", "float16"])
@together("layers", [None, 5, "llama", [None], [Alias(0)], Alias(0)])
def test_invalid_layers_are_refused_with_every_dtype(layers, dtype):
    for config in (paged(dtype=dtype), static(dtype=dtype)):
        with pytest.raises((UnsupportedOption, ShapeError)):
            make_cache(config, layers)


@pytest.mark.parametrize("config", [None, "paged", PagedCacheConfig, {"num_blocks": 9}])
def test_a_config_of_another_kind_is_refused(config):
    with pytest.raises(UnsupportedOption, match="config is"):
        make_cache(config, SPEC)


@pytest.mark.parametrize("config", [PagedCacheConfig(num_blocks=9), StaticCacheConfig(2, 16)])
def test_both_caches_are_a_kv_cache(config):
    cache = make_cache(config, [SPEC, Alias(0)], parallel=TensorParallel(0, 2))
    assert isinstance(cache, KVCache)
    assert (cache.num_layers, cache.device, cache.parallel) == (2, "cpu", TensorParallel(0, 2))
    assert cache.nbytes == cache.key(0).nbytes + cache.value(0).nbytes
    assert cache.key(1).pointer == cache.key(0).pointer
    assert cache.key(0).shape[-1] == 8
    assert cache.spec(1).num_kv_heads == 2
    assert not isinstance(SPEC, KVCache)
