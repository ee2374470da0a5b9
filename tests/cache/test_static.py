"""StaticKVCache: the effect of updates, and their views."""

import gc

import numpy as np
import pytest

from pagecore import Alias, AttentionSpec, Plane, as_dtype, as_tensor, paged_attention
from pagecore.cache import StaticKVCache
from pagecore.errors import ShapeError
from tests.cache.caches import SPEC, Planes, make_static, normal, stored
from tests.capabilities import require
from tests.reference.dense import dense_attention
from tests.together import together


@pytest.mark.slow
def test_worked_example_8_static():
    cache = StaticKVCache(AttentionSpec(12, 64, dtype="float16"), 12, max_batch_size=1, max_length=1024)
    assert cache.nbytes == 37_748_736
    random = np.random.default_rng(8)
    key, value = random.normal(size=(2, 1, 12, 138, 64)).astype(np.float16)
    views = cache.update(5, key[:, :, :128], value[:, :, :128], 0)
    assert [view.shape for view in views] == [(1, 12, 128, 64)] * 2
    for s in range(10):
        new = slice(128 + s, 129 + s)
        views = cache.update(5, key[:, :, new], value[:, :, new], 128 + s)
        assert [view.shape for view in views] == [(1, 12, 129 + s, 64)] * 2
        assert [view.pointer for view in views] == [cache.key(5).pointer, cache.value(5).pointer]
        for view, written in zip(views, (key, value), strict=True):
            np.testing.assert_array_equal(view.numpy(), written[:, :, : 129 + s])
    before = stored(cache)
    one = np.ones((1, 12, 1, 64), np.float16)
    for layer, new, position in ((5, one, 1024), (12, one, 0), (5, np.ones((2, 12, 1, 64), np.float16), 0)):
        with pytest.raises(ShapeError):
            cache.update(layer, new, new, position)
        for array, was in zip(stored(cache), before, strict=True):
            assert (array.view(np.uint16) == was.view(np.uint16)).all()


def test_views_share_memory_and_show_later_writes():
    cache = make_static()
    key, _ = cache.update(1, np.ones((4, 2, 6, 8), np.float32), np.ones((4, 2, 6, 8), np.float32), 0)
    assert np.shares_memory(key.numpy(), cache.key_array.numpy())
    assert key.strides == cache.key(1).strides == cache.key_array.strides[1:]
    cache.update(1, np.full((4, 2, 1, 8), 7, np.float32), np.ones((4, 2, 1, 8), np.float32), 3)
    assert key.numpy()[0, 0, :, 0].tolist() == [1, 1, 1, 7, 1, 1]
    del cache
    gc.collect()
    assert key.numpy()[3, 1, 3, 7] == 7


def test_a_new_cache_is_zero_and_a_reset_one_is_again():
    cache = make_static()
    assert not cache.key_array.numpy().any()
    for layer, position in ((0, 0), (2, 9), (2, 1)):
        cache.update(layer, np.ones((4, 2, 3, 8), np.float32), np.ones((4, 2, 3, 8), np.float32), position)
    assert [cache.length(layer) for layer in range(3)] == [3, 0, 4]
    pointers = cache.key_array.pointer, cache.value_array.pointer
    cache.reset()
    assert not cache.key_array.numpy().any()
    assert not cache.value_array.numpy().any()
    assert [cache.length(layer) for layer in range(3)] == [0, 0, 0]
    assert (cache.key_array.pointer, cache.value_array.pointer) == pointers


def test_an_update_writes_its_tokens_and_nothing_else():
    cache = make_static(AttentionSpec(2, 8, 4, dtype="float32"))
    for array in (cache.key_array, cache.value_array):
        array[:] = 5.0
    cache.update(1, normal(2, 2, 3, 8), normal(2, 2, 3, 4), 6)
    for array in stored(cache):
        array[1, :2, :, 6:9] = 5.0
        assert (array == 5.0).all()


