"""Memory from an allocator of the caller: pools of blocks, pools of states, and caches."""

import gc
import weakref

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    KVPool,
    LatentSpec,
    PagedCacheConfig,
    PagedKVCache,
    StatePool,
    StateSpec,
    empty,
    make_cache,
)
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedOption
from pagecore.storage import HostMemory
from pagecore.storage.state_shapes import delta_planes
from tests.arrays.fake_runtime import FakeRuntime
from tests.together import together

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
STATE = StateSpec(delta_planes(2, 4, 8, 8))


class Pool:
    """An allocator that records its calls and hands out poisoned memory."""

    def __init__(self, spare=0):
        self.calls, self.given, self.spare = [], [], spare

    def __call__(self, nbytes, device):
        self.calls.append((nbytes, device))
        tensor = empty((nbytes + self.spare,), "uint8", device)
        if device == "cpu":
            tensor.numpy()[:] = 0xAB
        self.given.append(tensor)
        return tensor

    def owns(self, tensor):
        return any(one.pointer <= tensor.pointer < one.pointer + one.nbytes for one in self.given)


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNHD"])
@pytest.mark.parametrize("spare", [0, 100])
def test_every_buffer_of_a_pool_is_allocated_once(layout, spare):
    source = Pool(spare)
    pool = KVPool(SPEC, 2, 5, 4, layout, allocator=source)
    assert source.calls == [(pool.layout.buffer_nbytes(i), "cpu") for i in range(pool.layout.num_buffers)]
    assert [buffer.pointer for buffer in pool.buffers] == [tensor.pointer for tensor in source.given]
    for view in pool.planes():
        assert not view[0].numpy().any()
        assert (view.numpy()[1:].view(np.uint8) == 0xAB).all()
    scrubbed = KVPool(SPEC, 2, 5, 4, layout, allocator=Pool(spare), scrub=True)
    assert not any(view.numpy().any() for view in scrubbed.planes())


def test_every_plane_of_states_is_allocated_once():
    source = Pool()
    pool = StatePool(STATE, 4, num_layers=2, allocator=source)
    assert [nbytes for nbytes, _ in source.calls] == [view.nbytes for view in pool.planes()]
    assert all(source.owns(view) for view in pool.planes())
    assert not any(view[0].numpy().view("u1").any() for view in pool.planes())
    pool.copy([1], [2])
    pool.zero([1])


def test_a_cache_takes_all_of_its_bytes_from_the_allocator():
    source = Pool()
    cache = PagedKVCache(
        [SPEC, STATE, AttentionSpec(2, 8, dtype="float32", num_query_heads=2, window=6)],
        block_size=4, num_blocks=[9, 7], max_sequences=4, allocator=source,
    )  # fmt: skip
    assert sum(nbytes for nbytes, _ in source.calls) == cache._parts.store.nbytes
    assert all(source.owns(cache.plane(name, layer)) for layer, name in [(0, "key"), (2, "value"), (1, "conv")])
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    values = np.random.default_rng(0).normal(size=(9, 2, 8)).astype(np.float32)
    cache.write(0, values, values, batch)
    out = np.asarray(cache.attend(0, values, batch))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], values[0], rtol=1e-6)
    cache.commit(batch)
    config = PagedCacheConfig(block_size=4, num_blocks=9, max_sequences=4)
    made = make_cache(config, SPEC, allocator=(again := Pool()))
    assert again.owns(made.key(0))


def test_regions_of_a_cache_are_all_of_its_memory():
    source = Pool()
    options = {"block_size": 4, "max_sequences": 4}
    cache = PagedKVCache([SPEC, STATE, AttentionSpec(2, 16)], num_blocks=[9, 7], allocator=source, **options)
    regions = cache.regions()
    assert [(region.address, region.nbytes) for region in regions] == [
        (one.pointer, one.nbytes) for one in source.given
    ]
    assert sum(region.nbytes for region in regions) == cache.nbytes
    names = [region.name for region in regions]
    assert len(set(names)) == len(names)
    assert names[:2] == ["buffer of 'key', 'value' of group 0", "buffer of 'key', 'value' of group 1"]
    assert names[2].startswith("state ")
    assert PagedKVCache(SPEC, num_blocks=9, **options).regions()[0].name == "buffer of 'key', 'value'"
    assert PagedKVCache(SPEC, num_blocks=9, device="none", **options).regions() == []


@together("format", ["float8_token", "int4_token", "nvfp4", "mxfp8"])
@together("layout", ["layerwise", "blockwise", "BNHD"])
def test_planes_of_scales_come_from_the_allocator_too(format, layout):
    source = Pool()
    pool = KVPool(AttentionSpec(2, 32, dtype="float32", format=format), 2, 5, 4, layout, allocator=source)
    names = [plane.name for plane in pool.spec.planes]
    assert "key_scale" in names
    assert all(source.owns(pool.plane(name, layer)) for name in names for layer in range(2))
    assert [(one.address, one.nbytes) for one in pool.regions()] == [(one.pointer, one.nbytes) for one in source.given]
    assert sum(region.nbytes for region in pool.regions()) == pool.nbytes


