"""DiskStore as a block store: batches end once, what is loaded has the bytes that were stored, and slots are kept."""

import errno
import os
import select
import threading

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Guard
from pagecore.tiers.store import BlockStore
from tests.faults import PAGECORE, raise_at, runs
from tests.tiers.disk.kit import (
    PAYLOAD,
    FileOps,
    Memory,
    bytes_for,
    fingerprint,
    finish,
    get,
    keys_of,
    look,
    open_store,
    put,
)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, slots=8) as made:
        yield made
        made.check_invariants()


def test_it_is_a_block_store(store):
    assert isinstance(store, BlockStore)
    assert store.medium == "DISK"
    assert str(store.path) in store.name


@pytest.mark.parametrize("payload", [1, 511, 4095, 4096, 4097, 8192, 300_001])
def test_what_was_stored_is_loaded(tmp_path, payload):
    with open_store(tmp_path, slots=5, payloads=(payload,)) as store:
        assert not get(store, range(5)).ok.any()
        assert put(store, range(5)).ok.all()
        done = get(store, [4, 9, 0, 0])
        assert done.ok.tolist() == [True, False, True, True]
        assert done.error is None
        store.check_invariants()
    with open_store(tmp_path, slots=5, payloads=(payload,)) as store:
        assert store.num_entries == 5
        assert get(store, range(6)).ok.tolist() == [True] * 5 + [False]


def test_lanes_have_entries_and_sizes_of_their_own(tmp_path):
    payloads = (4096, 9000, 100)
    with open_store(tmp_path, slots=6, payloads=payloads) as store:
        assert store.num_slots == (6, 6, 6)
        for lane in range(3):
            assert put(store, range(6), lane).ok.all()
        for lane in range(3):
            assert get(store, range(6), lane).ok.all()
        assert store.num_entries == 18
        mixed = np.concatenate([keys_of(store, [1], lane) for lane in (2, 0, 1)])
        memories = [Memory(1, payloads[lane]) for lane in (2, 0, 1)]
        pieces = np.concatenate([memory.pieces for memory in memories])
        assert finish(store, store.submit_load(mixed, pieces)).ok.all()
        with pytest.raises(ShapeError, match="same layout"):
            store.submit_load(mixed, pieces[::-1].copy())
        assert store.stats().num_held == 0


def test_batches_end_once_in_the_order_of_their_ends(store):
    tickets = [store.submit_lookup(keys_of(store, [n])) for n in range(3)]
    keys = keys_of(store, range(4))
    memory = Memory(4).fill(keys)
    tickets.append(store.submit_store(keys, memory.pieces))
    assert store.drain(10)
    tickets.append(store.submit_lookup(keys))
    assert select.select([store.fileno()], [], [], 0)[0]
    ended = store.poll()
    assert [done.ticket for done in ended] == tickets
    assert [len(done.ok) for done in ended] == [1, 1, 1, 4, 4]
    assert not select.select([store.fileno()], [], [], 0)[0]
    assert store.poll() == []


def test_empty_batches_end(store):
    keys, pieces = np.empty((0, 17), np.uint8), np.empty((0, 2), np.uint64)
    for ticket in (store.submit_lookup(keys), store.submit_load(keys, pieces), store.submit_store(keys, pieces)):
        assert len(finish(store, ticket).ok) == 0


def test_the_oldest_unused_entry_is_replaced(store):
    for number in range(8):
        assert put(store, [number]).ok.all()
    assert look(store, [0]).ok.all()
    store.unlock(keys_of(store, [0]))
    assert get(store, [1]).ok.all()
    assert put(store, [2]).ok.all()  # it is there already, and counts as used
    assert put(store, [100, 101]).ok.all()
    assert get(store, range(8)).ok.tolist() == [True, True, True, False, False, True, True, True]
    assert get(store, [100, 101]).ok.all()
    assert store.num_entries == 8


def store_in_one_batch(store):
    put(store, range(6))


def load_in_one_batch(store):
    for number in range(6):
        put(store, [number])
    look(store, range(6))
    get(store, range(6))


