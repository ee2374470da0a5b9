"""The files of a disk store: sizes, order, superblocks, and what is refused when a folder is opened."""

import os
import shutil
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from pagecore.errors import NotEnoughMemory, ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.disk.header import SlabHeader, read_header
from pagecore.tiers.disk.plan import blocks_per_file, plan_slabs
from pagecore.tiers.keys import payload_sum
from tests.tiers.disk.kit import PAYLOAD, Memory, bytes_for, content, fingerprint, get, keys_of, open_store, put
from tests.together import together


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_budget_may_have_a_unit():
    given = fingerprint((2**20,))
    assert plan_slabs(given, "1.5GiB", 32_000, 0.9) == plan_slabs(given, 3 << 29, 32_000, 0.9)
    with pytest.raises(ShapeError, match="max_bytes is '1 gib'; give a number and one of"):
        plan_slabs(given, "1 gib", 32_000, 0.9)
    with pytest.raises(ShapeError, match=r"max_bytes is 0\.5; expected an integer"):
        plan_slabs(given, 0.5, 32_000, 0.9)


def test_seventy_thousand_blocks_are_three_files():
    assert blocks_per_file(70_000, 32_000) == [32_000, 32_000, 6_000]
    assert blocks_per_file(32_000, 32_000) == [32_000]
    assert blocks_per_file(0, 32_000) == []
    (headers,) = plan_slabs(fingerprint((2**20,)), bytes_for_files([32_000, 32_000, 6_000], 2**20), 32_000, 0.9)
    assert [header.num_slots for header in headers] == [32_000, 32_000, 6_000]
    assert [header.number for header in headers] == [0, 1, 2]


