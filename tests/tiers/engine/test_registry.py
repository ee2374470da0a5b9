"""StorageEngine: handles by type and id, and registrations that are refused."""

import threading

import pytest

from pagecore import AttentionSpec, KVLayout, KVPool
from pagecore.arrays.cuda.current import use_runtime
from pagecore.errors import (
    InvalidBlock,
    NotEnoughMemory,
    NotRegistered,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.storage import HostPool
from pagecore.tiers.engine import DiskFiles, StorageEngine, files
from tests.arrays.fake_runtime import FakeRuntime
from tests.tiers.engine.engines import (
    BLOCKS,
    CUDA,
    DISK,
    HOST,
    LAYERS,
    PADDED,
    REMOTE,
    SIZE,
    SPEC,
    UNEQUAL,
    Store,
    bound,
)


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