def look_up_and_unlock(store):
    for number in range(6):
        put(store, [number])
    look(store, range(6))
    store.unlock(keys_of(store, range(6)))


def store_again(store):
    for number in range(6):
        put(store, [number])
    put(store, range(6))


@pytest.mark.parametrize("use", [store_in_one_batch, load_in_one_batch, look_up_and_unlock, store_again])
def test_a_prefix_is_evicted_from_its_end(tmp_path, use):
    with open_store(tmp_path, slots=8) as store:
        use(store)
        put(store, range(100, 104))
        assert look(store, range(6)).ok.tolist() == [True] * 4 + [False] * 2


def test_a_prefix_is_evicted_from_its_end_after_the_store_was_opened_again(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(6))
    with open_store(tmp_path, slots=8) as store:
        put(store, range(100, 104))
        assert look(store, range(6)).ok.tolist() == [True] * 4 + [False] * 2


def test_a_store_of_a_longer_prefix_uses_its_beginning_last(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(4))
        put(store, range(6))  # writes two
        put(store, range(100, 104))
        assert look(store, range(6)).ok.tolist() == [True] * 4 + [False] * 2


def test_a_prefix_that_grows_is_evicted_from_its_end(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(6), before=[])
        for number in (6, 7, 8, 9):  # the prefix alone fills the store
            assert put(store, [number], before=[number - 1]).ok.tolist() == [number < 8]
        assert put(store, [100, 101], before=[]).ok.all()
        assert look(store, range(10)).ok.tolist() == [True] * 6 + [False] * 4
        store.check_invariants()


