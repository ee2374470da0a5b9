"""StorageEngine: handles by type and id, tensors and pieces against a plain walk, layouts of the media."""

import threading

import numpy as np
import pytest

from pagecore import AttentionSpec, KVLayout, KVPool, LatentSpec, PagedKVCache, Plane, StateSpec
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import (
    DeviceError,
    InvalidBlock,
    NotEnoughMemory,
    NotRegistered,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.storage import HostPool
from pagecore.storage.state_shapes import delta_planes
from pagecore.tiers.engine import DeviceType, DiskFiles, StorageEngine, files
from tests.arrays.fake_runtime import FakeRuntime
from tests.capabilities import require

SPEC = AttentionSpec(2, 8, dtype="float16")
UNEQUAL = AttentionSpec(2, 8, 12, dtype="float16")
LAYERS, BLOCKS, SIZE = 3, 7, 4
CUDA, HOST, DISK, REMOTE = DeviceType
PADDED = KVLayout("blockwise", block_alignment=4096)
LAYOUTS = ["layerwise", "blockwise", PADDED, KVLayout("layerwise", "NHD"), "BNHD", "CBNHD", "LBNHD", "NBHD", "BNCHD"]


class Coded:
    window = None
    planes = (Plane("key", (2, 12), "int8"), Plane("scale", (2, 1), "float32", per="block"))


class Store:
    """The attributes of a store that a protocol check needs; nothing is called."""

    medium, name = "EXTERNAL", "s3://bucket"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


def order_of(layout):
    return layout if isinstance(layout, KVLayout) else KVLayout(layout)


def bound(layout="blockwise", spec=SPEC, layers=LAYERS, blocks=BLOCKS, size=SIZE):
    return order_of(layout).bind(spec, layers, blocks, size)


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


# -- lookups -----------------------------------------------------------------------------------------------------------


def test_worked_example_19_a_handle_that_is_not_there_is_a_lookup_error_that_names_device_and_id():
    engine = StorageEngine()
    engine.register(KVPool(SPEC, 1, 3, SIZE), HOST, 2)
    with pytest.raises(LookupError, match="no storage is registered for CUDA 3; registered: HOST 2") as refused:
        engine.handle(CUDA, 3)
    assert isinstance(refused.value, NotRegistered | PagecoreError)
    with pytest.raises(LookupError, match="for HOST 2, group 1;"):
        engine.handle(HOST, 2, group=1)
    with pytest.raises(LookupError, match="DISK 0; registered: nothing"):
        StorageEngine().unregister(DISK)


def test_worked_example_19_files_of_70000_blocks():
    layout = KVLayout("blockwise").bind(AttentionSpec(1, 8, dtype="float16"), 2, 70_000, 1)
    disk = DiskFiles(layout, "unused", max_blocks_per_file=32_000)
    assert disk.file_blocks == (32_000, 32_000, 6_000)
    assert disk.file_nbytes == tuple(n * layout.block_stride for n in (32_000, 32_000, 6_000))
    assert layout.block_stride == 64
    pieces = disk.pieces([0, 31_999, 32_000, 63_999, 64_000, 69_999])
    assert pieces[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert pieces[:, 1].tolist() == [0, 31_999 * 64, 0, 31_999 * 64, 0, 5_999 * 64]
    with pytest.raises(InvalidBlock, match="block 70000"):
        disk.pieces([1, 70_000])


@pytest.mark.parametrize("first", [HOST, DISK])
@pytest.mark.parametrize(
    "other",
    [
        bound(KVLayout("blockwise", "NHD")),
        bound(PADDED),
        bound("BLCNHD"),
        bound(layers=2),
        bound(size=8),
        bound(spec=UNEQUAL),
        bound(spec=AttentionSpec(2, 8, dtype="bfloat16")),
    ],
    ids=["NHD", "padded", "axes", "layers", "tokens", "dims", "dtype"],
)
def test_worked_example_19_a_disk_layout_other_than_the_host_s_is_refused(first, other, tmp_path):
    engine = StorageEngine()
    pairs = [(KVPool(SPEC, LAYERS, BLOCKS, SIZE, "blockwise"), HOST), (DiskFiles(other, tmp_path), DISK)]
    for storage, kind in pairs if first is HOST else pairs[::-1]:
        expected = engine.handles()
        if expected:
            with pytest.raises(UnsupportedOption, match=r"disks and stores keep blocks as the host has them"):
                engine.register(storage, kind, 0)
            assert engine.handles() == expected
            engine.register(storage, kind, 0, group=1)  # another group has a layout of its own
        else:
            engine.register(storage, kind, 0)


def test_a_disk_or_store_with_the_host_s_blocks_may_have_more_of_them(tmp_path):
    engine = StorageEngine()
    engine.register(KVPool(SPEC, LAYERS, BLOCKS, SIZE, "blockwise"), HOST, 0)
    engine.register(DiskFiles(bound("BLCHND", blocks=900), tmp_path), DISK, 0)
    remote = engine.register(Store(), REMOTE, 4, layout=bound(blocks=2))
    assert remote.storage.name == "s3://bucket"
    with pytest.raises(UnsupportedOption, match="REMOTE 1 has blocks of"):
        engine.register(Store(), REMOTE, 1, layout=bound(PADDED))
    assert [handle.title for handle in engine.handles()] == ["HOST 0", "DISK 0", "REMOTE 4"]
    engine.unregister(HOST, 0)
    engine.unregister(DISK, 0)
    engine.unregister(REMOTE, 4)
    engine.register(Store(), REMOTE, 1, layout=bound(PADDED))


def test_a_type_and_id_are_registered_once_and_all_groups_or_none():
    engine = StorageEngine()
    pool = HostPool([(SPEC, 1), (UNEQUAL, 2)], SIZE, num_blocks=[3, 4])
    engine.register(KVPool(SPEC, 1, 3, SIZE), HOST, 0, group=1)
    with pytest.raises(UnsupportedOption, match="HOST 0, group 1 is registered already"):
        engine.register(pool, HOST, 0)
    assert len(engine.handles()) == 1
    engine.register(pool, HOST, 1)
    assert [handle.num_blocks for handle in engine.handles()] == [3, 3, 4]
    assert engine.handle(HOST, 1, 1).layout.num_layers == 2


# -- memory ------------------------------------------------------------------------------------------------------------


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


# -- devices, files and stores -----------------------------------------------------------------------------------------


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


def test_disks_and_stores_are_compared_with_the_host_alone(tmp_path):
    with use_runtime(FakeRuntime()):
        engine = StorageEngine()
        engine.allocate(SPEC, LAYERS, BLOCKS, SIZE, CUDA, 0)
        engine.register(DiskFiles(bound(), tmp_path), DISK, 0)
        engine.register(Store(), REMOTE, 0, layout=bound(PADDED))
        engine.register(KVPool(SPEC, LAYERS, BLOCKS, SIZE, "CBNHD", "cuda:1"), CUDA, 1)
        with pytest.raises(UnsupportedOption, match=r"HOST 0 has blocks of .* and REMOTE 0 of"):
            engine.register(KVPool(SPEC, LAYERS, BLOCKS, SIZE, "blockwise"), HOST, 0)


def test_files_are_made_with_their_bytes_and_kept_if_they_fit(tmp_path):
    engine = StorageEngine()
    handle = engine.allocate(SPEC, 1, 7, SIZE, DISK, 0, folder=tmp_path / "new", max_blocks_per_file=3)
    disk = handle.storage
    assert [path.stat().st_size for path in disk.paths] == [3 * 4096, 3 * 4096, 4096]
    assert [path.stat().st_blocks * 512 for path in disk.paths] == [3 * 4096, 3 * 4096, 4096]
    disk.paths[1].write_bytes(b"kept" + bytes(3 * 4096 - 4))
    disk.create()
    assert disk.paths[1].read_bytes()[:4] == b"kept"
    for what in (handle.tensor, handle.tensors, lambda: handle.pieces([1]), lambda: handle.pieces_per_block):
        with pytest.raises(UnsupportedOption, match="DISK 0 is not memory"):
            what()
    other = DiskFiles(bound(PADDED, layers=1, blocks=8), tmp_path / "new", max_blocks_per_file=4)
    with pytest.raises(UnsupportedOption, match=r"has 12,288 bytes; this layout needs 16,384"):
        other.create()


def test_files_that_cannot_be_made_leave_nothing(tmp_path, monkeypatch):
    engine, calls = StorageEngine(), []

    def fallocate(fd, begin, nbytes):
        calls.append(nbytes)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", fallocate)
    with pytest.raises(NotEnoughMemory, match=r"has no room for 28,672 bytes"):
        engine.allocate(SPEC, 1, 7, SIZE, DISK, 0, folder=tmp_path, max_blocks_per_file=3)
    assert list(tmp_path.iterdir()) == []
    assert engine.handles() == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedOption, match="cannot be written"):
        engine.allocate(SPEC, 1, 7, SIZE, DISK, 0, folder=tmp_path / "file")


def test_files_that_another_process_makes_meanwhile_are_left_alone(tmp_path, monkeypatch):
    disk = DiskFiles(bound(PADDED, layers=1, blocks=8), tmp_path, max_blocks_per_file=4)
    disk.create()
    disk.paths[0].unlink()
    monkeypatch.setattr(files.Path, "exists", lambda _: False)
    with pytest.raises(UnsupportedOption, match=r"by another process.*; call create again"):
        disk.create()
    monkeypatch.undo()
    assert [path.exists() for path in disk.paths] == [False, True]


def test_invalid_registrations_are_refused(tmp_path):
    engine, pool = StorageEngine(), KVPool(SPEC, 1, 3, SIZE)
    disk = DiskFiles(bound(), tmp_path)
    for call, error, says in [
        (lambda: engine.register(pool, "host"), UnsupportedOption, "device_type is 'host'"),
        (lambda: engine.register(pool, HOST, -1), ShapeError, "device_id"),
        (lambda: engine.register(pool, HOST, group=-1), ShapeError, "group"),
        (lambda: engine.register(pool, HOST, spec=SPEC), UnsupportedOption, "spec cannot be given for a pool"),
        (lambda: engine.register(pool, DISK), UnsupportedOption, "DISK and REMOTE take DiskFiles or a BlockStore"),
        (lambda: engine.register(disk, HOST), UnsupportedOption, "storage is a DiskFiles"),
        (lambda: engine.register(disk, DISK, layout=bound()), UnsupportedOption, "layout cannot be given for files"),
        (lambda: engine.register(disk, DISK, spec=SPEC), UnsupportedOption, "spec cannot be given for files"),
        (lambda: engine.register(Store(), REMOTE), UnsupportedOption, "a store needs the bound KVLayout"),
        (lambda: engine.register(Store(), REMOTE, layout=KVLayout()), ShapeError, "call bind first"),
        (lambda: engine.register(5, HOST, spec=SPEC, block_size=4, num_layers=1), UnsupportedDtype, "int"),
        (lambda: engine.allocate(SPEC, 1, 3, 4, REMOTE), UnsupportedOption, "REMOTE has no memory"),
        (lambda: engine.allocate(SPEC, 1, 3, 4, DISK), UnsupportedOption, "DISK needs a folder"),
        (lambda: engine.allocate(SPEC, 1, 3, 4, HOST, folder="/"), UnsupportedOption, "folder is '/'"),
        (lambda: engine.allocate(SPEC, 1, 3, 4, CUDA, shared=True), UnsupportedOption, "shared: options of HOST"),
        (lambda: DiskFiles(bound("layerwise"), tmp_path), UnsupportedOption, "files need 'blockwise'"),
        (lambda: DiskFiles(KVLayout("blockwise"), tmp_path), ShapeError, "call bind first"),
        (lambda: DiskFiles("blockwise", tmp_path), UnsupportedOption, "expected a bound KVLayout"),
        (lambda: DiskFiles(bound(), tmp_path, 0), ShapeError, "max_blocks_per_file"),
    ]:
        with pytest.raises(error, match=says):
            call()
    assert engine.handles() == []


def test_threads_register_each_id_once():
    engine, pool, won = StorageEngine(), KVPool(SPEC, 1, 3, SIZE), []

    def work():
        for number in range(20):
            try:
                engine.register(pool, HOST, number)
                won.append(number)
            except UnsupportedOption:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))