@together("dtype", ["float32", "float16", "bfloat16"])
@together("given", ["float32", "float16", "bfloat16"])
@together("count", [1, 5])
def test_floats_are_cast_and_rounded_to_nearest_even(dtype, given, count):
    cache = make_static(AttentionSpec(2, 8, dtype=dtype))
    new = normal(4, 2, count, 8).astype(as_dtype(given).numpy)
    key, value = cache.update(0, new, new * 2, 4)
    np.testing.assert_array_equal(key.numpy()[:, :, 4:], new.astype(np.float32).astype(as_dtype(dtype).numpy))
    np.testing.assert_array_equal(value.numpy()[:, :, 4:], (new * 2).astype(np.float32).astype(as_dtype(dtype).numpy))


def reversed_dim(array):
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1]


def odd_address(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    placed = memory[1:].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


LAYINGS = {
    "contiguous": lambda array: array,
    "tokens first": lambda array: np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "tokens outermost": lambda array: np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 2, 0)), 0, 2),
    "part of a fused projection": lambda array: np.concatenate([array * 0 - 1, array, array * 0 - 1], 3)[..., 8:16],
    "part of longer sequences": lambda array: np.concatenate([array, array * 0 - 1], 2)[:, :, : array.shape[2]],
    "every other sequence": lambda array: np.repeat(array, 2, 0)[::2],
    "tokens backwards": lambda array: np.ascontiguousarray(array[:, :, ::-1])[:, :, ::-1],
    "heads backwards": lambda array: np.ascontiguousarray(array[:, ::-1])[:, ::-1],
    "sequences backwards": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "dim backwards": reversed_dim,
    "dim outermost": lambda array: np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 3, 0)), 0, 3),
    "odd address": odd_address,
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "one for all heads": lambda array: np.broadcast_to(array[:, :1], array.shape),
}


@together("count", [1, 2, 5])
@together("batch", [1, 3])
@together("value_laying", ["contiguous", "tokens first"])
@pytest.mark.parametrize("laying", LAYINGS)
def test_strides_do_not_matter(laying, value_laying, batch, count):
    cache = make_static()
    key = LAYINGS[laying](normal(batch, 2, count, 8))
    value = LAYINGS[value_laying](normal(batch, 2, count, 8, seed=1))
    expected = np.array(key), np.array(value)
    views = cache.update(2, key, value, 3)
    for view, array, written in zip(views, (cache.key_array, cache.value_array), expected, strict=True):
        np.testing.assert_array_equal(view.numpy()[:, :, 3:], written)
        held = array.numpy()
        held[2, :batch, :, 3 : 3 + count] = 0
        assert not held.any()


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("count", [1, 5])
def test_arrays_of_any_framework_are_written(framework, count):
    require(framework)
    new = normal(4, 2, count, 8)
    if framework == "torch":
        import torch

        given = torch.from_numpy(new).to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
        position = torch.tensor([3])
        expected = given.float().numpy()
    else:
        import jax.numpy as jnp

        given, position = jnp.asarray(new), jnp.asarray(3)
        expected = new
    cache = make_static()
    key, value = cache.update(0, given, given, position)
    np.testing.assert_array_equal(key.numpy()[:, :, 3:], expected)
    np.testing.assert_array_equal(value.numpy()[:, :, 3:], expected)
    if framework == "torch":
        assert torch.from_dlpack(key).data_ptr() == cache.key(0).pointer


@pytest.mark.parametrize("shift", [-2, 0, 3])
@pytest.mark.parametrize("count", [1, 6])
def test_views_of_the_cache_are_read_before_they_are_written(shift, count):
    cache = make_static()
    key, value = cache.update(0, normal(4, 2, 12, 8), normal(4, 2, 12, 8, seed=1), 0)
    keys, values = key.numpy().copy(), value.numpy().copy()
    cache.update(0, value[:, :, 4 : 4 + count], key[:, :, 4 : 4 + count], 4 + shift)
    new = slice(4 + shift, 4 + shift + count)
    np.testing.assert_array_equal(cache.key(0).numpy()[:, :, new], values[:, :, 4 : 4 + count])
    np.testing.assert_array_equal(cache.value(0).numpy()[:, :, new], keys[:, :, 4 : 4 + count])


