"""Pools: budgets, views and adopted memory."""

import gc

import numpy as np
import pytest

from pagecore.arrays import as_tensor
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import AttentionSpec, KVLayout, KVPool, Plane, parse_memory
from tests.together import together

SPEC = AttentionSpec(2, 8, dtype="float32")
LLAMA = AttentionSpec(32, 128, dtype="bfloat16")


def test_worked_example_10_budget_in_blocks():
    assert KVPool.blocks_for("10GiB", LLAMA, 32, 16) == 1_280
    assert KVPool.blocks_for(10 * 2**30, LLAMA, 1, 16) == 40_960
    with pytest.raises(NotEnoughMemory, match="16777215"):
        KVPool.blocks_for(16_777_215, LLAMA, 32, 16)
    assert KVPool.blocks_for(16_777_216, LLAMA, 32, 16) == 2


def test_worked_example_2_bytes_of_a_pool():
    pool = KVPool(AttentionSpec(2, 32, dtype="float16"), num_layers=1, num_blocks=17, block_size=4)
    assert pool.nbytes - pool.bytes_per_block == 16_384
    assert pool.bytes_per_token == 256


@pytest.mark.parametrize("order", ["layerwise", "blockwise", KVLayout("layerwise", "NHD"), "BNCHD", "LBNHD"])
def test_views_have_the_logical_shape_in_every_layout(order):
    pool = KVPool(AttentionSpec(2, 8, 16, "bfloat16"), num_layers=3, num_blocks=5, block_size=4, layout=order)
    assert pool.key(2).shape == (5, 4, 2, 8)
    assert pool.value(0).shape == (5, 4, 2, 16)
    assert pool.key(0).dtype == "bfloat16"
    assert pool.key(1).strides[-1] == 2


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNCHD"])
def test_the_null_block_is_zero_initially(layout, monkeypatch):
    monkeypatch.setattr(
        "pagecore.storage.pools.pool.empty", lambda shape, dtype, device: as_tensor(np.full(shape, 7, dtype))
    )
    pool = KVPool(SPEC, num_layers=2, num_blocks=3, block_size=4, layout=layout)
    assert all(not view.numpy()[0].any() and view.numpy()[1:].all() for view in pool.planes())


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNHD"])
def test_a_pool_that_scrubs_begins_with_zeros_in_every_block(layout, monkeypatch):
    monkeypatch.setattr(
        "pagecore.storage.pools.pool.empty", lambda shape, dtype, device: as_tensor(np.full(shape, 7, dtype))
    )
    pool = KVPool(SPEC, num_layers=2, num_blocks=3, block_size=4, layout=layout, scrub=True)
    assert not any(view.numpy().any() for view in pool.planes())
    pool.key(1)[2] = 3.0
    pool.zero()
    assert not any(view.numpy().any() for view in pool.planes())


def test_scrub_zeroes_the_adopted_memory_that_the_layout_uses():
    memory = np.full(10_000, 7, np.uint8)
    pool = KVPool(SPEC, 1, 3, 4, buffers=memory, scrub=np.True_)
    assert not memory[: pool.nbytes].any()
    assert np.all(memory[pool.nbytes :] == 7)
    with pytest.raises(UnsupportedOption, match="scrub is 'no'; use True or False"):
        KVPool(SPEC, 1, 3, 4, buffers=memory, scrub="no")


def test_a_view_outlives_its_pool():
    pool = KVPool(SPEC, num_layers=1, num_blocks=3, block_size=4)
    view = pool.key(0)
    view[1] = 3.0
    del pool
    gc.collect()
    assert np.all(view.numpy()[1] == 3.0)


def test_planes_that_are_per_block_have_no_token_axis():
    class Scaled:
        window = None
        planes = (Plane("key", (2, 8), "float16"), Plane("scale", (2,), "float32", per="block"))

    pool = KVPool(Scaled(), num_layers=2, num_blocks=3, block_size=4, layout="LBNHD")
    assert pool.plane("scale", 1).shape == (3, 2)
    assert pool.bytes_per_block == 2 * (4 * 2 * 8 * 2 + 2 * 4)


def test_adopted_memory_is_used_in_place_and_left_unchanged():
    memory = np.full(10_000, 7, np.uint8)
    pool = KVPool(SPEC, 1, 3, 4, buffers=memory)
    assert pool.key(0).pointer == memory.ctypes.data
    assert np.all(memory == 7)
    pool.key(0)[1] = 0
    assert not np.all(memory == 7)


def test_adopted_buffers_may_be_named_by_plane():
    key, value = np.zeros((3, 4, 2, 8), np.float32), np.zeros((3, 4, 2, 8), np.float32)
    pool = KVPool(SPEC, 1, 3, 4, layout="LBNHD", buffers={"value": value, "key": key})
    pool.value(0)[2] = 1.0
    assert value[2].all()
    assert not key.any()


@pytest.mark.parametrize(
    ("buffers", "error"),
    [
        (np.zeros(767, np.uint8), ShapeError),
        (np.zeros((2, 5000), np.uint8)[:, ::2], ShapeError),
        ([np.zeros(5000, np.uint8)] * 2, ShapeError),
        ({"key": np.zeros(5000, np.uint8)}, ShapeError),
        (np.zeros(5001, np.uint8)[1:], ShapeError),
        (np.frombuffer(bytes(5000), np.uint8), UnsupportedOption),
    ],
)
def test_invalid_buffers_of_a_pool_are_refused(buffers, error):
    with pytest.raises(error):
        KVPool(SPEC, 1, 3, 4, buffers=buffers)