def test_a_reopened_prefix_is_evicted_from_its_end(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        for number in range(8):
            put(store, [number], before=[number - 1] if number else [])
    with open_store(tmp_path, slots=8) as store:
        assert put(store, [100, 101], before=[]).ok.all()
        assert look(store, range(8)).ok.tolist() == [True] * 6 + [False] * 2
        store.check_invariants()


def reused_then_closed(folder):
    """Fill a store, use its oldest entries and close it; return the path of its record."""
    with open_store(folder, slots=8) as store:
        for number in range(8):
            put(store, [number])
        store.touch(keys_of(store, [0, 1]))
        return store.path / "recency"


def evicted_first(folder, count=2):
    """Return which of the first 8 entries a reopened store evicts for new ones."""
    with open_store(folder, slots=8) as store:
        for number in range(count):
            put(store, [100 + number])
        found = look(store, range(8)).ok
        store.check_invariants()
        return np.flatnonzero(~found).tolist()


def test_a_reopened_store_evicts_what_was_used_least_recently(tmp_path):
    reused_then_closed(tmp_path)
    assert evicted_first(tmp_path) == [2, 3]


@pytest.mark.parametrize("damage", ["gone", "flip", "cut", "empty", "other"])
def test_a_damaged_record_of_uses_leaves_the_order_of_writing(tmp_path, damage):
    record = reused_then_closed(tmp_path)
    data = bytearray(record.read_bytes())
    if damage == "gone":
        record.unlink()
    elif damage == "other":
        with open_store(tmp_path / "other", slots=8, fingerprint=fingerprint(model="other")) as store:
            put(store, range(8))
            path = store.path
        record.write_bytes((path / "recency").read_bytes())
    else:
        data[len(data) // 2] ^= 1
        record.write_bytes({"flip": data, "cut": data[:-5], "empty": b""}[damage])
    assert evicted_first(tmp_path) == [0, 1]


def test_entries_that_were_written_after_the_record_are_the_newest(tmp_path):
    record = reused_then_closed(tmp_path)
    data = record.read_bytes()
    assert evicted_first(tmp_path, 3) == [2, 3, 4]  # 100, 101 and 102 are in their slots
    record.write_bytes(data)  # as if that process had been killed
    with open_store(tmp_path, slots=8) as store:
        put(store, range(200, 205))
        assert look(store, [5, 6, 7, 0, 1]).ok.tolist() == [False] * 5
        assert look(store, [100, 101, 102]).ok.all()


def test_entries_after_a_removal_of_the_newest_are_newer_than_the_record(tmp_path):
    with open_store(tmp_path, slots=4) as store:
        for number in range(3):
            put(store, [number])
        finish(store, store.submit_remove(keys_of(store, [2])))
    data = (store.path / "recency").read_bytes()
    with open_store(tmp_path, slots=4) as store:
        put(store, [3])
    (store.path / "recency").write_bytes(data)  # as if that process had been killed
    with open_store(tmp_path, slots=4) as store:
        for number in range(4, 7):
            put(store, [number])
        assert look(store, range(7)).ok.tolist() == [False, False, False, True, True, True, True]


def test_an_interrupted_close_leaves_the_folder_to_the_next_store(tmp_path):
    def closed(n):
        store = open_store(tmp_path, slots=4)
        put(store, [n % 4])
        look(store, [n % 4])
        run = raise_at(store.close, n, PAGECORE / "tiers" / "disk" / "store.py")
        store.close()
        return run

    for _ in runs(closed):
        with open_store(tmp_path, slots=4) as store:
            assert look(store, range(4)).ok.any()


def test_an_order_that_cannot_be_written_is_no_error(tmp_path):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(8))
        (store.path / "recency.part").mkdir()
    assert not (store.path / "recency").exists()
    (store.path / "recency.part").rmdir()
    assert evicted_first(tmp_path) == [6, 7]


def test_an_entry_is_not_stored_without_the_one_that_it_follows(tmp_path):
    with open_store(tmp_path, slots=4) as store:
        done = put(store, range(6), before=[])
        assert done.ok.tolist() == [True] * 4 + [False] * 2
        done = put(store, [6, 7], before=[5])
        assert (done.ok.tolist(), done.is_full) == ([False, False], True)
        assert look(store, range(8)).ok.tolist() == [True] * 4 + [False] * 4


def test_states_follow_nothing(tmp_path):
    lanes = {"payloads": (PAYLOAD, PAYLOAD)}
    states = {"fingerprint": fingerprint(**lanes, has_states=True), "state_ratio": 1.0}
    with open_store(tmp_path, slots=4, **lanes, **states) as store:
        assert store.num_slots == (4, 4)
        assert put(store, [0, 1], lane=1, before=[5]).ok.all()
        store.touch(keys_of(store, [1], lane=1))
        put(store, [2, 3, 4], lane=1, before=[1])
        assert look(store, range(5), lane=1).ok.tolist() == [False, True, True, True, True]


def test_a_batch_does_not_evict_what_it_found(tmp_path):
    with open_store(tmp_path, slots=4) as store:
        put(store, [1])
        put(store, [2])
        done = put(store, [2, 3, 4, 5, 6])
        assert done.ok.tolist() == [True, True, True, True, False]
        assert done.is_full
        assert "lane 0 has no slot" in done.error
        assert get(store, range(2, 6)).ok.all()
        put(store, [7])
        assert look(store, range(2, 8)).ok.tolist() == [True, True, True, False, False, True]
        store.check_invariants()


def test_a_batch_does_not_evict_what_it_names_last(tmp_path):
    with open_store(tmp_path, slots=3) as store:
        for number in range(3):
            put(store, [number])
        before = store.stats().bytes_stored
        assert put(store, [3, 0]).ok.all()
        assert store.stats().bytes_stored == before + PAYLOAD  # 0 was not written again
        assert look(store, range(4)).ok.tolist() == [True, False, True, True]


def test_a_store_without_room_is_not_a_failure_of_the_disk(tmp_path):
    with Guard(open_store(tmp_path, slots=2)) as guard:
        keys = keys_of(guard.store, range(4))
        memory = Memory(4).fill(keys)
        for _ in range(4):
            done = finish(guard, guard.submit_store(keys, memory.pieces))
            assert done.ok.tolist() == [True, True, False, False]
            assert done.is_full
        assert guard.health().breaker == "closed"
        assert finish(guard, guard.submit_lookup(keys)).ok.tolist() == [True, True, False, False]


def test_held_entries_stay(store):
    put(store, range(8))
    assert look(store, range(6)).ok.all()
    done = put(store, range(100, 104))
    assert done.ok.tolist() == [True, True, False, False]
    assert "lane 0 has no slot" in done.error
    assert store.stats().num_held == 6
    store.unlock(keys_of(store, [0, 1]))
    store.unlock(keys_of(store, [0, 50]))  # holds that are not there are ignored
    assert get(store, [2]).ok.all()  # the load ends the hold
    assert store.stats().num_held == 3
    assert put(store, range(104, 110)).ok.tolist() == [True] * 5 + [False]
    assert get(store, range(3, 6)).ok.all()
    assert store.stats().num_held == 0


def test_each_lookup_has_a_hold_of_its_own(store):
    put(store, range(8))
    for _ in range(3):
        assert look(store, [7]).ok.all()
    assert get(store, [7]).ok.all()
    store.unlock(keys_of(store, [7]))
    assert put(store, range(100, 108)).ok.sum() == 7
    store.unlock(keys_of(store, [7]))
    assert put(store, [200, 201]).ok.all()


def remove(store, numbers, lane=0):
    return finish(store, store.submit_remove(keys_of(store, numbers, lane)))


def test_removed_entries_are_gone_now_and_after_the_store_was_opened_again(tmp_path):
    payloads = (PAYLOAD, 100)
    with open_store(tmp_path, slots=90, payloads=payloads, max_blocks_per_file=50) as store:
        assert put(store, range(80)).ok.all()
        assert put(store, range(5), 1).ok.all()
        done = remove(store, [*range(3, 70), 99, 4])  # units of 32 slots, in two files
        assert (done.ok.all(), done.error, len(done.ok)) == (True, None, 69)
        assert store.num_entries == 13 + 5
        assert get(store, range(80)).ok.tolist() == [True] * 3 + [False] * 67 + [True] * 10
        assert put(store, [10, 200]).ok.all()
        assert store.stats().num_removed == 69
        store.check_invariants()
    with open_store(tmp_path, slots=90, payloads=payloads, max_blocks_per_file=50) as store:
        assert store.num_entries == 15 + 5
        assert get(store, range(80)).ok.tolist() == [n < 3 or n >= 70 or n == 10 for n in range(80)]
        assert get(store, [200]).ok.all()
        assert get(store, range(5), 1).ok.all()


def test_an_older_entry_that_a_crash_left_does_not_come_back_after_a_removal(tmp_path):
    with open_store(tmp_path, slots=4, threads=1) as store:
        put(store, [0])
        (slab,) = store.path.glob("*.slab")
        old = store._lanes[0].entries[keys_of(store, [0]).tobytes()]
    at = 8192 + 128 * old
    entry = slab.read_bytes()[at : at + 128]
    with open_store(tmp_path, slots=4, threads=1) as store:
        finish(store, store.submit_remove(keys_of(store, [0])))
        put(store, [0])
        assert store._lanes[0].entries[keys_of(store, [0]).tobytes()] != old
    with open(slab, "r+b") as file:
        file.seek(at)
        file.write(entry)
    with open_store(tmp_path, slots=4, threads=1) as store:
        assert store.num_entries == 1
        finish(store, store.submit_remove(keys_of(store, [0])))
    with open_store(tmp_path, slots=4, threads=1) as store:
        assert store.num_entries == 0


def test_removed_entries_that_are_held_or_read_keep_their_slots_until_then(tmp_path):
    is_slow, started, goes_on = threading.Event(), threading.Event(), threading.Event()

    def slowly(*_):
        if is_slow.is_set():
            started.set()
            assert goes_on.wait(30)

    ops = FileOps(on_read=slowly)
    with open_store(tmp_path, slots=3, ops=ops) as store:
        assert put(store, range(3)).ok.all()
        assert look(store, [1]).ok.all()
        keys, memory = keys_of(store, [0]), Memory(1)
        is_slow.set()
        loading = store.submit_load(keys, memory.pieces)
        assert started.wait(30)
        assert remove(store, [0, 1]).ok.all()
        store.check_invariants()
        assert put(store, [7, 8]).ok.tolist() == [True, False]  # two of three slots are in use
        goes_on.set()
        assert finish(store, loading).ok.all()
        np.testing.assert_array_equal(memory.rows[0, :PAYLOAD], Memory(1).fill(keys).rows[0, :PAYLOAD])
        assert put(store, [0]).ok.all()
        store.unlock(keys_of(store, [1]))
        store.check_invariants()
        assert put(store, [1]).ok.all()
        assert get(store, [0, 1]).ok.all()


def test_the_keys_of_all_entries_are_listed_and_empty_the_store(tmp_path):
    with open_store(tmp_path, payloads=(PAYLOAD, 300)) as store:
        keys = np.concatenate([keys_of(store, range(5)), keys_of(store, range(3), lane=1)])
        assert store.keys().shape == (0, 17)
        for lane, size in enumerate((PAYLOAD, 300)):
            mine = keys[keys[:, -1] == lane]
            assert finish(store, store.submit_store(mine, Memory(len(mine), size).fill(mine).pieces)).ok.all()
        assert sorted(map(bytes, store.keys())) == sorted(map(bytes, keys))
        assert store.stats().num_held == 0
        assert finish(store, store.submit_remove(store.keys())).ok.all()
        assert (len(store.keys()), store.num_entries) == (0, 0)
        store.check_invariants()
    assert store.keys().shape == (0, 17)


def test_an_entry_that_is_being_written_is_not_removed(tmp_path):
    is_slow, goes_on = threading.Event(), threading.Event()
    ops = FileOps(on_write=lambda *_: None if not is_slow.is_set() or goes_on.wait(30) else -errno.EIO)
    with open_store(tmp_path, slots=3, ops=ops) as store:
        is_slow.set()
        keys, memory = keys_of(store, [0]), Memory(1)
        writing = store.submit_store(keys, memory.fill(keys).pieces)
        done = remove(store, [0, 1])
        assert (done.ok.tolist(), done.error) == ([False, True], "another batch is writing an entry; wait for its end")
        assert done.is_full  # the disk works
        goes_on.set()
        assert finish(store, writing).ok.all()
        assert remove(store, [0]).ok.all()
        assert not look(store, [0]).ok.any()


def test_a_removal_that_cannot_be_written_says_so(tmp_path):
    fails = []
    ops = FileOps(on_write=lambda *_: -errno.EIO if fails else None)
    with open_store(tmp_path, slots=3, ops=ops) as store:
        assert put(store, range(3)).ok.all()
        fails.append(True)
        done = remove(store, [1, 5])
        assert (done.ok.tolist(), done.error) == ([False, True], os.strerror(errno.EIO))
        assert look(store, range(3)).ok.tolist() == [True, False, True]
        fails.clear()
        assert put(store, [1]).ok.all()
        store.check_invariants()


def test_a_key_that_another_batch_writes_shares_its_result(tmp_path):
    gate = threading.Event()
    fail = []

    def on_write(fd, parts, offset):
        gate.wait(30)
        return -5 if fail else None

    ops = FileOps(on_write=on_write)
    with open_store(tmp_path, slots=8, threads=2, ops=ops) as store:
        for failing in (False, True):
            fail[:] = [1] if failing else []
            numbers = [10, 11] if failing else [0, 1]
            keys = keys_of(store, [*numbers, numbers[0]])
            memory = Memory(3).fill(keys)
            gate.clear()
            tickets = [store.submit_store(keys, memory.pieces)]
            tickets.append(store.submit_store(keys[:2], memory.pieces[:2]))
            assert not look(store, numbers).ok.any()  # not published yet
            store.check_invariants()
            writes = ops.num_writes
            gate.set()
            for ticket in tickets:
                done = finish(store, ticket)
                assert done.ok.tolist() == [not failing] * len(done.ok)
            assert ops.num_writes - writes <= 3
        assert get(store, [0, 1, 10]).ok.tolist() == [True, True, False]
        store.check_invariants()


def test_cancelled_batches_end_and_leave_every_slot(tmp_path):
    gate = threading.Event()

    def wait(fd, parts, offset):
        gate.wait(30)

    ops = FileOps(on_write=wait)
    with open_store(tmp_path, slots=8, threads=1, ops=ops) as store:
        keys = keys_of(store, range(8))
        memory = Memory(8).fill(keys)
        ticket = store.submit_store(keys, memory.pieces)
        store.cancel(ticket)
        for unknown in (12345, 0, -1, 1 << 64):
            store.cancel(unknown)
        gate.set()
        done = finish(store, ticket)
        assert done.error == "cancelled"
        assert done.ok.sum() <= 1
        store.check_invariants()
        assert put(store, range(8)).ok.all()
        gate.clear()
        ops.on_read, ops.on_write = wait, None
        target = Memory(8)
        assert look(store, range(8)).ok.all()
        ticket = store.submit_load(keys, target.pieces)
        store.cancel(ticket)
        gate.set()
        assert finish(store, ticket).ok.sum() <= 1
        store.check_invariants()
        assert store.stats().num_held == 0
        assert get(store, range(8)).ok.all()  # a cancelled load drops nothing


def test_loads_go_before_stores(tmp_path):
    gate, order = threading.Event(), []
    started = threading.Event()

    def on_read(fd, parts, offset):
        order.append("load")

    def on_write(fd, parts, offset):
        started.set()
        gate.wait(30)
        order.append("store")

    ops = FileOps()
    with open_store(tmp_path, slots=16, threads=1, ops=ops) as store:
        put(store, range(4))
        ops.on_read, ops.on_write = on_read, on_write
        keys = keys_of(store, range(10, 14))
        memory = Memory(4).fill(keys)
        stored = store.submit_store(keys, memory.pieces)
        assert started.wait(30)
        target = Memory(4)
        loaded = store.submit_load(keys_of(store, range(4)), target.pieces)
        gate.set()
        assert finish(store, loaded).ok.all()
        assert finish(store, stored).ok.all()
        assert order[:5] == ["store"] + ["load"] * 4


def test_drain_waits_with_a_limit(tmp_path):
    gate = threading.Event()
    ops = FileOps(on_write=lambda fd, parts, offset: gate.wait(30) and None)
    with open_store(tmp_path, ops=ops) as store:
        assert store.drain(0)
        keys = keys_of(store, [0])
        memory = Memory(1).fill(keys)
        ticket = store.submit_store(keys, memory.pieces)
        assert not store.drain(0.01)
        assert store.stats().num_pending == 1
        gate.set()
        assert store.drain()
        assert select.select([store.fileno()], [], [], 0)[0]
        assert [done.ticket for done in store.poll()] == [ticket]


def test_close_ends_every_batch_and_releases_everything(tmp_path):
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), len(os.listdir("/proc/self/task"))
    gate = threading.Event()
    ops = FileOps(on_write=lambda fd, parts, offset: gate.wait(0.05) and None)
    store = open_store(tmp_path, threads=2, ops=ops)
    assert look(store, [0]).ok.tolist() == [False]
    keys = keys_of(store, range(8))
    memory = Memory(8).fill(keys)
    tickets = [store.submit_store(keys, memory.pieces), store.submit_lookup(keys)]
    store.close()
    store.close()
    assert sorted(done.ticket for done in store.poll()) == tickets
    assert store.poll() == []
    assert store.drain(1)
    assert store.fileno() == -1
    store.unlock(keys)
    store.cancel(1)
    for call in (store.submit_lookup, lambda k: store.submit_load(k, memory.pieces)):
        with pytest.raises(UnsupportedOption, match="closed"):
            call(keys)
    assert store.stats().num_pending == 0
    assert descriptors() == before
    assert len(os.listdir("/proc/self/task")) == threads
    forgotten = open_store(tmp_path)
    del forgotten
    assert descriptors() == before


