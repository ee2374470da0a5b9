"""Cross attention of StaticKVCache on CUDA: equality with its twin, streams, graphs and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, StaticKVCache, TensorParallel, as_dtype
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from tests.cuda.caches import requests_of
from tests.ops import formats_twin as twin
from tests.reference.static_cache import CrossTwin

FLOATS = ["float32", "float16", "bfloat16"]
OWN = AttentionSpec(2, 8, dtype="float32")
CROSS = CrossSpec(2, 8, dtype="float32", max_tokens=10)


def make(layers=(OWN, CROSS), **options):
    return StaticKVCache(list(layers), **{"max_batch_size": 3, "max_length": 6, "device": "cuda"} | options)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def fill(cuda, array, byte):
    cuda.runtime.fill(array.pointer, byte, array.nbytes, 0)
    cuda.runtime.synchronize(0)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_on_a_device_equal_their_twin(cuda, seed):
    random = np.random.default_rng(seed)
    layers, batch, heads, most, *dims = random.integers(1, [4, 4, 4, 9, 10, 10]).tolist()
    dtype = FLOATS[seed % 3]
    cross = CrossSpec(heads, *dims, dtype=dtype, max_tokens=most)
    cache = make([cross] * layers + [OWN], max_batch_size=batch)
    expected_of = CrossTwin(layers, batch, heads, most, dims, as_dtype(dtype).numpy)
    arrays = cache.cross_key_array, cache.cross_value_array
    for array, plane in zip(arrays, expected_of.planes, strict=True):
        fill(cuda, array, 0xFF)
        plane.view(np.uint8)[...] = 0xFF
    fill(cuda, cache.key_array, 0xFF)
    for _ in range(4):
        layer = int(random.integers(layers))
        rows, count = random.integers(1, [batch + 1, most + 1]).tolist()
        given = FLOATS[random.integers(3)]
        new = [random.normal(size=(rows, count, heads, dim)).astype(np.float32).transpose(0, 2, 1, 3) for dim in dims]
        new = [each.astype(as_dtype(given).numpy) for each in new]
        views = cache.update(layer, *map(cuda.put, new), 0)
        for view, expected in zip(views, expected_of.update(layer, *new), strict=True):
            np.testing.assert_array_equal(cuda.get(view), expected)
        for array, plane in zip(arrays, expected_of.planes, strict=True):
            found = np.ascontiguousarray(cuda.get(array))
            np.testing.assert_array_equal(found.view(np.uint8), plane.view(np.uint8))
        assert [cache.length(layer) for layer in range(layers)] == expected_of.lengths
    assert np.isnan(cuda.get(cache.key_array)).all()


@pytest.mark.parametrize("format", ["float8_e4m3fn", "int8_token"])
def test_formats_store_outputs_on_a_device(cuda, format):
    cache = make([OWN, CrossSpec(2, 32, dtype="float32", format=format, max_tokens=10)])
    output = normal(3, 2, 7, 32), normal(3, 2, 7, 32, seed=1)
    views = cache.update(1, *map(cuda.put, output), 0)
    for name, view, written in zip(("key", "value"), views, output, strict=True):
        codes, scales = twin.quantize_row(written, format, 1.0)
        np.testing.assert_array_equal(np.ascontiguousarray(cuda.get(view)).view(np.uint8), codes)
        if FORMATS[format].scale_dtype is not None:
            stored = np.ascontiguousarray(cuda.get(cache.plane(f"{name}_scale", 1))[:, :, :7])
            np.testing.assert_array_equal(stored.view(np.uint8), scales)


def test_a_write_runs_on_its_stream_without_waiting_or_allocating(cuda):
    cache, stream = make(), cuda.stream()
    new = cuda.put(normal(3, 2, 7, 8))
    cache.update(1, new, new, 0, stream=stream)
    if cuda.is_emulated:
        assert set(requests_of(cuda, lambda: cache.update(1, new, new, 0, stream=stream))) == {"launches"}
    cuda.runtime.synchronize(stream)
    np.testing.assert_array_equal(cuda.get(cache.key(1))[:, :, :7], cuda.get(new))
    cache.reset(stream=stream)
    cuda.runtime.synchronize(stream)
    assert not cuda.get(cache.cross_key_array).any()
    assert not cuda.get(cache.cross_value_array).any()
    assert cache.length(1) == 0


def test_a_graph_writes_the_output_of_its_replay_also_with_a_position_in_an_array(cuda):
    cache = make()
    new = cuda.put(np.zeros((3, 2, 7, 8), np.float32))
    cache.update(1, new, new, 0)
    cuda.runtime.synchronize(0)
    replay = cuda.capture(lambda stream: cache.update(1, new, new, np.array([0]), stream=stream))
    for seed in range(2):
        filled = normal(3, 2, 7, 8, seed=seed)
        cuda.runtime.copy(new.pointer, filled.ctypes.data, filled.nbytes, 0)
        cuda.runtime.synchronize(0)
        replay()
        np.testing.assert_array_equal(cuda.get(cache.key(1))[:, :, :7], filled)


def test_the_ranks_of_a_model_hold_its_heads_on_a_device(cuda):
    key = normal(3, 2, 10, 8)
    for rank in range(2):
        cache = make(parallel=TensorParallel(rank, 2))
        held = cuda.put(key[:, rank : rank + 1])
        np.testing.assert_array_equal(cuda.get(cache.update(1, held, held, 0)[0]), key[:, rank : rank + 1])


def test_an_output_that_does_not_fit_is_refused_and_nothing_is_written(cuda):
    cache = make()
    for array in (cache.cross_key_array, cache.cross_value_array):
        fill(cuda, array, 0xFF)
    output, long = cuda.put(normal(3, 2, 10, 8)), cuda.put(normal(3, 2, 11, 8))
    wide = cuda.put(normal(3, 2, 10, 16))
    refused = [
        (ShapeError, (output, output, 1)),
        (ShapeError, (long, long, 0)),
        (ShapeError, (output[:, :, :0], output[:, :, :0], 0)),
        (ShapeError, (output[:0], output[:0], 0)),
        (ShapeError, (output, output[:, :, :9], 0)),
        (DeviceError, (normal(3, 2, 10, 8), output, 0)),
        (DeviceError, (output, normal(3, 2, 10, 8), 0)),
        (UnsupportedOption, (wide[..., ::2], output, 0)),
        (UnsupportedOption, (cache.key(1), output, 0)),
    ]
    for error, arguments in refused:
        with pytest.raises(error):
            cache.update(1, *arguments)
    with pytest.raises(UnsupportedOption, match="stream"):
        cache.update(1, output, output, 0, stream="now")
    assert cache.length(1) == 0
    for array in (cache.cross_key_array, cache.cross_value_array):
        assert np.isnan(cuda.get(array)).all()
