"""Contract of remote stores as tests; a subclass gives the store and its options."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagecore.errors import ShapeError, StoreError
from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.store import BlockStore, EntryRemover
from tests.tiers.blocks import Blocks, random_keys, wait, wait_all
from tests.tiers.leaks import no_threads_left

NBYTES = 20_000
LARGE = 300_000


def fingerprint(salt=b""):
    """Return the identity of blocks of two lanes; another salt has entries of its own."""
    return Fingerprint("test", ("first", "second"), (NBYTES, LARGE), block_size=16, salt=salt)


class Contract:
    """Tests of one store; `open(salt)` returns a new client of it, and `spoil(store, key, byte)` changes an entry."""

    # False if each client has entries of its own.
    IS_SHARED = True

    @pytest.fixture
    def store(self, request):
        with self.open(request.node.nodeid.encode()) as store:
            yield store

    @pytest.mark.parametrize("lane", [0, 1])
    def test_entries_come_back_with_their_bytes(self, store, lane):
        keys = random_keys(9, lane, lane)
        blocks = Blocks(9, (NBYTES, LARGE)[lane])
        expected = blocks.fill(lane)
        assert isinstance(store, BlockStore)
        assert not wait(store, store.submit_lookup(keys)).ok.any()
        done = wait(store, store.submit_store(keys, blocks.pieces()))
        assert (done.ok.all(), done.error) == (True, None)
        asked = np.concatenate([keys[:4], random_keys(3, 7), keys[4:]])
        found = wait(store, store.submit_lookup(asked))
        assert found.ok.tolist() == [True] * 4 + [False] * 3 + [True] * 5
        blocks.poison()
        order = np.random.default_rng(0).permutation(9)
        done = wait(store, store.submit_load(keys[order], blocks.pieces(order)))
        assert (done.ok.all(), done.error) == (True, None)
        np.testing.assert_array_equal(blocks.payloads, expected)
        assert (blocks.bytes[:, blocks.nbytes :] == 0xA5).all()
        stats = store.stats()
        assert (stats.num_lookups, stats.num_found, stats.num_loaded, stats.num_stored) == (9 + 12, 9, 9, 9)
        assert stats.bytes_loaded == stats.bytes_stored == 9 * blocks.nbytes
        assert (stats.num_pending, stats.num_held) == (0, 0)

    def test_absent_entries_are_misses_that_write_nothing(self, store):
        keys = random_keys(5)
        blocks = Blocks(5, NBYTES)
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert not done.ok.any()
        assert done.error is None
        assert blocks.is_poisoned.all()

    def test_an_entry_that_exists_stays_and_counts_as_stored(self, store):
        keys = random_keys(2)
        first, second = Blocks(2, NBYTES), Blocks(2, NBYTES)
        expected = first.fill(0)
        second.fill(1)
        assert wait(store, store.submit_store(keys[:1], first.pieces([0]))).ok.all()
        assert wait(store, store.submit_store(keys, second.pieces())).ok.all()
        assert wait(store, store.submit_load(keys[:1], first.pieces([0]))).ok.all()
        np.testing.assert_array_equal(first.payloads[0], expected[0])

    def test_two_clients_that_store_the_same_keys_both_succeed(self, request):
        salt = request.node.nodeid.encode()
        keys = random_keys(8)
        blocks = Blocks(8, NBYTES)
        expected = blocks.fill(0)
        with self.open(salt) as one, self.open(salt) as two:
            tickets = [each.submit_store(keys, blocks.pieces()) for each in (one, two)]
            assert wait(one, tickets[0]).ok.all()
            assert wait(two, tickets[1]).ok.all()
            blocks.poison()
            reader = two if self.IS_SHARED else one
            assert wait(reader, reader.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)

    def test_another_fingerprint_has_entries_of_its_own(self, store):
        keys = random_keys(2)
        blocks = Blocks(2, NBYTES)
        blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        with self.open(b"another") as other:
            assert not wait(other, other.submit_lookup(keys)).ok.any()

    def test_removed_entries_are_misses_and_can_be_stored_again(self, store):
        keys = random_keys(6)
        blocks = Blocks(6, NBYTES)
        expected = blocks.fill(0)
        assert isinstance(store, EntryRemover)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        done = wait(store, store.submit_remove(np.concatenate([keys[:2], random_keys(2, 7), keys[4:5]])))
        assert (done.ok.tolist(), done.error) == ([True] * 5, None)
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [False, False, True, True, False, True]
        assert store.stats().num_removed == 5
        assert wait(store, store.submit_store(keys[:1], blocks.pieces([0]))).ok.all()
        blocks.poison()
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.tolist() == [1, 0, 1, 1, 0, 1]
        np.testing.assert_array_equal(blocks.payloads[[0, 2, 3, 5]], expected[[0, 2, 3, 5]])
        assert len(wait(store, store.submit_remove(keys[:0])).ok) == 0

    @pytest.mark.parametrize("byte", [0, 8, 16, 24, 24 + NBYTES // 2, 24 + NBYTES - 1])
    def test_a_flipped_bit_in_the_server_is_a_miss_and_the_entry_is_deleted(self, store, byte):
        keys = random_keys(3)
        blocks = Blocks(3, NBYTES)
        blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        self.spoil(store, keys[1], byte)
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True, False, True]
        assert "deleted" in done.error
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [True, False, True]

    @pytest.mark.parametrize("size", [0, 10, 24, 24 + NBYTES - 1])
    def test_a_shortened_entry_is_a_miss_and_is_deleted(self, store, size):
        keys = random_keys(3)
        blocks = Blocks(3, NBYTES)
        blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        self.spoil(store, keys[1], None, size)
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True, False, True]
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [True, False, True]
        assert wait(store, store.submit_load(keys[[0, 2]], blocks.pieces([0, 2]))).ok.all()

    def test_an_entry_that_grew_is_a_miss_or_gives_the_right_bytes(self, store):
        keys = random_keys(3)
        blocks = Blocks(3, NBYTES)
        expected = blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        self.spoil(store, keys[1], None, 24 + NBYTES + 1)
        blocks.poison()
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert done.ok[[0, 2]].all()
        np.testing.assert_array_equal(blocks.payloads[done.ok], expected[done.ok])

    def test_an_entry_under_another_key_is_a_miss(self, store):
        keys = random_keys(2)
        blocks = Blocks(2, NBYTES)
        blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        self.replace(store, keys[1], self.content(store, keys[0]))
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.tolist() == [True, False]

    def test_an_entry_that_is_gone_after_its_lookup_is_a_miss(self, store):
        keys = random_keys(2)
        blocks = Blocks(2, NBYTES)
        blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        assert wait(store, store.submit_lookup(keys)).ok.all()
        self.replace(store, keys[0], None)
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [False, True]
        assert done.error is None

    def test_many_batches_at_once_end_once_each(self, store):
        keys = random_keys(40)
        blocks = Blocks(40, NBYTES)
        expected = blocks.fill(0)
        parts = [slice(begin, begin + 4) for begin in range(0, 40, 4)]
        stores = [store.submit_store(keys[part], blocks.pieces(range(part.start, part.stop))) for part in parts]
        assert all(done.ok.all() for done in wait_all(store, stores).values())
        blocks.poison()
        tickets = []
        for part in parts:
            tickets.append(store.submit_load(keys[part], blocks.pieces(range(part.start, part.stop))))
            tickets.append(store.submit_lookup(keys[part]))
        assert all(done.ok.all() for done in wait_all(store, tickets).values())
        np.testing.assert_array_equal(blocks.payloads, expected)
        assert store.poll() == []

    def test_a_guard_hands_pieces_through(self, store):
        keys = random_keys(4)
        blocks = Blocks(4, NBYTES)
        expected = blocks.fill(0)
        guard = Guard(store, deadline=Deadline(20.0))
        try:
            assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()
            blocks.poison()
            assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
            np.testing.assert_array_equal(blocks.payloads, expected)
            assert guard.health().staging_bytes == 0
        finally:
            guard.close()

    def test_empty_batches_end(self, store):
        none, pieces = random_keys(0), np.zeros((0, 2), np.uint64)
        tickets = [store.submit_lookup(none), store.submit_load(none, pieces), store.submit_store(none, pieces)]
        assert all(done.ok.shape == (0,) for done in wait_all(store, tickets).values())
        assert store.drain(0)

    def test_cancelled_batches_end_once_and_leave_the_store_usable(self, store):
        keys = random_keys(12)
        blocks = Blocks(12, NBYTES)
        expected = blocks.fill(0)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        blocks.poison()
        tickets = [store.submit_load(keys[[i]], blocks.pieces([i])) for i in range(12)]
        for ticket in tickets:
            store.cancel(ticket)
        ended = wait_all(store, tickets)
        at_end = blocks.bytes.copy()
        store.cancel(tickets[0])
        store.cancel(10**9)
        done = wait(store, store.submit_lookup(keys))
        assert (done.ok.all(), done.error) == (True, None)
        np.testing.assert_array_equal(blocks.bytes, at_end)
        for index, ticket in enumerate(tickets):
            assert not ended[ticket].ok.all() or (blocks.payloads[index] == expected[index]).all()

    def test_close_ends_all_batches_and_leaves_no_thread(self):
        before = threading.active_count()
        store = self.open(b"close")
        keys = random_keys(64)
        blocks = Blocks(64, NBYTES)
        tickets = {store.submit_store(keys, blocks.pieces()), store.submit_load(keys, blocks.pieces())}
        store.close()
        assert {done.ticket for done in store.poll()} == tickets
        store.close()
        assert threading.active_count() == before
        with pytest.raises(StoreError, match="closed"):
            store.submit_lookup(keys)

    def test_a_close_that_was_interrupted_is_repeated(self, monkeypatch):
        def interrupted(*_):
            raise KeyboardInterrupt

        with no_threads_left():
            store = self.open(b"interrupt")
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "join", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.close()
            store.close()
            assert store.fileno() == -1

    def test_arguments_are_checked(self, store):
        keys = random_keys(2)
        blocks = Blocks(2, NBYTES)
        with pytest.raises(ShapeError, match="20001 bytes; an entry of lane 0 has 20000 bytes"):
            store.submit_load(keys, blocks.pieces() + np.array([0, 1], np.uint64))
        keys[:, -1] = 2
        with pytest.raises(ShapeError, match="lane 2, but the fingerprint has 2 lanes"):
            store.submit_lookup(keys)
        with pytest.raises(ShapeError, match=r"uint8 \[n, 17\]"):
            store.unlock(keys[:, :3])
        assert store.drain(0)