def test_statistics_count_keys_and_bytes(store):
    put(store, range(4))
    get(store, [0, 1, 9])
    look(store, [0, 8])
    stats = store.stats()
    assert (stats.num_stored, stats.num_store_failures) == (4, 0)
    assert (stats.num_loaded, stats.num_load_failures) == (2, 1)
    assert (stats.num_lookups, stats.num_found, stats.num_held) == (2, 1, 1)
    assert (stats.bytes_stored, stats.bytes_loaded) == (4 * PAYLOAD, 2 * PAYLOAD)


def test_invalid_keys_and_pieces_are_refused_before_anything_happens(store):
    keys = keys_of(store, range(2))
    memory = Memory(2).fill(keys)
    other_lane = keys.copy()
    other_lane[1, 16] = 1
    for bad in (keys[:, :16].copy(), keys.astype(np.int64), keys[0], other_lane):
        for call in (store.submit_lookup, store.unlock, lambda k: store.submit_store(k, memory.pieces)):
            with pytest.raises(ShapeError):
                call(bad)
    pieces = memory.pieces
    moved, null, small = pieces.copy(), pieces.copy(), pieces.copy()
    moved[1, 0] += 512
    null[1, 0] = 0
    small[1, 1] -= 1
    for bad in (pieces[:1], pieces.astype(np.int64), pieces[:, 0], moved, null, small):
        for call in (store.submit_load, store.submit_store):
            with pytest.raises(ShapeError):
                call(keys, bad)
    assert store.num_entries == 0
    assert store.stats().num_pending == 0
    assert store.poll() == []