@pytest.mark.parametrize(
    "specs",
    [
        [LatentSpec(32, 8, scale=1.0)],
        [LatentSpec(32, 8, scale=1.0, index_dim=16)],
        [AttentionSpec(2, 8, dtype="float32", num_query_heads=2, sinks=(0.5, -1.0))],
        [AttentionSpec(2, 8, dtype="float32", window=6, sink_tokens=4)],
        [SPEC, CrossSpec(2, 8, dtype="float32", num_query_heads=2, max_tokens=12)],
    ],
    ids=["latents", "index keys", "sinks", "sink tokens", "cross attention"],
)
def test_layers_of_every_kind_come_from_the_allocator(specs):
    source = Pool()
    cache = PagedKVCache(specs, block_size=4, num_blocks=9, max_sequences=4, allocator=source)
    planes = [(plane.name, layer) for layer, spec in enumerate(specs) for plane in spec.planes]
    assert all(source.owns(cache.plane(name, layer)) for name, layer in planes)
    assert [(one.address, one.nbytes) for one in cache.regions()] == [(one.pointer, one.nbytes) for one in source.given]
    assert sum(nbytes for nbytes, _ in source.calls) == cache.nbytes


def test_memory_of_another_owner_lives_as_long_as_the_pool():
    memories = []

    def mapped(nbytes, device):
        memory = HostMemory(nbytes)
        memories.append(weakref.ref(memory._owner))
        return memory.tensor()

    pool = KVPool(SPEC, 2, 5, 4, allocator=mapped)
    gc.collect()
    pool.key(1)[4] = 1.0
    assert memories[0]() is not None
    del pool
    gc.collect()
    assert memories[0]() is None


def test_device_memory_of_an_allocator_is_zeroed():
    runtime = FakeRuntime()
    with use_runtime(runtime):
        source = Pool()
        pool = KVPool(SPEC, 2, 5, 4, device="cuda:1", allocator=source)
        assert source.calls == [(pool.nbytes, "cuda:1")]
        assert ("fill", 0, pool.nbytes, 7) in runtime.calls
        states = StatePool(STATE, 4, device="cuda:1", allocator=source)
        fills = [call for call in runtime.calls if call[0] == "fill"]
        assert {view.nbytes for view in states.planes()} <= {call[2] for call in fills}


class Misplaced:
    __cuda_array_interface__ = {"shape": (1 << 20,), "typestr": "|u1", "data": (4096, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (5, UnsupportedOption, "allocator is 5; expected a function"),
        (lambda nbytes, device: None, PagecoreError, "NoneType"),
        (lambda nbytes, device: np.zeros(nbytes - 1, np.uint8), ShapeError, "returned .* bytes; it was asked for"),
        (lambda nbytes, device: np.frombuffer(bytes(nbytes), np.uint8), UnsupportedOption, "read-only"),
        (lambda nbytes, device: empty((nbytes + 1,), "uint8")[1:], ShapeError, "align it to 64 bytes"),
        (lambda nbytes, device: np.zeros((nbytes, 64), np.uint8)[:, 0], ShapeError, "contiguous|align"),
        (lambda nbytes, device: Misplaced(), DeviceError, "returned memory on cuda:0; it was asked for cpu"),
    ],
)
def test_what_an_allocator_must_not_return(source, error, says):
    for make in (
        lambda: KVPool(SPEC, 2, 5, 4, allocator=source),
        lambda: StatePool(STATE, 4, allocator=source),
        lambda: PagedKVCache(SPEC, num_blocks=5, allocator=source),
    ):
        with pytest.raises(error, match=says):
            make()


def test_memory_that_is_given_twice_is_refused():
    held = empty((1 << 20,), "uint8")
    for make in (
        lambda source: KVPool(SPEC, 2, 5, 4, "BNHD", allocator=source),
        lambda source: StatePool(STATE, 4, allocator=source),
        lambda source: PagedKVCache([SPEC, AttentionSpec(2, 16)], num_blocks=5, allocator=source),
    ):
        with pytest.raises(UnsupportedOption, match=r"share \d+ bytes"):
            make(lambda nbytes, device: held)


def test_an_error_of_the_allocator_is_the_caller_s_and_leaves_nothing():
    refs = []

    def failing(nbytes, device):
        if refs:
            raise MemoryError("the pool of the framework is empty")
        memory = np.zeros(nbytes + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:nbytes]
        refs.append(weakref.ref(memory))
        return memory

    with pytest.raises(MemoryError, match="of the framework"):
        KVPool(SPEC, 2, 5, 4, "BNHD", allocator=failing)
    gc.collect()
    assert refs[0]() is None


def test_an_allocator_is_refused_next_to_buffers_and_without_bytes():
    source, buffers = Pool(), [np.zeros(1 << 20, np.uint8)]
    for make in (
        lambda: KVPool(SPEC, 1, 5, 4, buffers=buffers, allocator=source),
        lambda: StatePool(STATE, 4, buffers=buffers, allocator=source),
        lambda: PagedKVCache(SPEC, num_blocks=5, buffers=buffers, allocator=source),
    ):
        with pytest.raises(UnsupportedOption, match="buffers and allocator are given"):
            make()
    with pytest.raises(UnsupportedOption, match="device is 'none'"):
        PagedKVCache(SPEC, num_blocks=5, device="none", allocator=source)
    assert source.calls == []
