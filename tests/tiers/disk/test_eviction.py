"""Entries that a full DiskStore evicts, in a batch and after it was opened again, and those that it keeps."""

import numpy as np
import pytest

from pagecore.tiers.guard import Guard
from tests.faults import PAGECORE, raise_at, runs
from tests.tiers.disk.kit import PAYLOAD, Memory, fingerprint, finish, get, keys_of, look, open_store, put


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


@pytest.mark.parametrize(("part", "name", "call"), [("_slabs", "place", "load"), ("_ledger", "end", "lookup")])
def test_a_prefix_is_evicted_from_its_end_after_a_call_that_failed(tmp_path, monkeypatch, part, name, call):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(6))
        calls, keys, pieces = [], keys_of(store, range(6)), [Memory(6).pieces] * (call == "load")
        whole = getattr(getattr(store, part), name)

        def fails(*arguments):
            calls.append(arguments)
            if call == "lookup" or len(calls) == 6:
                raise MemoryError
            return whole(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(getattr(store, part), name, fails)
            with pytest.raises(MemoryError):
                getattr(store, f"submit_{call}")(keys, *pieces)
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