POSITIONS = {
    "int": 3,
    "numpy int64": np.int64(3),
    "numpy uint16": np.uint16(3),
    "0-d": np.array(3, np.int32),
    "one element": np.array([3]),
    "uint64": np.array([[3]], np.uint64),
    "int16": np.array([3], np.int16),
    "tensor": as_tensor(np.array([3], np.int32)),
    "list": [3],
    "read-only": np.frombuffer(np.int64(3).tobytes(), np.int64),
}


@together("position", POSITIONS.values())
def test_a_position_is_an_int_or_one_integer_on_the_host(position):
    cache = make_static()
    key, _ = cache.update(0, normal(1, 2, 2, 8), normal(1, 2, 2, 8), position)
    assert key.shape == (1, 2, 5, 8)
    assert cache.length(0) == 5


def test_a_position_may_be_any_object_with_an_index_method():
    class Place:
        def __index__(self):
            return 3

    assert make_static().update(0, normal(1, 2, 2, 8), normal(1, 2, 2, 8), Place())[0].shape[2] == 5


def test_an_empty_update_is_accepted():
    cache = make_static()
    key, value = cache.update(0, normal(4, 2, 5, 8), normal(4, 2, 5, 8), 0)
    key, value = cache.update(0, np.zeros((4, 2, 0, 8), np.float32), np.zeros((4, 2, 0, 8), np.float32), 5)
    assert key.shape == value.shape == (4, 2, 5, 8)
    assert cache.update(0, np.zeros((0, 2, 3, 8), np.float32), np.zeros((0, 2, 3, 8), np.float32), 0)[0].shape == (
        0,
        2,
        3,
        8,
    )
    assert cache.update(0, np.zeros((1, 2, 0, 8), np.float32), np.zeros((1, 2, 0, 8), np.float32), 16)[0].shape == (
        1,
        2,
        16,
        8,
    )


def test_a_user_defined_spec_may_mix_dtypes_and_order():
    cache = make_static(Planes(Plane("value", (2, 4), "bfloat16"), Plane("key", (2, 8), "float32")))
    assert (cache.key(0).dtype, cache.value(0).dtype) == ("float32", "bfloat16")
    key, value = cache.update(0, normal(1, 2, 3, 8), normal(1, 2, 3, 4), 0)
    assert (key.shape, value.shape) == ((1, 2, 3, 8), (1, 2, 3, 4))


def test_layers_may_differ_in_window_and_share_storage():
    windowed = AttentionSpec(2, 8, dtype="float32", window=4)
    cache = make_static([SPEC, windowed, Alias(0), SPEC, Alias(1)], num_layers=None)
    assert (cache.num_layers, cache.key_array.shape[0]) == (5, 3)
    assert [cache.spec(layer).window for layer in range(5)] == [None, 4, None, None, 4]
    for layer in range(5):
        cache.update(layer, np.full((1, 2, 1, 8), layer, np.float32), np.full((1, 2, 1, 8), layer, np.float32), layer)
    assert [cache.key(layer).pointer for layer in (2, 4)] == [cache.key(layer).pointer for layer in (0, 1)]
    assert len({cache.key(layer).pointer for layer in (0, 1, 3)}) == 3
    assert cache.key(0).numpy()[0, 0, :3, 0].tolist() == [0, 0, 2]
    assert cache.value(1).numpy()[0, 0, :5, 0].tolist() == [0, 1, 0, 0, 4]
    assert [cache.length(layer) for layer in range(5)] == [3, 5, 3, 4, 5]


def test_paged_attention_reads_a_static_cache_as_blocks_of_one_sequence_each():
    cache = make_static(AttentionSpec(2, 8, dtype="float32"))
    key, value, query = normal(4, 2, 9, 8), normal(4, 2, 9, 8, seed=1), normal(4, 4, 8, seed=2)
    cache.update(1, key, value, 0)
    tokens_first = [array.transpose(0, 2, 1, 3) for array in (cache.key(1), cache.value(1))]
    found = paged_attention(query, *tokens_first, block_table=np.arange(4)[:, None], seq_lens=[9] * 4)
    for i in range(4):
        expected = dense_attention(query[i : i + 1], key[i].swapaxes(0, 1), value[i].swapaxes(0, 1))
        np.testing.assert_allclose(found[i : i + 1], expected, atol=1e-5)
