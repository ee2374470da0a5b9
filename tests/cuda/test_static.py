"""StaticKVCache on CUDA: equality with its twin, views without copies, streams, graphs and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pagecore import AttentionSpec, KVCache, StaticCacheConfig, StaticKVCache, as_dtype, make_cache
from pagecore.cache.static import _static
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from tests.cuda.caches import requests_of
from tests.cuda.kit import Kit
from tests.reference.static_cache import StaticTwin

FLOATS = ["float32", "float16", "bfloat16"]


def laid_out(random, shape, order, dtype):
    """Return random numbers with the first three axes in a given memory order, with gaps, one axis reversed."""
    sizes = [shape[axis] + 2 for axis in order] + [shape[3] + int(random.integers(0, 3))]
    memory = random.normal(size=sizes).astype(np.float32).astype(as_dtype(dtype).numpy)
    array = memory.transpose(*np.argsort(order), 3)[tuple(slice(1, 1 + n) for n in shape[:3])][..., : shape[3]]
    return array[tuple(slice(None, None, -1 if axis == order[0] else 1) for axis in range(3))]


def ones(cuda: Kit, *shape, dtype="float32"):
    return cuda.put(np.ones(shape, as_dtype(dtype).numpy))


@pytest.mark.parametrize("seed", range(6))
def test_a_static_cache_on_a_device_equals_its_twin(cuda, seed):
    random = np.random.default_rng(seed)
    layers, batch, heads, length, *dims = random.integers(1, [4, 4, 4, 13, 10, 10]).tolist()
    dtype = FLOATS[seed % 3]
    cache = StaticKVCache(AttentionSpec(heads, *dims, dtype=dtype), layers, batch, length, device="cuda")
    assert cache.device == cache.key_array.device == "cuda:0"
    twin = StaticTwin(layers, batch, heads, length, dims, as_dtype(dtype).numpy)
    orders = list(itertools.permutations(range(3)))
    for step in range(8):
        if step == 5:
            cache.reset()
            twin.reset()
        count = int(random.integers(0, length + 1))
        layer, some = int(random.integers(layers)), int(random.integers(0, batch + 1))
        position = int(random.integers(0, length - count + 1))
        given = FLOATS[random.integers(3)]
        new = [laid_out(random, (some, heads, count, dim), orders[random.integers(6)], given) for dim in dims]
        views = cache.update(layer, *map(cuda.put, new), position)
        for view, expected in zip(views, twin.update(layer, *new, position), strict=True):
            np.testing.assert_array_equal(cuda.get(view), expected)
        for array, plane in zip((cache.key_array, cache.value_array), twin.planes, strict=True):
            np.testing.assert_array_equal(cuda.get(array), plane)
        assert [cache.length(layer) for layer in range(layers)] == twin.lengths


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"format": "int8_token"}, 1),
        ({"format": "float8_e4m3fn", "key_scale": 0.5}, 1),
        ({"format": "float8_e4m3fn", "key_scale": [0.5, 2.0]}, 3),
    ],
)
def test_one_write_serves_all_sequences_unless_factors_differ_from_head_to_head(cuda, options, launches):
    """In contiguous ``[batch, heads, tokens, dim]``, batch and heads can be merged, batch and tokens cannot."""
    cache = StaticKVCache(AttentionSpec(2, 32, dtype="bfloat16", **options), 1, 3, 16, device="cuda")
    new = np.random.default_rng(0).normal(size=(2, 3, 2, 5, 32)).astype(np.float32)
    launched = cuda.runtime.launched if cuda.is_emulated else []
    del launched[:]
    cache.update(0, *map(cuda.put, new), 1)
    assert len(launched) == (launches if cuda.is_emulated else 0)
    expected = StaticKVCache(AttentionSpec(2, 32, dtype="bfloat16", **options), 1, 3, 16)
    for sequence in range(5):  # one token after another: rows of one token merge on any axis
        expected.update(0, *new[..., sequence : sequence + 1, :], 1 + sequence)
    for name in ("key", "value"):
        ours, theirs = (each.plane(name, 0) for each in (cache, expected))
        np.testing.assert_array_equal(cuda.get(ours).view(np.uint8), theirs.numpy().view(np.uint8))
    if options["format"] == "int8_token":
        scales = (each.plane("key_scale", 0) for each in (cache, expected))
        np.testing.assert_array_equal(cuda.get(next(scales)), next(scales).numpy())


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (1, 2, 0, 8)])
def test_an_array_without_elements_may_have_any_strides(cuda, shape):
    cache = StaticKVCache(AttentionSpec(2, 8), 1, 2, 5, device=cuda.device)
    empty = cuda.put(np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0, 0, 0, 0)))
    assert not any(empty.strides)
    assert cache.update(0, empty, empty, 0)[0].shape[0] == shape[0]


def test_views_share_memory_and_see_later_writes(cuda):
    cache = make_cache(StaticCacheConfig(4, 16, cuda.device, "float32"), AttentionSpec(2, 8), num_layers=3)
    assert isinstance(cache, KVCache)
    key, value = cache.update(1, ones(cuda, 4, 2, 6, 8), ones(cuda, 4, 2, 6, 8), 0)
    assert (key.pointer, value.pointer) == (cache.key(1).pointer, cache.value(1).pointer)
    assert (key.shape, key.strides) == ((4, 2, 6, 8), cache.key(1).strides)
    cache.update(1, cuda.put(np.full((4, 2, 1, 8), 7, np.float32)), ones(cuda, 4, 2, 1, 8), 3)
    assert cuda.get(key)[0, 0, :, 0].tolist() == [1, 1, 1, 7, 1, 1]


def test_an_update_runs_on_its_stream_without_waiting(cuda):
    cache, stream = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda"), cuda.stream()
    new = ones(cuda, 2, 2, 3, 8)
    cache.update(0, new, new, 0, stream=stream)
    if cuda.is_emulated:
        cuda.runtime.streams.deferred = True
        assert set(requests_of(cuda, lambda: cache.update(0, new, new, 3, stream=stream))) == {"launches"}
        assert not cuda.get(cache.key(0))[:, :, 3:].any(), "stream 0 is not what the update was given to"
    else:
        cache.update(0, new, new, 3, stream=stream)
    cuda.runtime.synchronize(stream)
    assert (cuda.get(cache.key(0))[:, :, :6] == 1).all()
    cache.reset(stream=stream)
    cuda.runtime.synchronize(stream)
    assert not cuda.get(cache.key_array).any()


def test_a_reset_forgets_a_single_token_too(cuda):
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda")
    cache.update(0, ones(cuda, 2, 2, 1, 8), ones(cuda, 2, 2, 1, 8), 0)
    cache.reset()
    assert not cuda.get(cache.key_array).any()


def test_an_update_of_more_heads_than_tokens_allocates_nothing(cuda):
    cache = StaticKVCache(AttentionSpec(20, 8, dtype="float32"), 1, 2, 4, device="cuda")
    new = cuda.put(np.ones((2, 2, 20, 8), np.float32).transpose(0, 2, 1, 3))
    assert set(requests_of(cuda, lambda: cache.update(0, new, new, 0))) <= {"launches", "loads"}
    assert (cuda.get(cache.key(0))[:, :, :2] == 1).all()


def test_an_update_from_another_device_is_refused(cuda, monkeypatch):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it emulates several devices")
    monkeypatch.setattr(cuda.runtime, "_num_devices", 2)
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda:1")
    new = ones(cuda, 2, 2, 3, 8)
    with pytest.raises(DeviceError, match="cuda:0 and the cache on cuda:1"):
        cache.update(0, new, new, 0)


def test_an_update_waits_for_the_streams_that_produce_its_key_and_value(cuda, monkeypatch):
    awaited = []
    monkeypatch.setattr(_static, "await_producer", lambda array, stream: awaited.append((array, stream)))
    cache, stream = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda"), cuda.stream()
    key, value = ones(cuda, 2, 2, 3, 8), ones(cuda, 2, 2, 3, 8)
    cache.update(0, key, value, 0, stream=stream)
    assert [handle for _, handle in awaited] == [stream, stream]
    assert awaited[0][0] is key
    assert awaited[1][0] is value
    cuda.runtime.synchronize(stream)


def test_an_update_keeps_its_stream_while_another_thread_updates_another_layer(cuda, monkeypatch):
    """Each sequence that is not adjacent in memory is a separate write; the other thread runs after the first."""
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 2, 2, 16, device="cuda")
    first, second = cuda.stream(), cuda.stream()
    apart, other = ones(cuda, 2, 3, 3, 8)[:, :2], ones(cuda, 2, 2, 3, 8)
    write, streams = _static.write_kv, []

    def write_kv(*arguments, stream, **caches):
        streams.append(stream)
        write(*arguments, stream=stream, **caches)
        if len(streams) == 1:
            cache.update(1, other, other, 0, stream=second)

    monkeypatch.setattr(_static, "write_kv", write_kv)
    cache.update(0, apart, apart, 0, stream=first)
    assert streams == [first, second, first]
    for stream in (first, second):
        cuda.runtime.synchronize(stream)


def test_an_update_becomes_part_of_a_graph(cuda):
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda")
    new = cuda.put(np.zeros((2, 2, 3, 8), np.float32))
    cache.update(0, new, new, 0)
    cuda.runtime.synchronize(0)
    replay = cuda.capture(lambda stream: cache.update(0, new, new, 5, stream=stream))
    filled = np.random.default_rng(0).normal(size=(2, 2, 3, 8)).astype(np.float32)
    cuda.runtime.copy(new.pointer, filled.ctypes.data, filled.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    np.testing.assert_array_equal(cuda.get(cache.key(0))[:, :, 5:8], filled)


def test_a_graph_writes_at_its_captured_position_and_refuses_an_array_as_position(cuda):
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda")
    new = ones(cuda, 2, 2, 3, 8)
    cache.update(0, new, new, np.array([0]))
    cache.reset()
    cuda.runtime.synchronize(0)
    for array in (np.array([5]), np.array(5, np.int32), [5]):
        with pytest.raises(UnsupportedOption, match=r"position is an array .* at position 5, even after .*pass an int"):
            cuda.capture(lambda stream, array=array: cache.update(0, new, new, array, stream=stream))
    assert cache.length() == 0
    replay = cuda.capture(lambda stream: cache.update(0, new, new, np.int64(5), stream=stream))
    for _ in range(2):
        replay()
        written = cuda.get(cache.key(0))[0, 0, :, 0]
        assert written.tolist() == [0] * 5 + [1] * 3 + [0] * 8


def test_unsupported_arguments_are_refused_and_nothing_is_written(cuda):
    cache = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16, device="cuda")
    new, wide = ones(cuda, 2, 2, 3, 8), ones(cuda, 2, 2, 3, 16)
    refused = [
        (DeviceError, (np.ones((2, 2, 3, 8), np.float32), new, 0)),
        (DeviceError, (new, np.ones((2, 2, 3, 8), np.float32), 0)),
        (UnsupportedOption, (wide[..., ::2], new, 0)),
        (UnsupportedOption, (cache.key(0)[:, :, :3], new, 4)),
        (ShapeError, (new, new, 14)),
        (ShapeError, (wide, new, 0)),
        (DeviceError, (new, new, ones(cuda, 1, dtype="int64"))),
    ]
    for error, arguments in refused:
        with pytest.raises(error):
            cache.update(0, *arguments)
    with pytest.raises(UnsupportedOption, match="stream"):
        cache.update(0, new, new, 0, stream="now")
    assert cache.length() == 0
    assert not cuda.get(cache.key_array).any()


def test_a_cache_on_the_host_has_no_streams(cuda):
    cache, new = StaticKVCache(AttentionSpec(2, 8, dtype="float32"), 1, 2, 16), np.ones((2, 2, 3, 8), np.float32)
    for call in (lambda: cache.update(0, new, new, 0, stream=0), lambda: cache.reset(stream=0)):
        with pytest.raises(UnsupportedOption, match="no streams"):
            call()
    with pytest.raises(DeviceError, match="cuda:0 and the cache on cpu"):
        cache.update(0, cuda.put(new), new, 0)


@pytest.mark.parametrize("device", ["cuda:99", "none", "tpu"])
def test_an_absent_device_is_refused_by_name(cuda, device):
    with pytest.raises(DeviceError, match=f"device is {device!r}"):
        StaticKVCache(AttentionSpec(2, 8), 1, 2, 16, device=device)
