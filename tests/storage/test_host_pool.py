"""HostPool: entries of every lane against a plain model of their bytes."""

import gc
import math

import numpy as np
import pytest

import pagecore
from pagecore import (
    AttentionSpec,
    KVLayout,
    LatentSpec,
    Plane,
    StateSpec,
    available_isas,
    copy_blocks,
    set_isa,
    transfer_blocks,
)
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import (
    DeviceError,
    InvalidBlock,
    NotEnoughMemory,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.storage import HostMemory, HostPool, KVPool
from pagecore.storage.pools import host_pool
from pagecore.storage.pools.host_pool import _chunks
from pagecore.storage.pools.pool_geometry import checked_geometry
from pagecore.storage.pools.state_memory import slot_offsets
from pagecore.storage.state_shapes import delta_planes, short_conv_planes
from tests.arrays.fake_runtime import FakeRuntime
from tests.together import together


class Coded:
    """A spec with planes per token and per block, of unequal dtypes."""

    window = None
    planes = (
        Plane("key", (2, 12), "int8"),
        Plane("scale", (1, 1), "float32", per="block"),
        Plane("sum", (4,), "bfloat16"),
    )


GROUPS = [(AttentionSpec(2, 8, 12, "float16"), 3), (LatentSpec(24, 8, scale=1.0), 2), (Coded(), 2)]
ODD = (Plane("flags", (3,), "int8", per="sequence"), Plane("sum", (2,), "float32", per="sequence"))
STATES = [StateSpec(delta_planes(2, 4, 8, 8)), StateSpec(short_conv_planes(3)), StateSpec(ODD)]
COUNTS, SLOTS, SIZE = [6, 5, 4], 5, 4


def make(**options):
    given = {"num_blocks": COUNTS, "num_states": SLOTS} | options
    return HostPool(GROUPS, SIZE, STATES, **given)


def filled(pool, seed=0):
    """Fill all payloads with random bytes; return copies, one array a lane."""
    random = np.random.default_rng(seed)
    for lane in range(pool.num_lanes):
        entries = pool.entries(lane).numpy()
        entries[...] = random.integers(0, 256, entries.shape, np.uint8)
    return [pool.entries(lane).numpy().copy() for lane in range(pool.num_lanes)]


def raw(array):
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def bits(tensor):
    """Return a tensor of any dtype as NumPy integers of its item size."""
    array = tensor.numpy()
    return array.view(f"u{array.itemsize}")


def block_bytes(kv, block, heads):
    """Return the payload of a block as its layout promises: layer by layer, plane by plane."""
    parts = []
    for layer in range(kv.num_layers):
        for plane in kv.spec.planes:
            array = bits(kv.plane(plane.name, layer))[block]
            if plane.per == "token" and len(plane.shape) == 2 and heads == "HND":
                array = array.swapaxes(0, 1)
            parts.append(raw(array))
    return np.concatenate(parts)


def state_bytes(states, slot):
    """Return the payload of a slot: layer by layer, plane by plane, each at a multiple of its item size."""
    payload = bytearray()
    for layer, spec in enumerate(states.specs):
        for plane in spec.planes:
            payload += bytes(-len(payload) % plane.dtype.itemsize)
            payload += raw(bits(states.plane(plane.name, layer))[slot]).tobytes()
    return np.frombuffer(payload, np.uint8)


@pytest.mark.parametrize("heads", ["HND", "NHD"])
def test_a_payload_is_one_run_layer_by_layer_and_plane_by_plane(heads):
    pool = make(heads=heads)
    filled(pool)
    for lane, kv in enumerate(pool.kv_pools):
        assert pool.payload_bytes[lane] == kv.bytes_per_block
        for block in range(kv.num_blocks):
            np.testing.assert_array_equal(pool.entries(lane).numpy()[block], block_bytes(kv, block, heads))
    assert pool.num_lanes == 4
    for slot in range(SLOTS):
        expected = state_bytes(pool.state_pool, slot)
        assert len(expected) == pool.payload_bytes[3]
        payload = pool.entries(3).numpy()[slot].copy()
        planes = [plane for spec in STATES for plane in spec.planes]
        offsets, _ = slot_offsets(planes)
        for plane, offset in zip(planes, offsets, strict=True):  # bytes between planes belong to no plane
            end = offset + plane.nbytes
            np.testing.assert_array_equal(payload[offset:end], expected[offset:end])


def test_slots_are_aligned_and_lie_one_after_the_other():
    pool = make()
    assert pool.slot_bytes == tuple(-(-size // 4096) * 4096 for size in pool.payload_bytes)
    sizes = [step * count for step, count in zip(pool.slot_bytes, [*COUNTS, SLOTS], strict=True)]
    assert pool.nbytes == sum(-(-size // 65536) * 65536 for size in sizes)
    assert pool.memory.address % 4096 == 0
    begin = pool.memory.address
    for lane, count in enumerate([*COUNTS, SLOTS]):
        pieces = pool.pieces(lane, range(1, count))
        assert (pieces.dtype, pieces.shape) == (np.uint64, (count - 1, 2))
        assert (pieces[:, 0] % 4096 == 0).all()
        np.testing.assert_array_equal(
            pieces[:, 0], begin + np.arange(1, count, dtype=np.uint64) * np.uint64(pool.slot_bytes[lane])
        )
        assert (pieces[:, 1] == pool.payload_bytes[lane]).all()
        begin += -(-sizes[lane] // 65536) * 65536
    assert pool.pieces(0, []).shape == (0, 2)
    assert pool.pieces(3, np.uint8(2))[0, 0] == pool.pieces(3, [1, 2])[1, 0]
    for view, slot in ((pool.kv_pools[1].plane("latent", 0), 3), (pool.state_pool.plane("conv", 0), 3)):
        lane = 1 if view is pool.kv_pools[1].plane("latent", 0) else 3
        assert view[slot].pointer == pool.pieces(lane, slot)[0, 0]


@pytest.fixture(params=available_isas())
def isa(request):
    before = pagecore.isa()
    set_isa(request.param)
    yield
    set_isa(before)


@pytest.mark.parametrize("lane", range(3))
def test_copies_of_blocks_change_the_payload_of_their_targets_alone(isa, lane):
    pool = make()
    memory = pool.memory.tensor().numpy()
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    before = memory.copy()
    copy_blocks(pool.kv_pools[lane].planes(), [[1, 3]])
    source, target = (int(a - pool.memory.address) for a in pool.pieces(lane, [1, 3])[:, 0])
    size = pool.payload_bytes[lane]
    before[target : target + size] = before[source : source + size]
    np.testing.assert_array_equal(memory, before)


def test_states_are_copied_and_zeroed_within_their_slots(isa):
    pool = make()
    before = filled(pool)
    pool.state_pool.copy([1, 2], [3, 4])
    pool.state_pool.zero([1])
    planes = [plane for spec in STATES for plane in spec.planes]
    used = np.zeros(pool.payload_bytes[3], bool)
    for plane, offset in zip(planes, slot_offsets(planes)[0], strict=True):
        used[offset : offset + plane.nbytes] = True
    expected = before[3].copy()
    expected[[3, 4]] = np.where(used, before[3][[1, 2]], expected[[3, 4]])
    expected[1, used] = 0
    np.testing.assert_array_equal(pool.entries(3).numpy(), expected)
    for lane in range(3):
        np.testing.assert_array_equal(pool.entries(lane).numpy(), before[lane])


def test_blocks_move_between_a_pool_of_a_cache_and_a_host_pool(isa):
    pool = make()
    own = KVPool(GROUPS[0][0], 3, 7, SIZE, "layerwise")
    random = np.random.default_rng(2)
    for view in own.planes():
        view.numpy()[...] = random.normal(size=view.shape)
    transfer_blocks(own.planes(), pool.kv_pools[0].planes(), [[6, 1], [2, 5]])
    for view, stored in zip(own.planes(), pool.kv_pools[0].planes(), strict=True):
        np.testing.assert_array_equal(bits(view)[[6, 2]], bits(stored)[[1, 5]])


def test_a_pool_without_bytes_has_geometry_only():
    pool, real = make(device="none"), make()
    assert (pool.slot_bytes, pool.payload_bytes, pool.counts) == (real.slot_bytes, real.payload_bytes, real.counts)
    assert (pool.kv_pools, pool.state_pool, pool.memory, pool.nbytes) == ((), None, None, 0)
    assert pool.regions() == []
    for call in (lambda: pool.pieces(0, [1]), lambda: pool.entries(0)):
        with pytest.raises(DeviceError, match="device='none'"):
            call()
    pool.close()


def test_regions_cover_every_piece():
    pool = make()
    ((_, address, nbytes, device),) = pool.regions()
    assert (address, nbytes, device) == (pool.memory.address, pool.nbytes, "cpu")
    for lane, count in enumerate(pool.counts):
        for piece, size in pool.pieces(lane, range(1, count)).tolist():
            assert address <= piece
            assert piece + size <= address + nbytes
    kv = KVPool(GROUPS[0][0], 3, 7, SIZE, "BNHD")
    assert [region.address for region in kv.regions()] == [buffer.pointer for buffer in kv.buffers]
    assert kv.regions()[1][0] == "buffer of 'value' of layer 0"
    assert sum(region.nbytes for region in kv.regions()) == kv.nbytes
    assert {region.device for region in kv.regions()} == {"cpu"}
    states = pool.state_pool.regions()
    assert [(region.address, region.nbytes) for region in states] == [
        (pool.pieces(3, 1)[0, 0] - pool.slot_bytes[3], pool.slot_bytes[3] * SLOTS)
    ]


def test_pools_without_states_or_without_groups():
    pool = HostPool(GROUPS[:1], SIZE, num_blocks=[3])
    assert (pool.num_lanes, pool.state_pool) == (1, None)
    pool = HostPool([], SIZE, STATES, num_blocks=[], num_states=3)
    assert (pool.num_lanes, pool.kv_pools) == (1, ())
    pool.state_pool.zero([2])


def test_views_keep_the_memory_alive():
    pool = make(shared=True)
    view, states = pool.kv_pools[0].key(2), pool.state_pool
    pool.close()
    del pool
    gc.collect()
    view[1] = 2.0
    states.zero([1])
    assert float(view.numpy()[1].min()) == 2.0


# -- refusals ----------------------------------------------------------------------------------------------------------


@together(
    ("change", "error", "says"),
    [
        ({"groups": []}, ShapeError, "num_blocks lists 3; expected one number for each of 0 groups"),
        ({"groups": [GROUPS[0][0]]}, ShapeError, r"group 0 is .*; expected \(spec, num_layers\)"),
        ({"groups": [("spec", 1)]}, UnsupportedOption, "group 0"),
        ({"groups": [(GROUPS[0][0], 0)]}, ShapeError, "num_layers"),
        ({"groups": 5}, ShapeError, "groups is 5"),
        ({"block_size": 0}, ShapeError, "block_size"),
        ({"num_blocks": [6, 5]}, ShapeError, "num_blocks lists 2"),
        ({"num_blocks": [6, 5, 1]}, ShapeError, "num_blocks"),
        ({"num_blocks": 6}, ShapeError, "num_blocks is 6"),
        ({"num_states": 0}, ShapeError, "num_states"),
        ({"num_states": 1}, ShapeError, "num_states"),
        ({"state_specs": [GROUPS[0][0]]}, UnsupportedOption, "state layer 0"),
        ({"state_specs": []}, UnsupportedOption, "num_states is given without state_specs"),
        ({"heads": "DNH"}, UnsupportedOption, "heads"),
        ({"device": "tpu"}, DeviceError, "device"),
        ({"numa_node": 999}, UnsupportedOption, "numa_node is 999"),
        ({"num_blocks": [2**30, 5, 4]}, NotEnoughMemory, "are available"),
        ({"groups": [*GROUPS[:2], (Coded(), 1)], "block_size": 3}, None, None),
    ],
)
def test_invalid_arguments_are_refused(change, error, says):
    given = {
        "groups": GROUPS, "block_size": SIZE, "state_specs": STATES, "num_blocks": COUNTS, "num_states": SLOTS,
    } | change  # fmt: skip
    if error is None:
        HostPool(**given)
        return
    with pytest.raises(error, match=says):
        HostPool(**given)


def test_planes_that_cannot_be_aligned_are_refused_before_memory_is_taken():
    class Odd:
        window = None
        planes = (Plane("key", (1, 3), "int8"), Plane("value", (1, 3), "float32"))

    for device in ("cpu", "none"):
        with pytest.raises(UnsupportedOption, match=r"misaligns plane 'value'.* block_size that is a multiple of 4"):
            HostPool([(Odd(), 1)], 1, num_blocks=[3], device=device)
        HostPool([(Odd(), 1)], 4, num_blocks=[3], device=device)


@pytest.mark.parametrize("ids", [[0], [1, 6], [-1], [5, 2**40]])
def test_entries_outside_of_a_lane_are_refused(ids):
    with pytest.raises(InvalidBlock, match=rf"entry {next(i for i in ids if not 0 < i < 6)} is not in lane 0"):
        make().pieces(0, ids)


def test_lanes_and_ids_of_other_types_are_refused():
    pool = make()
    with pytest.raises(ShapeError, match="lane is 4; the pool has lanes 0 to 3"):
        pool.pieces(4, [1])
    with pytest.raises(UnsupportedDtype, match="ids is float64"):
        pool.pieces(0, [1.0])
    with pytest.raises(ShapeError, match="one axis"):
        pool.pieces(0, [[1]])


def test_a_pool_over_too_little_memory_is_refused():
    geometry = checked_geometry(GROUPS, SIZE, STATES, COUNTS, SLOTS, "HND")
    with pytest.raises(ShapeError, match=r"the geometry needs"):
        HostPool.over(HostMemory(4096), geometry)
    HostPool.over(HostMemory(geometry.offsets[-1]), geometry).state_pool.zero([1])


# -- for a CUDA device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [4096, 65536])
def test_chunks_are_whole_pages_and_none_ends_within_an_entry(monkeypatch, page):
    geometry = checked_geometry(GROUPS, 96, STATES, [90, 70, 30], 50, "HND")
    assert {step // 4096 for step in geometry.slot_bytes} >= {1, 3, 6}
    monkeypatch.setattr(host_pool, "PAGE", page)
    for limit in (4096, 10_000, 1 << 20, 1 << 40):
        monkeypatch.setattr(host_pool, "CHUNK_BYTES", limit)
        chunks = _chunks(geometry)
        assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
        assert chunks[-1][1] == geometry.offsets[-1]
        assert max(end - begin for begin, end in chunks) <= max(
            limit, *(math.lcm(step, page) for step in geometry.slot_bytes)
        )
        assert all(end % page == 0 for _, end in chunks)
        for begin, count, step in zip(geometry.offsets[:-1], geometry.counts, geometry.slot_bytes, strict=True):
            inside = [end - begin for _, end in chunks if begin < end < begin + count * step]
            assert all(end % step == 0 for end in inside)
    assert len(chunks) == 1


@pytest.mark.parametrize("limit", [4096, 100_000, 1 << 20, 1 << 40])
def test_the_first_entries_of_chunks_are_listed(monkeypatch, limit):
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", limit)
    pool = make(num_blocks=[90, 70, 30], num_states=50)
    ends = np.array([end for _, end in _chunks(pool.geometry)])
    total = 0
    for lane, count in enumerate(pool.counts):
        starts = pool.geometry.offsets[lane] + np.arange(count) * pool.slot_bytes[lane]
        chunk_of = np.searchsorted(ends, starts, side="right")
        first = np.flatnonzero(np.diff(chunk_of)) + 1
        assert pool.chunk_starts(lane).tolist() == first.tolist()
        total += len(first)
    assert (total == 0) == (limit >= 1 << 20)


def test_a_pool_for_a_device_is_registered_and_has_views_on_both_sides():
    runtime = FakeRuntime()
    with use_runtime(runtime):
        pool = make(device="cuda:1")
        assert pool.device == "cuda:1"
        assert pool.memory.wait_registered(10)
        assert ("register_host", pool.memory.address, pool.nbytes, 1) in runtime.calls
        assert {view.device for kv in pool.kv_pools for view in kv.planes()} == {"cuda:1"}
        assert pool.state_pool.plane("conv").device == "cuda:1"
        host, states = pool.views("cpu")
        assert host[0].key(1).pointer == pool.kv_pools[0].key(1).pointer
        host[0].key(1)[2] = 1.0
        states.zero([1])
        assert pool.regions()[0].device == "cpu"
        pool.close()
        assert ("unregister_host", pool.memory.address) in runtime.calls
        with pytest.raises(DeviceError, match="cuda:7"):
            make(device="cuda:7")


# -- the stride between blocks of a layout -----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["blockwise", KVLayout("blockwise", "NHD"), "BLCNHD", "BNCHD"])
def test_blocks_of_a_padded_layout_differ_from_a_dense_one_in_their_stride_alone(order):
    order = order if isinstance(order, KVLayout) else KVLayout(order)
    layers = 3 if "L" in order.bind(AttentionSpec(2, 8), 1, 1, 1).axes else 1
    dense = order.bind(AttentionSpec(2, 8), layers, 5, SIZE)
    padded = KVLayout(order.order, order.heads, block_alignment=4096).bind(dense.planes, layers, 5, SIZE)
    assert (padded.block_stride, padded.buffer_nbytes(0)) == (4096, 5 * 4096)
    assert dense.block_stride == dense.block_nbytes == padded.block_nbytes == layers * 2 * SIZE * 2 * 8 * 2
    for plane in range(2):
        one, other = dense.plane_layout(plane), padded.plane_layout(plane)
        assert one.strides | {"B": 4096} == other.strides
        assert (one.buffer, one.offset) == (other.buffer, other.offset)
    assert padded.block_offset(3) == 3 * 4096
    assert padded.buffer_shape(0) is None


def test_a_stride_that_a_layout_cannot_have_is_refused():
    for order in ("layerwise", "LBNHD", "CBNHD"):
        with pytest.raises(UnsupportedOption, match="B is not the outermost axis"):
            KVLayout(order, block_alignment=4096)
    for wrong in (0, 3, 4095, 1.5):
        with pytest.raises(ShapeError, match="block_alignment"):
            KVLayout("blockwise", block_alignment=wrong)