@pytest.mark.parametrize("threads", [0, 257, "x", -1])
def test_an_invalid_number_of_threads_is_refused(tmp_path, threads):
    with pytest.raises(ShapeError, match="threads"):
        open_store(tmp_path, threads=threads)
    assert list(tmp_path.iterdir()) == []


def test_threads_share_a_store(tmp_path):
    """Four threads store, look up, load and cancel at random; each ticket ends once, and every loaded byte is right."""
    with open_store(tmp_path, slots=12, threads=3) as store:
        ended, tickets, lock = [], [], threading.Lock()
        memories = {}

        def work(seed):
            rng = np.random.default_rng(seed)
            for _ in range(40):
                numbers = rng.integers(0, 30, rng.integers(1, 5))
                keys = keys_of(store, numbers)
                kind = rng.integers(0, 4)
                memory = Memory(len(keys))
                if kind == 0:
                    ticket = store.submit_lookup(keys)
                    store.unlock(keys)
                elif kind == 1:
                    ticket = store.submit_load(keys, memory.pieces)
                else:
                    ticket = store.submit_store(keys, memory.fill(keys).pieces)
                with lock:
                    tickets.append(ticket)
                    memories[ticket] = kind, keys, memory
                    ended.extend(store.poll())
                if kind == 3:
                    store.cancel(ticket)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.drain(30)
        ended += store.poll()
        assert sorted(done.ticket for done in ended) == sorted(tickets)
        for done in ended:
            kind, keys, memory = memories[done.ticket]
            if kind == 1:
                expected = Memory(len(keys)).fill(keys)
                np.testing.assert_array_equal(memory.rows[done.ok, :PAYLOAD], expected.rows[done.ok, :PAYLOAD])
        store.check_invariants()
        for lane in store._lanes:
            for key in list(lane.held.elements()):
                lane.unhold(key)
        store.check_invariants()


def test_a_plan_within_a_budget_gives_that_number_of_slots(tmp_path):
    for slots in (1, 31, 33, 100):
        with open_store(tmp_path, slots=slots, fingerprint=fingerprint(model=f"m{slots}")) as store:
            assert store.num_slots == (slots,)
            used = sum(path.stat().st_size for path in store.path.iterdir())
            assert used <= bytes_for(slots)
    assert isinstance(store, DiskStore)
