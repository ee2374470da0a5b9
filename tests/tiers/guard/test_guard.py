"""Guard as a block store: batches, prefixes, removals, read-only stores, and arguments that are refused."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.store import BlockStore, EntryLister, EntryRemover
from tests.tiers.blocks import random_keys, wait, wait_all
from tests.tiers.guard.kit import NBYTES, stored
from tests.tiers.memory_store import MemoryStore


def test_it_is_a_block_store():
    with Guard(MemoryStore()) as guard:
        assert isinstance(guard, BlockStore)
        assert (guard.medium, guard.name) == ("EXTERNAL", "memory")


def test_a_read_only_guard_serves_what_others_have_stored(blocks):
    data, keys = {}, random_keys(8)
    with Guard(MemoryStore(data=data)) as writer:
        stored(writer, blocks, keys)
    before = dict(data)
    with Guard(MemoryStore(data=data), read_only=True) as guard:
        assert (guard.takes_entries, guard.can_remove) == (False, False)
        other = random_keys(8, seed=1)
        for submit in (lambda: guard.submit_store(other, blocks.pieces()), lambda: guard.submit_remove(keys)):
            done = wait(guard, submit())
            assert (done.ok.any(), done.error) == (False, "the guard is read-only")
        assert data == before
        blocks.fill(1)
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        assert (guard.health().breaker, guard.stats().num_store_failures) == ("closed", 0)
    with pytest.raises(UnsupportedOption, match="read_only"):
        Guard(MemoryStore(), read_only=1)


def test_a_read_only_guard_leaves_a_damaged_entry_to_others(blocks):
    store, keys = MemoryStore(verifies=False), random_keys(8)
    with Guard(MemoryStore(data=store.data, verifies=False)) as writer:
        stored(writer, blocks, keys)
        assert writer.drain(5)
    store.rot(keys[3])
    with Guard(store, read_only=True) as guard:
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert (done.ok.sum(), guard.health().failed_sums) == (7, 1)
        assert guard.drain(5)
        assert (len(store.data), store.counts["remove"]) == (8, 0)
        guard.check_invariants()


class PrefixStore(MemoryStore):
    """A store that keeps prefixes, and notes what its entries follow."""

    keeps_prefixes = True
    before = ()

    def submit_store(self, keys, pieces, *, before=None):
        self.before = before
        return super().submit_store(keys, pieces)


def test_the_store_hears_which_entries_a_part_of_a_prefix_follows(kind, blocks):
    store = PrefixStore(**kind)
    keys = random_keys(8)
    with Guard(store) as guard:
        assert guard.keeps_prefixes
        assert wait(guard, guard.submit_store(keys[1:], blocks.pieces()[1:], before=keys[:1])).ok.all()
        np.testing.assert_array_equal(store.before, keys[:1])
        stored(guard, blocks, keys)
        assert store.before is None
    with Guard(MemoryStore(**kind)) as guard:
        assert not guard.keeps_prefixes
        done = wait(guard, guard.submit_store(keys, blocks.pieces(), before=keys[:1]))
        assert not done.ok.any()
        assert "leave `before` out" in done.error


class FullStore(MemoryStore):
    """A store that has room for nothing more."""

    def submit_store(self, keys, pieces):
        ticket = self._completions.open()
        self._completions.end(ticket, np.zeros(len(keys), bool), "no room", is_full=True)
        return ticket


def test_a_full_store_still_serves_loads(kind, blocks):
    keys = random_keys(8)
    data = {}
    with Guard(MemoryStore(**kind, data=data)) as guard:
        stored(guard, blocks, keys)
    with Guard(FullStore(**kind, data=data)) as guard:
        for _ in range(4):
            done = wait(guard, guard.submit_store(random_keys(8), blocks.pieces()))
            assert (done.ok.any(), done.error, done.is_full) == (False, "no room", True)
        assert guard.health().breaker == "closed"
        assert guard.health().lost_bytes == 0
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()


def test_entries_come_back_with_their_bytes(kind, blocks):
    keys = random_keys(8)
    expected = blocks.payloads.copy()
    with Guard(MemoryStore(**kind)) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        lookup = wait(guard, guard.submit_lookup(np.concatenate([keys, random_keys(3, 1)])))
        assert lookup.ok.tolist() == [True] * 8 + [False] * 3
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert done.ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
        assert (blocks.bytes[:, NBYTES:] == 0xA5).all()
        stats = guard.stats()
        assert (stats.num_found, stats.num_loaded, stats.num_stored, stats.num_held) == (8, 8, 8, 0)
        assert stats.bytes_loaded == stats.bytes_stored == 8 * NBYTES
        guard.check_invariants()


def test_removed_entries_are_misses(kind, blocks):
    keys = random_keys(8)
    with Guard(MemoryStore(**kind)) as guard:
        assert isinstance(guard, EntryRemover)
        assert guard.can_remove
        stored(guard, blocks, keys)
        done = wait(guard, guard.submit_remove(keys[2:5]))
        assert (done.ok.tolist(), done.error) == ([True] * 3, None)
        assert wait(guard, guard.submit_lookup(keys)).ok.tolist() == [True] * 2 + [False] * 3 + [True] * 3
        assert guard.stats().num_removed == 3
        guard.unlock(keys)
        guard.check_invariants()


def test_entries_are_those_that_the_store_lists():
    keys = random_keys(3)

    class Listed(MemoryStore):
        can_list = True

        def keys(self):
            return keys

    with Guard(Listed()) as guard:
        assert guard.can_list
        assert isinstance(guard, EntryLister)
        np.testing.assert_array_equal(guard.keys(), keys)
    with Guard(MemoryStore()) as guard:
        assert (guard.can_list, guard.keys().shape) == (False, (0, 17))


def test_a_removal_of_a_store_without_removals_is_refused_by_name(blocks):
    store = MemoryStore()
    store.can_remove = False
    with Guard(store) as guard:
        assert not guard.can_remove
        done = wait(guard, guard.submit_remove(random_keys(2)))
        assert (done.ok.any(), "memory deletes no entries on request" in done.error) == (False, True)


def test_empty_batches_end(kind):
    none = random_keys(0)
    pieces = np.zeros((0, 2), np.uint64)
    with Guard(MemoryStore(**kind)) as guard:
        tickets = [guard.submit_lookup(none), guard.submit_load(none, pieces), guard.submit_store(none, pieces)]
        assert all(done.ok.shape == (0,) and done.error is None for done in wait_all(guard, tickets).values())


def test_arguments_are_checked_before_anything_is_submitted(blocks):
    with Guard(MemoryStore()) as guard:
        keys = random_keys(8)
        with pytest.raises(ShapeError, match=r"uint8 \[n, 17\], got uint8 \[8, 16\]"):
            guard.submit_lookup(keys[:, :16])
        with pytest.raises(ShapeError, match=r"\[8, 2\], one for each key, got uint64 \[7, 2\]"):
            guard.submit_load(keys, blocks.pieces()[:7])
        pieces = blocks.pieces()
        pieces[2, 0] += 64
        with pytest.raises(ShapeError, match=r"pieces\[2\] is 10000 bytes"):
            guard.submit_store(keys, pieces)
        assert guard.stats().num_pending == 0
    with pytest.raises(ShapeError, match="budget_bytes"):
        Guard(MemoryStore(), budget_bytes=0)
    with pytest.raises(ShapeError, match="deadline"):
        Deadline(0)
    with pytest.raises(ShapeError, match="failures"):
        Breaker(failures=0)


class Named(MemoryStore):
    """A store whose class has all attributes of the protocol."""

    medium, name = "EXTERNAL", "memory"


@pytest.mark.parametrize("store", [5, Named])
def test_what_is_not_a_store_is_refused(store):
    with pytest.raises(UnsupportedOption, match=r"store is .*; expected an object with the methods of BlockStore"):
        Guard(store)


def test_a_medium_that_no_store_has_is_refused():
    """Events would announce its blocks as those of the device."""
    store = MemoryStore(medium="GPU")
    with pytest.raises(UnsupportedOption, match="store has medium 'GPU'; expected one of CPU, DISK, EXTERNAL"):
        Guard(store)
    store.close()


def test_a_store_that_is_closed_is_refused():
    store = MemoryStore()
    store.close()
    with pytest.raises(UnsupportedOption, match="closed; open another"):
        Guard(store)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"deadline": 3}, UnsupportedOption),
        ({"breaker": 3}, UnsupportedOption),
        ({"reopen": 3}, UnsupportedOption),
        ({"clock": 3}, UnsupportedOption),
        ({"budget_bytes": "x"}, ShapeError),
        ({"budget_bytes": 0}, ShapeError),
    ],
)
def test_arguments_of_another_kind_are_refused(options, error):
    with pytest.raises(error, match=f"{next(iter(options))} is"):
        Guard(MemoryStore(), **options)
    with pytest.raises(ShapeError, match="seconds is 'x'"):
        Deadline("x")
    with pytest.raises(ShapeError, match="failures is 'x'"):
        Breaker(failures="x")
