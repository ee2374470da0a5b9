"""Tensors and pieces of registered pools against a plain walk of their layouts."""

import numpy as np
import pytest

from pagecore import KVPool, LatentSpec, PagedKVCache, Plane, StateSpec
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import HostPool
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.engine import StorageEngine
from tests.arrays.fake_runtime import FakeRuntime
from tests.capabilities import require
from tests.tiers.engine.engines import BLOCKS, CUDA, HOST, LAYERS, LAYOUTS, SIZE, SPEC, UNEQUAL, bound, order_of


class Coded:
    window = None
    planes = (Plane("key", (2, 12), "int8"), Plane("scale", (2, 1), "float32", per="block"))


def walked(pool, block):
    """Return the runs of a block, from the addresses of all its elements: sets of bytes, joined where they adjoin."""
    addresses = set()
    for view in pool.planes():
        steps = np.zeros(1, np.int64)
        for extent, stride in zip(view.shape[1:], view.strides[1:], strict=True):
            steps = (steps[:, None] + np.arange(extent) * stride).ravel()
        first = view[block].pointer
        addresses |= {int(first + step + i) for step in steps for i in range(view.itemsize)}
    return addresses


def holds(layout, spec):
    """Return True unless the planes differ in an axis outside of C."""
    try:
        bound(layout, spec).plane_layout(0)
    except UnsupportedOption:
        return False
    return True


SPECS = [SPEC, UNEQUAL, LatentSpec(12, 4, scale=1.0), Coded()]
HELD = [pytest.param(one, spec, id=f"{one}-{i}") for one in LAYOUTS for i, spec in enumerate(SPECS) if holds(one, spec)]