@together(
    ("arguments", "error"),
    [
        ({"num_layers": 0}, ShapeError),
        ({"num_layers": 10**5000}, ShapeError),
        ({"num_blocks": 2**31}, ShapeError),
        ({"num_blocks": -(10**5000)}, ShapeError),
        ({"block_size": 10**5000}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": 2.5}, ShapeError),
        ({"block_size": -4}, ShapeError),
        ({"layout": "rowwise"}, UnsupportedOption),
        ({"layout": 5}, UnsupportedOption),
        ({"layout": None}, UnsupportedOption),
        ({"device": "cuda:9999"}, DeviceError),
    ],
)
def test_invalid_sizes_are_refused(arguments, error):
    with pytest.raises(error):
        KVPool(**{"spec": SPEC, "num_layers": 1, "num_blocks": 3, "block_size": 4} | arguments)


def test_an_unknown_plane_or_layer_is_refused():
    pool = KVPool(SPEC, 1, 3, 4)
    with pytest.raises(UnsupportedOption, match="latent"):
        pool.plane("latent")
    with pytest.raises(ShapeError, match="layer is 1"):
        pool.key(1)
    with pytest.raises(ShapeError, match="layer is -1"):
        pool.key(-1)


@pytest.mark.parametrize(
    "layer", [1.0, "0", None, [0], np.array([0, 0]), 2, -1, pytest.param(10**5000, id="huge"), np.float32(0)]
)
def test_a_layer_that_is_not_there_is_refused_by_name(layer):
    pool = KVPool(SPEC, 2, 3, 4)
    for ask in (pool.key, pool.value, lambda number: pool.plane("key", number)):
        with pytest.raises(ShapeError, match=r"layer is .*; the pool has layers 0 to 1"):
            ask(layer)
        assert ask(np.uint8(1)).pointer == ask(1).pointer


@pytest.mark.parametrize("name", ["latent", None, 0, ["key"], np.array(["key"]), pytest.param(10**5000, id="huge")])
def test_a_plane_that_is_not_stored_is_refused_by_name(name):
    with pytest.raises(UnsupportedOption, match=r"plane .* is not stored; this pool has key, value"):
        KVPool(SPEC, 1, 3, 4).plane(name)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(5, 5), ("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("123", 123), (np.int64(9), 9)],
)
def test_budgets_in_bytes(memory, expected):
    assert parse_memory(memory) == expected


def test_a_float_is_a_fraction_of_the_free_memory():
    assert 0 < parse_memory(0.25) < parse_memory(1.0)


@pytest.mark.parametrize(
    "memory",
    [
        -1,
        pytest.param(-(10**5000), id="huge"),
        "8 gigs",
        "-3GiB",
        "",
        "0.5",
        "8.",
        "9" * 5000,
        0.0,
        1.5,
        float("nan"),
        None,
        True,
        [1],
    ],
)
def test_invalid_budgets_are_refused(memory):
    with pytest.raises(ShapeError):
        parse_memory(memory)


@together(
    ("arguments", "error"),
    [
        ({"num_kv_heads": 0}, ShapeError),
        ({"head_dim": -1}, ShapeError),
        ({"v_head_dim": 0}, ShapeError),
        ({"dtype": "int8"}, UnsupportedDtype),
        ({"dtype": "float7"}, UnsupportedDtype),
        ({"window": 0}, ShapeError),
        ({"num_query_heads": 7}, ShapeError),
        ({"softcap": -1.0}, ShapeError),
        ({"softcap": float("nan")}, ShapeError),
        ({"softcap": None}, ShapeError),
        ({"softcap": "30"}, ShapeError),
        ({"scale": "0.5"}, ShapeError),
        ({"sinks": "12"}, ShapeError),
        ({"scale": float("inf")}, ShapeError),
        ({"scale": "small"}, ShapeError),
        ({"sinks": 5}, ShapeError),
        ({"sinks": np.array(5.0)}, ShapeError),
        ({"scale": 10**5000}, ShapeError),
        ({"head_dim": -(10**5000)}, ShapeError),
        ({"sinks": ["a", "b"]}, ShapeError),
        ({"sinks": [0.0, float("nan")]}, ShapeError),
        ({"sinks": [0.0]}, ShapeError),
        ({"sinks": [0.0] * 2, "num_query_heads": 4}, ShapeError),
    ],
)
def test_an_invalid_spec_is_refused(arguments, error):
    with pytest.raises(error):
        AttentionSpec(**{"num_kv_heads": 2, "head_dim": 8} | arguments)


def test_specs_are_values():
    one = AttentionSpec(2, 8, sinks=np.zeros(4))
    assert one == AttentionSpec(2, 8, 8, "bfloat16", sinks=[0.0] * 4)
    assert hash(one) == hash(AttentionSpec(2, 8, sinks=(0, 0, 0, 0)))
    assert one != AttentionSpec(2, 8)