def bytes_for_files(slots, payload):
    return sum(8192 + -(-count * 128 // 4096) * 4096 + count * payload for count in slots)


@together("seed", range(20))
def test_a_plan_takes_the_most_blocks_within_the_budget(seed):
    rng = np.random.default_rng(seed)
    payloads = tuple(int(n) for n in rng.integers(1, 50_000, rng.integers(1, 4)))
    per_file, budget = int(rng.integers(1, 50)), int(rng.integers(400_000, 5_000_000))

    def used(plan):
        return sum(header.file_bytes for headers in plan for header in headers)

    def total(blocks):
        return sum(bytes_for_files(blocks_per_file(blocks, per_file), -(-p // 4096) * 4096) for p in payloads)

    plan = plan_slabs(fingerprint(payloads), budget, per_file, 0.9)
    counts = {sum(header.num_slots for header in headers) for headers in plan}
    assert len(counts) == 1
    (blocks,) = counts
    assert used(plan) == total(blocks) <= budget < total(blocks + 1)
    with_states = plan_slabs(fingerprint((*payloads, 9000), has_states=True), budget, per_file, 0.25)
    assert used(with_states) <= budget
    assert used(with_states[-1:]) <= budget // 5


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_bytes": 8192}, NotEnoughMemory),
        ({"max_bytes": 0}, ShapeError),
        ({"max_bytes": "many"}, ShapeError),
        ({"max_blocks_per_file": 0}, ShapeError),
        ({"fingerprint": "model"}, UnsupportedOption),
        ({"state_ratio": 0, "fingerprint": fingerprint((100, 100), has_states=True)}, ShapeError),
    ],
)
def test_invalid_arguments_make_no_folder(tmp_path, options, error):
    given = {"fingerprint": fingerprint(), "max_bytes": 1 << 20} | options
    with pytest.raises(error):
        DiskStore(tmp_path / "store", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_lane_is_divided_into_files(tmp_path):
    with open_store(tmp_path, slots=14, max_blocks_per_file=5) as store:
        count = store.num_slots[0]
        assert 11 <= count <= 14
        assert names(store.path) == ["lane0-000.slab", "lane0-001.slab", "lane0-002.slab"]
        assert put(store, range(count)).ok.all()
        assert get(store, range(count)).ok.all()
    with open_store(tmp_path, slots=14, max_blocks_per_file=5) as store:
        assert get(store, range(count)).ok.all()
        assert put(store, range(100, 100 + count)).ok.all()
        assert get(store, range(count)).ok.sum() == 0
        store.check_invariants()


def test_the_format_of_a_file(tmp_path):
    """The bytes of a slab, read without pagecore's code."""
    with open_store(tmp_path, slots=40) as store:
        put(store, range(40))
        keys = keys_of(store, range(40))
        digest = store.fingerprint.digest
        data = (store.path / "lane0-000.slab").read_bytes()
    magic, version, lane, number, slots, payload, size, stored = struct.unpack_from("<16sIIIIQQ32s", data)
    assert (magic.rstrip(b"\0"), version, lane, number) == (b"PAGECORE-SLAB", 1, 0, 0)
    assert (slots, payload, size, stored) == (40, PAYLOAD, len(data), digest)
    assert struct.unpack_from("<I", data, 4092)[0] == zlib.crc32(data[:4092])
    assert data[4096:8192] == data[:4096]
    start = 8192 + 2 * 4096
    assert len(data) == start + 40 * 8192
    found = set()
    for slot in range(40):
        entry = data[8192 + 128 * slot : 8192 + 128 * (slot + 1)]
        key, flags, where, length, _, _ = struct.unpack_from("<17sB2xIQQQ", entry)
        assert (flags, where, length) == (1, slot, PAYLOAD)
        row = np.frombuffer(data, np.uint8, PAYLOAD, start + slot * 8192)
        np.testing.assert_array_equal(row, content(np.frombuffer(key, np.uint8), PAYLOAD))
        copy = Memory(1)
        copy.rows[0, :PAYLOAD] = row
        assert struct.unpack_from("<Q", entry, 40)[0] == payload_sum(key, int(copy.pieces[0, 0]), PAYLOAD)
        assert not any(data[start + slot * 8192 + PAYLOAD : start + (slot + 1) * 8192])
        found.add(key)
    assert found == {key.tobytes() for key in keys}


def test_a_reopened_lane_evicts_the_entries_that_were_stored_first(tmp_path):
    with open_store(tmp_path, slots=6) as store:
        for number in (3, 1, 4, 0, 5, 2):
            put(store, [number])
    with open_store(tmp_path, slots=6) as store:
        put(store, [10, 11])
        assert get(store, range(6)).ok.tolist() == [True, False, True, False, True, True]


def test_of_two_entries_with_one_key_the_newer_counts(tmp_path):
    with open_store(tmp_path, slots=3) as store:
        put(store, [0])
        put(store, [1, 2, 3, 4])  # evicts 0, whose entry may stay in the file
        put(store, [0])
    path = next(tmp_path.rglob("*.slab"))
    data = bytearray(path.read_bytes())
    entries = [bytes(data[8192 + 128 * slot : 8192 + 128 * (slot + 1)]) for slot in range(3)]
    assert len({entry[:17] for entry in entries}) == 3
    with open_store(tmp_path, slots=3) as store:
        assert store.num_entries == 3
        assert get(store, [0]).ok.all()
        store.check_invariants()


def test_one_damaged_superblock_is_mended_and_two_are_refused(tmp_path):
    with open_store(tmp_path) as store:
        put(store, [0])
        path = store.path / "lane0-000.slab"
    whole = path.read_bytes()
    for damaged in (0, 1):
        with path.open("r+b") as file:
            file.seek(damaged * 4096 + 100)
            file.write(b"x")
        with open_store(tmp_path) as store:
            assert get(store, [0]).ok.all()
        assert path.read_bytes() == whole
    with path.open("r+b") as file:
        file.write(b"x" * 8192)
    with pytest.raises(UnsupportedOption, match="damaged; delete it"):
        open_store(tmp_path)
    path.unlink()
    with open_store(tmp_path) as store:
        assert store.num_entries == 0


@pytest.mark.parametrize("block", [b"", b"\0" * 4096, b"x" * 4096])
def test_other_bytes_are_not_a_superblock(block):
    assert read_header(block) is None


@pytest.mark.parametrize("change", [{"lane": 1}, {"number": 1}, {"num_slots": 17}, {"payload_bytes": 4999}])
def test_a_slab_of_another_geometry_is_refused(tmp_path, change):
    with open_store(tmp_path) as store:
        path = store.path / "lane0-000.slab"
    header = read_header(path.read_bytes()[:4096])
    path.write_bytes(replace(header, **change).pack() * 2)
    with pytest.raises(UnsupportedOption, match=next(iter(change))):
        open_store(tmp_path)


def test_a_slab_of_another_model_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        path = store.path
    other = fingerprint(model="another")
    with open_store(tmp_path, fingerprint=other) as store:
        assert store.path != path  # the models have folders of their own
    shutil.copy(path / "lane0-000.slab", store.path / "lane0-000.slab")
    with pytest.raises(UnsupportedOption, match="another model or layout"):
        open_store(tmp_path, fingerprint=other)


def test_a_folder_of_another_size_is_refused(tmp_path):
    with open_store(tmp_path, slots=16):
        pass
    before = names(tmp_path)
    for options in ({"slots": 32}, {"slots": 8}, {"slots": 16, "max_blocks_per_file": 4}):
        with pytest.raises(UnsupportedOption, match="max_bytes"):
            open_store(tmp_path, **options)
        assert names(tmp_path) == before
    with open_store(tmp_path / "many", slots=14, max_blocks_per_file=5):
        pass
    with pytest.raises(UnsupportedOption, match="not among the 1 files"):
        open_store(tmp_path / "many", slots=5, max_blocks_per_file=5)
    with open_store(tmp_path, slots=16):
        pass


def test_a_truncated_slab_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        path = store.path / "lane0-000.slab"
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(UnsupportedOption, match="its superblock says"):
        open_store(tmp_path)


def test_files_of_an_aborted_creation_are_replaced(tmp_path):
    path = tmp_path / fingerprint().name
    path.mkdir()
    (path / "lane0-000.slab.part").write_bytes(b"half")
    with open_store(tmp_path) as store:
        assert names(store.path) == ["lane0-000.slab"]
        assert put(store, [0]).ok.all()


def test_a_folder_without_room_keeps_nothing_half_made(tmp_path, monkeypatch):
    with open_store(tmp_path / "old"):
        pass
    before = names(tmp_path)
    made = []

    def no_room(fd, offset, size):
        made.append(size)
        if len(made) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(NotEnoughMemory, match="No space left"):
        open_store(tmp_path / "new", slots=14, max_blocks_per_file=5)
    assert names(tmp_path) == before


@pytest.mark.slow
def test_a_size_beyond_the_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pagecore.tiers.disk.folder.create_slab", lambda *_: pytest.fail("a file was made"))
    with pytest.raises(NotEnoughMemory, match=r"no room for .* bytes: .* are left; free some, or use a smaller"):
        open_store(tmp_path / "new", slots=1 << 30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["", None, 5, "a\0b"])
def test_what_is_not_a_path_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedOption, match=r"the folder is .*; give the path of a folder"):
        open_store(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Not a directory"):
        open_store(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match="cannot be used"):
        open_store("/proc/self/store")


@pytest.mark.skipif(os.geteuid() == 0, reason="needs user: root may write anywhere")
def test_a_folder_without_rights_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="right to write"):
        open_store(tmp_path)
    tmp_path.chmod(0o700)


def test_a_folder_has_one_store_at_a_time(tmp_path):
    with open_store(tmp_path), pytest.raises(StoreError, match="open in another store"):
        open_store(tmp_path)
    with open_store(tmp_path):
        pass


def test_an_unreadable_table_is_refused_and_closed(tmp_path):
    from tests.tiers.disk.kit import FileOps

    with open_store(tmp_path):
        pass
    before = os.listdir("/proc/self/fd")
    ops = FileOps(on_read=lambda fd, parts, offset: -5)
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(tmp_path, ops=ops)
    assert os.listdir("/proc/self/fd") == before
    with open_store(tmp_path):
        pass


def test_without_o_direct_the_page_cache_serves(tmp_path, monkeypatch):
    real = os.open

    def refuses(path, flags, mode=0o777):
        if flags & os.O_DIRECT == os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuses)
    with open_store(tmp_path) as store:
        assert not store.is_direct
        put(store, range(5))
        assert get(store, range(5)).ok.all()


def test_headers_describe_the_file():
    header = SlabHeader(b"d" * 32, 2, 3, 33, 5000)
    assert read_header(header.pack()) == header
    assert header.file_name == "lane2-003.slab"
    assert (header.table_offset, header.data_offset, header.slot_bytes) == (8192, 8192 + 8192, 8192)
    assert header.file_bytes == 16384 + 33 * 8192
    assert bytes_for(33, (5000,)) == header.file_bytes
