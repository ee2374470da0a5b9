"""DiskStore as a block store: batches end once, and what is loaded has the bytes that were stored."""

import select

import numpy as np
import pytest

from pagecore.errors import ShapeError
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.store import BlockStore
from tests.tiers.disk.kit import PAYLOAD, Memory, bytes_for, fingerprint, finish, get, keys_of, look, open_store, put


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


def test_a_plan_within_a_budget_gives_that_number_of_slots(tmp_path):
    for slots in (1, 31, 33, 100):
        with open_store(tmp_path, slots=slots, fingerprint=fingerprint(model=f"m{slots}")) as store:
            assert store.num_slots == (slots,)
            used = sum(path.stat().st_size for path in store.path.iterdir())
            assert used <= bytes_for(slots)
    assert isinstance(store, DiskStore)
