"""Removals from a DiskStore: entries on request, while others read or write them, and after a crash."""

import errno
import os
import threading

import numpy as np

from tests.tiers.disk.kit import PAYLOAD, FileOps, Memory, finish, get, keys_of, look, open_store, put


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
