"""A paged cache in memory of the caller: its results, and the buffers that it refuses."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pagecore import AttentionSpec, KVLayout, PagedKVCache, SwapSpace, TensorParallel, as_tensor, empty
from pagecore.errors import (
    DeviceError,
    NotEnoughMemory,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal, owned_memory
from tests.cache.swaps import fill
from tests.cache.test_paged_machine import CacheMachine
from tests.cache.test_prefix_machine import PrefixMachine
from tests.capabilities import require
from tests.faults import is_full
from tests.reference.dense import dense_attention
from tests.thinning import in_turn
from tests.together import together

pytestmark = pytest.mark.slow

LAYOUTS = ["layerwise", "blockwise", KVLayout("blockwise", "NHD"), "BNHD", "BHND", "CBNHD", "BCHND", "LBNHD", "NBHD"]
OPTIONS = {"block_size": 4, "num_blocks": 17, "max_sequences": 4}
MIXED = [SPEC, WINDOWED, SPEC]


def adopting(layers=MIXED, layout="CBNHD", **options):
    return PagedKVCache(layers, layout=layout, buffers=owned_memory(layers, layout, **OPTIONS), **(OPTIONS | options))


@pytest.mark.parametrize(("layout", "machine"), in_turn(LAYOUTS, over=[[CacheMachine, PrefixMachine]]), ids=str)
def test_a_cache_in_memory_of_the_caller_agrees_with_the_model(machine, layout):
    class InOwnedMemory(machine):
        def make_cache(self, layers, **options):
            buffers = owned_memory(layers, layout, **options)
            return PagedKVCache(layers, layout=layout, buffers=buffers, **options)

    limits = {
        "max_examples": 8 if is_full() else 4,
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    run_state_machine_as_test(InOwnedMemory, settings=settings(stateful_step_count=30, **limits))


def computed(cache, sequence):
    """Return the bytes of key and value of every token in a sequence's blocks, for each layer."""
    places = range(sequence.num_computed_tokens)
    tables = [cache.block_table(cache.group_of(layer)).numpy()[sequence.row] for layer in range(cache.num_layers)]
    return [
        [plane.numpy()[table[place // 4], place % 4].tobytes() for place in places if table[place // 4]]
        for layer, table in enumerate(tables)
        for plane in (cache.key(layer), cache.value(layer))
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_copies_swaps_and_prefixes_equal_those_of_an_allocating_cache_bit_for_bit(layout):
    def run(cache):
        space = SwapSpace(cache, num_blocks=9)
        parent = cache.add_sequence(range(10))
        outputs = []
        for count in (7, 3):
            fill(cache, [parent], count, seed=count)
        child = cache.fork(parent)
        cache.append_tokens([parent, child], [3, 4])
        batch = cache.prepare([parent, child], 1)
        for layer in range(3):
            cache.write(layer, normal(2, 2, 8, seed=layer), normal(2, 2, 8, seed=9 + layer), batch)
            outputs.append(np.asarray(cache.attend(layer, normal(2, 4, 8, seed=99), batch)))
        cache.commit(batch)
        assert cache.stats().num_copied_blocks == 2
        cache.swap_out([child], space)
        cache.swap_in([child])
        again = cache.add_sequence([*range(10), 3, 5])
        assert again.num_cached_tokens == 8
        cache.check_invariants()
        return outputs, [computed(cache, one) for one in (parent, child, again)]

    (outputs, blocks), (expected, expected_blocks) = run(adopting(layout=layout)), run(make(MIXED, layout=layout))
    assert [output.tobytes() for output in outputs] == [output.tobytes() for output in expected]
    assert blocks == expected_blocks


def test_the_callers_arrays_hold_the_written_values_and_nothing_else_changes():
    owned = [np.full((2, 9, 16, 2, 8), np.nan, np.float32) for _ in range(3)]
    cache = PagedKVCache(SPEC, num_layers=3, layout="CBNHD", buffers=owned)
    assert cache.num_blocks == (9,)
    assert cache.nbytes == sum(array.nbytes for array in owned)
    assert all(np.isnan(array).all() for array in owned)
    sequence = cache.add_sequence(range(20))
    batch = cache.prepare([sequence], 20)
    key, value, query = normal(20, 2, 8), normal(20, 2, 8, seed=1), normal(20, 4, 8, seed=2)
    cache.write(1, key, value, batch)
    np.testing.assert_allclose(cache.attend(1, query, batch), dense_attention(query, key, value), atol=1e-5)
    table = cache.block_table().numpy()[sequence.row, :2]
    for plane, new in enumerate((key, value)):
        np.testing.assert_array_equal(owned[1][plane, table].reshape(32, 2, 8)[:20], new)
    assert sum(int((~np.isnan(array)).sum()) for array in owned) == 2 * 20 * 2 * 8


def test_the_smallest_buffer_of_a_group_limits_its_blocks():
    keys, values = np.zeros((12, 4, 2, 8), np.float32), np.zeros((9, 4, 2, 8), np.float32)
    more = [np.zeros(20 * 4 * 16 * 4, np.uint8) for _ in range(2)]
    cache = PagedKVCache([SPEC, WINDOWED], block_size=4, layout="BNHD", buffers=[{"key": keys, "value": values}, more])
    assert cache.num_blocks == (9, 20)
    assert cache.key(0).pointer == keys.ctypes.data
    small = [np.zeros(2 * 4 * 16 * 4 - 1, np.uint8), np.zeros(4096, np.uint8)]
    with pytest.raises(NotEnoughMemory, match=r"group 1 hold 1 blocks of 512 bytes; at least 2"):
        PagedKVCache([SPEC, WINDOWED], block_size=4, layout="BNHD", buffers=[[keys, values], small])


def test_the_buffers_of_one_group_may_be_in_a_list_of_groups():
    keys, values = ([np.zeros((9, 4, 2, 8), np.float32) for _ in range(2)] for _ in range(2))
    forms = [
        {"key": keys, "value": values},
        [{"key": keys, "value": values}],
        [keys[0], values[0], keys[1], values[1]],
        [[keys[0], values[0], keys[1], values[1]]],
        [[keys[0], values[0]], [keys[1], values[1]]],
        [[[keys[0], values[0]], [keys[1], values[1]]]],
    ]
    for form in forms:
        cache = PagedKVCache(SPEC, num_layers=2, block_size=4, layout="BNHD", buffers=form)
        assert [cache.key(i).pointer for i in range(2)] == [array.ctypes.data for array in keys]
        assert [cache.value(i).pointer for i in range(2)] == [array.ctypes.data for array in values]
    one = np.zeros(2 * 2 * 9 * 4 * 16 * 4, np.uint8)
    for form in (one, [one], [[one]]):
        assert PagedKVCache(SPEC, num_layers=2, block_size=4, buffers=form).num_blocks == (9,)


def test_a_dlpack_capsule_is_read_once():
    memory = np.zeros(2 * 9 * 16 * 16 * 4, np.uint8)
    cache = PagedKVCache(SPEC, buffers=as_tensor(memory).__dlpack__(max_version=(1, 0)))
    assert cache.num_blocks == (9,)
    assert cache.key(0).pointer == memory.ctypes.data


def test_the_cache_keeps_the_memory_alive():
    memory = empty((2 * 9 * 16 * 16,), "float32").numpy()
    alive = weakref.ref(memory)
    cache = PagedKVCache(SPEC, buffers=memory)
    del memory
    gc.collect()
    assert alive() is not None
    advance(cache, [cache.add_sequence(range(9))], 9)
    del cache
    gc.collect()
    assert alive() is None


def test_one_torch_tensor_per_layer_serves_a_cache():
    torch = require("torch")
    owned = [torch.full((9, 2, 4, 2, 8), torch.nan) for _ in range(2)]
    cache = PagedKVCache(SPEC, num_layers=2, block_size=4, layout="BCNHD", buffers=owned)
    sequence = cache.add_sequence(range(6))
    batch = cache.prepare([sequence], 6)
    key, query = torch.randn(6, 2, 8), torch.randn(6, 4, 8)
    cache.write(1, key, key, batch)
    np.testing.assert_allclose(
        cache.attend(1, query, batch), dense_attention(query.numpy(), key.numpy(), key.numpy()), atol=1e-5
    )
    first = int(cache.block_table().numpy()[sequence.row, 0])
    assert torch.equal(owned[1][first, 0], key[:4])


SIZE = 2 * 9 * 4 * 16 * 4  # bytes of key and value in 9 blocks of one layer


def room(count=1, dtype=np.uint8):
    return [np.zeros(SIZE // np.dtype(dtype).itemsize, dtype) for _ in range(count)]


@together(
    ("options", "error", "says"),
    [
        ({"buffers": room(), "device": "none"}, UnsupportedOption, "device is 'none'"),
        ({"buffers": room(), "memory": "1GiB"}, ShapeError, "memory is '1GiB', but buffers have a fixed size"),
        ({"buffers": room(), "device": "cuda", "num_blocks": 9}, DeviceError, "on cpu; the pool is on cuda:0"),
        ({"buffers": room(), "num_blocks": 10}, ShapeError, "needed"),
        ({"buffers": room(), "num_blocks": 1}, ShapeError, "num_blocks is 1"),
        ({"buffers": room(), "block_size": 40}, NotEnoughMemory, "make block_size smaller"),
        ({"buffers": []}, ShapeError, "0 buffers"),
        ({"buffers": room(2)}, ShapeError, "2 buffers"),
        ({"buffers": room(dtype=np.float16)}, UnsupportedDtype, "float16; expected float32"),
        ({"buffers": room(2), "layout": "rowwise"}, UnsupportedOption, "layout"),
        ({"buffers": room(1) * 2, "layout": "BNHD"}, UnsupportedOption, "'key' .* 'value' .* share"),
        ({"buffers": "memory"}, UnsupportedDtype, "buffer of 'key', 'value'"),
        ({"buffers": 7}, UnsupportedDtype, "buffer of 'key', 'value'"),
        ({"buffers": bytes(SIZE)}, UnsupportedOption, "read-only"),
        ({"buffers": np.zeros(SIZE + 1, np.uint8)[1:]}, ShapeError, "address"),
        ({"buffers": np.zeros((SIZE, 2), np.uint8)[:, 0]}, ShapeError, "contiguous"),
        ({"layers": MIXED, "buffers": room()}, ShapeError, "buffers lists 1; the layers form 2 groups"),
        ({"layers": MIXED, "buffers": room(3)}, ShapeError, "buffers lists 3; the layers form 2 groups"),
        ({"layers": MIXED, "buffers": room()[0]}, ShapeError, "buffers is a ndarray; the layers form 2 groups"),
        ({"layers": MIXED, "buffers": {"key": 1}}, ShapeError, "buffers is a dict; the layers form 2 groups"),
        ({"layers": MIXED, "buffers": room() * 2}, UnsupportedOption, "of group 0 and the .* of group 1 share"),
    ],
)
def test_invalid_buffers_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        PagedKVCache(**{"layers": SPEC, "block_size": 4} | options)


def test_groups_that_share_part_of_an_array_are_refused():
    base = np.zeros(4 * SIZE, np.uint8)
    with pytest.raises(UnsupportedOption, match=r"of group 0 and the .* of group 1 share 4 bytes"):
        PagedKVCache([SPEC, WINDOWED], block_size=4, buffers=[base[:SIZE], base[SIZE - 4 : 2 * SIZE]])
    cache = PagedKVCache([SPEC, WINDOWED], block_size=4, buffers=[base[:SIZE], base[SIZE : 2 * SIZE]])
    assert cache.num_blocks == (9, 9)


def test_memory_of_a_rank_holds_the_heads_of_the_rank():
    owned = [np.zeros((2, 9, 4, 1, 8), np.float32) for _ in range(2)]
    cache = PagedKVCache(SPEC, num_layers=2, block_size=4, layout="CBNHD", buffers=owned, parallel=TensorParallel(1, 2))
    assert cache.key(1).shape == (9, 4, 1, 8)
    with pytest.raises(ShapeError, match=r"layout 'CBNHD' needs \(2, 9, 4, 2, 8\)"):
        PagedKVCache(SPEC, num_layers=2, block_size=4, num_blocks=9, layout="CBNHD", buffers=owned)


def test_a_swap_space_has_the_layout_of_a_cache_with_one_buffer_per_layer():
    cache = adopting(AttentionSpec(2, 8, 12, dtype="float32"), layout="BNHD")
    space = SwapSpace(cache, num_blocks=5)
    assert [pool.layout.num_buffers for pool in space.kv_pools] == [2]
    assert space.nbytes == 5 * 4 * 2 * (8 + 12) * 4