@pytest.mark.parametrize(("layout", "spec"), HELD)
def test_pieces_are_the_bytes_of_a_block_and_as_long_as_they_can_be(layout, spec):
    pool = KVPool(spec, LAYERS, BLOCKS, SIZE, layout)
    handle = StorageEngine().register(pool, HOST, 0)
    blocks = [5, 1, 6]
    pieces = handle.pieces(blocks)
    assert (pieces.dtype, pieces.shape) == (np.uint64, (3 * handle.pieces_per_block, 2))
    for block, listed in zip(blocks, pieces.reshape(3, -1, 2).tolist(), strict=True):
        covered = [address + i for address, size in listed for i in range(size)]
        assert set(covered) == walked(pool, block)
        assert len(covered) == len(set(covered)) == pool.bytes_per_block
    if order_of(layout).order == "blockwise":
        assert handle.pieces_per_block == 1
        np.testing.assert_array_equal(
            np.diff(handle.pieces(range(BLOCKS))[:, 0].astype(np.int64)), pool.layout.block_stride
        )
    if layout == "layerwise" and spec is SPEC:
        assert handle.pieces_per_block == 2 * LAYERS


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tensors_alias_the_memory_in_the_order_of_the_axes(layout):
    pool = KVPool(SPEC, LAYERS, BLOCKS, SIZE, layout)
    handle = StorageEngine().register(pool, HOST, 0)
    assert (handle.layout, handle.dtype) == (pool.layout, "float16")
    random = np.random.default_rng(0)
    for view in pool.planes():
        view.numpy()[...] = random.normal(size=view.shape)
    axes = pool.layout.axes
    for number, tensor in enumerate(handle.tensors()):
        assert tensor.shape == pool.layout.shape
        array = tensor.numpy()
        per_layer = pool.layout.num_buffers // (1 if "L" in axes else LAYERS)
        for layer in range(LAYERS) if "L" in axes else [number // per_layer]:
            for plane in range(2) if "C" in axes else [number % per_layer]:
                index = tuple({"L": layer, "C": plane}.get(axis, slice(None)) for axis in axes)
                rest = [axis for axis in axes if axis not in "LC"]
                found = array[index].transpose([rest.index(axis) for axis in "BNHD"])
                expected = pool.plane(("key", "value")[plane], layer)
                np.testing.assert_array_equal(found, expected.numpy())
                assert np.shares_memory(found, expected.numpy())
    if pool.layout.num_buffers == 1:
        assert handle.tensor().pointer == pool.buffers[0].pointer
    else:
        with pytest.raises(ShapeError, match=rf"has {pool.layout.num_buffers} buffers; pass a number"):
            handle.tensor()


def test_memory_of_unequal_planes_is_bytes():
    engine = StorageEngine()
    blockwise = engine.register(KVPool(UNEQUAL, LAYERS, BLOCKS, SIZE, "blockwise"), HOST, 0)
    assert blockwise.tensor().shape == (BLOCKS, blockwise.layout.block_stride)
    assert engine.register(KVPool(UNEQUAL, 2, 3, SIZE), HOST, 1).tensor().ndim == 1
    apart = engine.register(KVPool(UNEQUAL, 2, 3, SIZE, "BNHD"), HOST, 2)
    assert [tensor.shape for tensor in apart.tensors()] == [(3, SIZE, 2, 8), (3, SIZE, 2, 12)] * 2
    mixed = engine.register(KVPool(Coded(), 2, 3, SIZE, "LBNHD"), HOST, 3)
    with pytest.raises(UnsupportedDtype, match="key int8, scale float32"):
        _ = mixed.dtype
    assert [str(tensor.dtype) for tensor in mixed.tensors()] == ["int8", "float32"]
    for wrong in (2, -1, "key"):
        with pytest.raises(ShapeError, match="buffer is"):
            mixed.tensor(wrong)


def test_pieces_of_a_host_pool_are_its_own():
    states = [StateSpec(delta_planes(2, 4, 8, 8))]
    pool = HostPool([(SPEC, 2), (UNEQUAL, 3)], SIZE, states, num_blocks=[5, 6], num_states=3)
    engine = StorageEngine()
    assert engine.register(pool, HOST, 0).group == 0
    for group in range(2):
        handle = engine.handle(HOST, 0, group)
        np.testing.assert_array_equal(handle.pieces([1, 4, 2]), pool.pieces(group, [1, 4, 2]))
    with pytest.raises(InvalidBlock, match="block 5 is outside of the 5 blocks"):
        engine.handle(HOST, 0).pieces([0, 5])
    with pytest.raises(ShapeError, match="one axis"):
        engine.handle(HOST, 0).pieces([[1]])


def test_a_list_of_foreign_tensors_is_adopted_one_a_layer():
    torch = require("torch")
    layers = [torch.zeros(2, BLOCKS, SIZE, 2, 8, dtype=torch.float16) for _ in range(LAYERS)]
    engine = StorageEngine()
    handle = engine.register(layers, HOST, 0, spec=SPEC, block_size=SIZE)
    assert (handle.num_blocks, handle.layout.num_layers, handle.pieces_per_block) == (BLOCKS, LAYERS, 2 * LAYERS)
    handle.storage.value(2)[3] = 5.0
    assert layers[2][1, 3].min() == layers[2].max() == 5
    assert handle.pieces([1])[0, 0] == layers[0].data_ptr() + SIZE * 2 * 8 * 2
    pairs = [(torch.zeros(BLOCKS, SIZE, 2, 8).half(), torch.zeros(BLOCKS, SIZE, 2, 8).half()) for _ in range(2)]
    handle = engine.register(pairs, HOST, 1, spec=SPEC, block_size=SIZE, layout="BNHD")
    assert [tensor.pointer for tensor in handle.tensors()] == [t.data_ptr() for pair in pairs for t in pair]
    whole = np.zeros((LAYERS, 2, BLOCKS, SIZE, 2, 8), np.float16)
    one = {"spec": SPEC, "block_size": SIZE, "layout": "LCBNHD"}
    assert engine.register(whole, HOST, 2, num_layers=LAYERS, **one).num_blocks == BLOCKS
    with pytest.raises(ShapeError, match="num_layers is missing"):
        engine.register(whole, HOST, 3, **one)
    with pytest.raises(ShapeError, match="without spec or block_size"):
        engine.register(layers, HOST, 3)
    with pytest.raises(DeviceError, match="is on cpu; the pool is on cuda:0"):
        engine.register(layers, CUDA, 0, spec=SPEC, block_size=SIZE)


def test_a_cache_registers_the_pool_of_every_group():
    cache = PagedKVCache([SPEC, UNEQUAL, SPEC], num_blocks=[5, 6])
    engine = StorageEngine()
    engine.register(cache, HOST, 0)
    assert [handle.layout.num_layers for handle in engine.handles()] == [2, 1]
    assert engine.handle(HOST, 0, 1).storage.plane("key").pointer == cache.key(1).pointer
    with pytest.raises(DeviceError, match="on device 'none', not on cpu"):
        engine.register(PagedKVCache(SPEC, num_blocks=5, device="none"), HOST, 1)


def test_device_memory_is_layerwise_and_host_memory_block_wise_and_padded():
    with use_runtime(FakeRuntime()):
        engine = StorageEngine()
        device = engine.allocate(SPEC, LAYERS, BLOCKS, SIZE, CUDA, 1)
        host = engine.allocate(SPEC, LAYERS, BLOCKS, SIZE, HOST, 0, huge_pages=False)
        assert (device.layout.order, device.tensor().device) == ("layerwise", "cuda:1")
        assert (host.layout.order, host.layout.block_alignment) == ("blockwise", 4096)
        assert (host.pieces([1])[:, 0] % 4096 == 0).all()
        with pytest.raises(DeviceError, match="on device 'cuda:1', not on cuda:0"):
            engine.register(device.storage, CUDA, 0)
        with pytest.raises(DeviceError, match="on device 'cuda:1', not on cpu"):
            engine.register(device.storage, HOST, 1)
        pinned = HostPool([(SPEC, 1)], SIZE, num_blocks=[3], device="cuda:0")
        assert engine.register(pinned, HOST, 1).tensor().device == "cpu"
        with pytest.raises(DeviceError, match="register it as HOST"):
            engine.register(pinned, CUDA, 0)
        pinned.close()
