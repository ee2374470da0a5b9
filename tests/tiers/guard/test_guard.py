"""Guard: what the fault does to a store reaches the caller as a miss or as the right bytes, in time."""

import errno
import os
import threading
import time

import numpy as np
import pytest

from pagecore.errors import DeviceError, ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.guard import Breaker, Deadline, Guard, closing
from pagecore.tiers.guard import guard as guards
from pagecore.tiers.guard.staging import StagingMemory
from pagecore.tiers.store import BlockStore, EntryLister, EntryRemover
from tests.tiers.blocks import Blocks, random_keys, wait, wait_all
from tests.tiers.leaks import nothing_left
from tests.tiers.memory_store import MemoryStore

NBYTES = 10_000
SOON = Deadline(0.05, 1e12)
KINDS = [{"verifies": True}, {"verifies": False}, {"verifies": False, "writes_late": True}, {"writes_late": True}]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(f"{k}" if v else f"not_{k}" for k, v in kind.items()))
def kind(request):
    return request.param


@pytest.fixture
def blocks():
    blocks = Blocks(8, NBYTES)
    blocks.fill(0)
    return blocks


def stored(guard, blocks, keys):
    done = wait(guard, guard.submit_store(keys, blocks.pieces()))
    assert done.ok.all()
    assert done.error is None


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


@pytest.mark.parametrize("fault", ["error", "raise", "hang"])
def test_a_removal_that_fails_ends_once(kind, fault, blocks):
    store = MemoryStore(**kind)
    keys = random_keys(8)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        store.inject("remove", fault)
        done = wait(guard, guard.submit_remove(keys))
        assert not done.ok.any()
        assert done.error is not None
        assert guard.stats().num_removed == 0
        store.release()
        assert guard.drain(10)
        guard.check_invariants()


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


def test_a_load_that_the_store_refuses_holds_nothing(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        assert guard.stats().num_held == 8
        store.inject("load", "raise", 8)
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert (done.ok.any(), done.error) == (False, "OSError: injected")
        assert guard.stats().num_held == 0
        guard.check_invariants()


def test_a_flipped_bit_is_a_miss_and_is_not_delivered(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "flip")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        if kind.get("verifies", True):
            assert done.error == "injected: flip"
        else:
            assert "differ from their sums" in done.error
            assert blocks.is_poisoned.all()
            assert guard.health().failed_sums == 8
        assert not done.ok.any()


@pytest.mark.parametrize("byte", [0, NBYTES - 1, NBYTES, NBYTES + 8, NBYTES + 16, NBYTES + 23])
def test_rot_of_payload_or_frame_is_a_miss(byte, blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.rot(keys[3], 8 * byte + 5)
        blocks.poison()
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True] * 3 + [False] + [True] * 4
        assert blocks.is_poisoned.tolist() == (~done.ok).tolist()


@pytest.mark.parametrize("writes_late", [False, True])
def test_a_damaged_entry_is_deleted_and_can_be_stored_again(blocks, writes_late):
    keys, expected = random_keys(8), blocks.payloads.copy()
    store = MemoryStore(verifies=False, writes_late=writes_late)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        for index in (2, 5):
            store.rot(keys[index], 77)
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.sum() == 6
        limit = time.monotonic() + 20
        while len(store.data) > 6:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert wait(guard, guard.submit_lookup(keys)).ok.tolist() == [n not in (2, 5) for n in range(8)]
        guard.unlock(keys)
        blocks.payloads[:] = expected
        stored(guard, blocks, keys)
        blocks.poison()
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
        guard.check_invariants()


@pytest.mark.parametrize("refusal", ["raise", "hang", "cannot"])
def test_a_damaged_entry_that_cannot_be_deleted_is_a_miss_each_time(blocks, refusal):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.rot(keys[2], 77)
        if refusal == "cannot":
            store.can_remove = False
        else:
            store.inject("remove", refusal, 2)
        for _ in range(2):
            done = wait(guard, guard.submit_load(keys, blocks.pieces()))
            assert done.ok.tolist() == [n != 2 for n in range(8)]
        guard.check_invariants()


def test_an_entry_under_another_key_is_a_miss(blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=False)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        store.data[keys[0].tobytes()] = store.data[keys[1].tobytes()]
        assert not wait(guard, guard.submit_load(keys[:1], blocks.pieces([0]))).ok.any()


def test_an_entry_that_is_gone_after_its_lookup_is_a_miss_without_an_error(kind, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("load", "gone")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert not done.ok.any()
        assert done.error is None
        assert guard.health().lost_bytes == 0
        assert guard.stats().num_held == 0


COMBINATIONS = [
    (operation, fault)
    for operation in ("lookup", "load", "store")
    for fault in ("error", "raise", "hang", "part")
    if (operation, fault) != ("lookup", "part")  # a lookup has no payload
]


@pytest.mark.parametrize(("operation", "fault"), COMBINATIONS)
def test_each_fault_ends_each_operation_once(kind, operation, fault, blocks):
    keys = random_keys(8)
    store = MemoryStore(**kind)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        other = random_keys(8, 1) if operation == "store" else keys
        store.inject(operation, fault)
        arguments = (other,) if operation == "lookup" else (other, blocks.pieces())
        done = wait(guard, getattr(guard, f"submit_{operation}")(*arguments))
        assert not done.ok.any()
        assert done.error is not None
        assert guard.drain(0)
        store.write_late()
        if operation == "load" and (fault != "part" or not kind.get("verifies", True)):
            assert blocks.is_poisoned.all()
        guard.check_invariants()


def test_a_late_transfer_never_reaches_the_memory_of_the_caller(blocks):
    keys = random_keys(8)
    store = MemoryStore(writes_late=True)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "hang")
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert "late" in done.error
        assert guard.health().lost_bytes >= 8 * NBYTES
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        expected = blocks.payloads.copy()
        store.data = {key: bytes(len(value)) for key, value in store.data.items()}
        assert store.write_late() == 1
        np.testing.assert_array_equal(blocks.payloads, expected)


@pytest.mark.slow
def test_lost_memory_returns_only_after_the_client_was_destroyed(blocks):
    keys = random_keys(8)
    clients = [MemoryStore(writes_late=True)]

    def reopen():
        assert clients[-1].is_closed
        clients.append(MemoryStore(data=clients[0].data, writes_late=True))
        return clients[-1]

    with Guard(clients[0], deadline=SOON, budget_bytes=30 * 4096, reopen=reopen) as guard:
        stored(guard, blocks, keys)
        clients[0].inject("load", "hang", 100)
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            wait(guard, guard.submit_load(keys[:2], blocks.pieces([0, 1])))
            assert time.monotonic() < limit
        assert guard.health().lost_bytes == 0
        guard.check_invariants()
    assert len(clients) == 2
    assert all(client.is_closed for client in clients)


def test_a_client_that_cannot_be_reopened_is_tried_again_after_the_pause(blocks):
    now = [0.0]
    answers = [OSError("refused"), OSError("refused"), MemoryStore(writes_late=True)]

    def reopen():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    store = MemoryStore(writes_late=True)
    keys = random_keys(8)
    with Guard(store, budget_bytes=24 * 4096, reopen=reopen, clock=lambda: now[0]) as guard:
        store.inject("load", "hang", 100)
        ticket = guard.submit_load(keys, blocks.pieces())
        now[0] = 10.0
        assert "late" in wait(guard, ticket).error
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            wait(guard, guard.submit_lookup(keys))
            now[0] += 0.5
            assert time.monotonic() < limit
        assert guard.health().lost_bytes == 0
        now[0] += 60.0
        assert wait(guard, guard.submit_lookup(keys)).error is None


def test_loads_larger_than_the_staging_memory_pass_in_parts():
    large = Blocks(64, NBYTES)
    data = MemoryStore(verifies=False)
    keys = random_keys(64)
    with Guard(data) as guard:
        expected = large.fill(1)
        stored(guard, large, keys)
    store = MemoryStore(verifies=False, data=data.data)
    with Guard(store, budget_bytes=10 * 4096, deadline=Deadline(60.0)) as guard:
        large.poison()
        assert wait(guard, guard.submit_load(keys, large.pieces())).ok.all()
        np.testing.assert_array_equal(large.payloads, expected)


def test_a_payload_larger_than_the_staging_memory_is_refused_and_named():
    large = Blocks(2, 3 * 4096)
    with Guard(MemoryStore(verifies=False), budget_bytes=2 * 4096) as guard:
        done = wait(guard, guard.submit_load(random_keys(2), large.pieces()))
        assert not done.ok.any()
        assert "exceed the staging memory" in done.error
        assert guard.health().breaker == "closed"


@pytest.mark.parametrize("verifies", [True, False])
def test_stores_are_dropped_when_the_budget_is_in_use_and_loads_wait(verifies, blocks):
    keys = random_keys(8)
    store = MemoryStore(verifies=verifies, manual=True)
    with Guard(store, budget_bytes=10 * 4096, deadline=Deadline(60.0)) as guard:
        first = guard.submit_store(keys[:2], blocks.pieces([0, 1]))
        second = guard.submit_store(keys[2:6], blocks.pieces([2, 3, 4, 5]))
        load = guard.submit_load(keys[:2], blocks.pieces([6, 7]))
        limit = time.monotonic() + 20
        while not guard.drain(0):
            store.release()
            assert time.monotonic() < limit
        ended = {done.ticket: done for done in guard.poll()}
        assert ended[first].ok.all()
        assert ended[second].ok.sum() < 4
        assert "dropped" in ended[second].error
        assert ended[load].ok.all() or verifies
        assert guard.health().breaker == "closed"


def test_three_failures_open_the_breaker_and_a_probe_closes_it(blocks):
    now = [0.0]
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, clock=lambda: now[0]) as guard:
        store.inject("lookup", "error", 3)
        for _ in range(3):
            assert wait(guard, guard.submit_lookup(keys)).error == "injected"
        assert guard.health().breaker == "open"
        assert "circuit breaker is open" in wait(guard, guard.submit_lookup(keys)).error
        now[0] = 1.0
        store.inject("lookup", "error")
        assert wait(guard, guard.submit_lookup(keys)).error == "injected"
        now[0] = 2.9
        assert "refused" in wait(guard, guard.submit_lookup(keys)).error
        now[0] = 3.0
        assert wait(guard, guard.submit_lookup(keys)).error is None
        assert guard.health().breaker == "closed"


def test_loads_that_are_refused_give_up_their_holds(blocks):
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, breaker=Breaker(failures=1)) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("store", "error")
        wait(guard, guard.submit_store(random_keys(8, 1), blocks.pieces()))
        assert "refused" in wait(guard, guard.submit_load(keys, blocks.pieces())).error
        assert guard.stats().num_held == 0


def test_loads_that_wait_for_memory_give_up_their_holds_when_they_are_cancelled(blocks):
    store = MemoryStore(verifies=False)
    keys = random_keys(8)
    with Guard(store, budget_bytes=24 * 4096, deadline=Deadline(60.0)) as guard:
        stored(guard, blocks, keys)
        assert wait(guard, guard.submit_lookup(keys)).ok.all()
        store.inject("load", "hang", 8)
        first = guard.submit_load(keys, blocks.pieces())
        assert wait(guard, guard.submit_lookup(keys[:2])).ok.all()
        second = guard.submit_load(keys[:2], blocks.pieces([0, 1]))
        guard.cancel(second)
        assert wait(guard, second).error == "cancelled"
        assert guard.stats().num_held == 8
        store.release()
        assert wait(guard, first).ok.all()
        assert guard.stats().num_held == 0


def test_a_jump_of_the_clock_leaves_everything_usable(blocks):
    now = [1000.0]
    store = MemoryStore(manual=True, verifies=False)
    keys = random_keys(8)
    with Guard(store, clock=lambda: now[0]) as guard:
        ticket = guard.submit_lookup(keys)
        now[0] = 10.0
        assert guard.poll() == []
        store.release()
        assert wait(guard, ticket).error is None
        ticket = guard.submit_lookup(keys)
        now[0] = 1e9
        assert "late" in wait(guard, ticket).error
        store.manual = False
        assert wait(guard, guard.submit_lookup(keys)).error is None


@pytest.mark.parametrize("seconds", [1e7, 1e300, float("inf")])
def test_a_deadline_of_months_leaves_the_thread_at_work(seconds):
    store, keys = MemoryStore(manual=True), random_keys(8)
    with Guard(store, deadline=Deadline(seconds)) as guard:
        first = guard.submit_lookup(keys)
        guard.submit_lookup(keys)
        store.release(store.hanging[0].ticket)
        wait(guard, first)
        while guard._thread.is_alive() and guard._sleeps_until != guard._core.next_deadline():
            time.sleep(0.001)
        store.release()
        assert guard.drain(20.0)  # which leaves the work to the thread


def test_a_cancelled_batch_ends_soon_and_is_no_failure_of_the_store(kind, blocks):
    store = MemoryStore(**kind)
    keys = random_keys(8)
    with Guard(store, breaker=Breaker(failures=1), deadline=Deadline(60.0)) as guard:
        stored(guard, blocks, keys)
        blocks.poison()
        store.inject("load", "hang")
        ticket = guard.submit_load(keys, blocks.pieces())
        guard.cancel(ticket)
        done = wait(guard, ticket)
        assert not done.ok.any()
        assert done.error == "cancelled"
        guard.cancel(ticket)
        guard.cancel(12345)
        assert guard.poll() == []
        assert guard.health().breaker == "closed"
        assert blocks.is_poisoned.all()


def test_entries_that_a_late_lookup_finds_are_unlocked(blocks):
    store = MemoryStore()
    keys = random_keys(8)
    with Guard(store, deadline=SOON) as guard:
        stored(guard, blocks, keys)
        store.inject("lookup", "hang")
        store.cancel = lambda ticket: None
        assert "late" in wait(guard, guard.submit_lookup(keys)).error
        store.release()
        assert sum(store.holds.values()) == 8
        guard.poll()
        assert sum(store.holds.values()) == 0


def test_close_ends_all_batches_and_leaves_no_thread(kind, blocks):
    before = threading.active_count()
    store = MemoryStore(**kind, manual=True)
    guard = Guard(store, deadline=Deadline(60.0))
    keys = random_keys(8)
    tickets = {
        guard.submit_lookup(keys),
        guard.submit_load(keys, blocks.pieces()),
        guard.submit_store(keys, blocks.pieces()),
    }
    guard.close()
    assert {done.ticket for done in guard.poll()} == tickets
    assert store.is_closed
    assert guard.poll() == []
    guard.close()
    assert threading.active_count() == before
    with pytest.raises(StoreError, match="closed"):
        guard.submit_lookup(keys)


class Closing(MemoryStore):
    """A store whose `close` waits for `may_close`."""

    def __init__(self, **kind):
        super().__init__(**kind)
        self.may_close = threading.Event()

    def close(self):
        self.may_close.wait(20)
        super().close()


def test_close_leaves_a_store_that_may_write_late_and_does_not_close_to_a_thread(blocks, monkeypatch):
    monkeypatch.setattr(closing, "CLOSE_SECONDS", 0.01)
    before = set(threading.enumerate())
    store = Closing(verifies=False, writes_late=True)
    guard = Guard(store, deadline=SOON)
    keys = random_keys(8)
    stored(guard, blocks, keys)
    store.inject("load", "hang")
    blocks.poison()
    assert "late" in wait(guard, guard.submit_load(keys, blocks.pieces())).error
    guard.close()
    assert not store.is_closed
    assert store.write_late() == 1  # to staging memory, which is still there
    assert blocks.is_poisoned.all()
    (thread,) = set(threading.enumerate()) - before
    store.may_close.set()
    thread.join(20)
    assert store.is_closed
    assert set(threading.enumerate()) == before


def test_a_client_that_cannot_register_the_memory_is_closed_and_replaced(blocks):
    class Unregistered(MemoryStore):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    kind = {"verifies": False, "writes_late": True}
    clients = [MemoryStore(**kind), Unregistered(**kind), MemoryStore(**kind)]
    waiting = clients[1:]
    breaker = Breaker(first_pause=0.01)
    with Guard(
        clients[0], deadline=SOON, budget_bytes=24 * 4096, breaker=breaker, reopen=lambda: waiting.pop(0)
    ) as guard:
        clients[0].inject("load", "hang", 100)
        wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
        limit = time.monotonic() + 20
        while guard.health().num_reopened == 0:
            assert time.monotonic() < limit
            time.sleep(0.001)
        assert [client.is_closed for client in clients] == [True, True, False]
        stored(guard, blocks, random_keys(8))


def test_a_client_that_cannot_register_the_memory_and_does_not_close_stops_nothing(blocks, monkeypatch):
    class Unregistered(Closing):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    monkeypatch.setattr(closing, "CLOSE_SECONDS", 0.01)
    kind = {"verifies": False, "writes_late": True}
    first, refused = MemoryStore(**kind), Unregistered(**kind)
    refused.name = "refused"
    guard = Guard(first, deadline=SOON, budget_bytes=24 * 4096, reopen=lambda: refused)
    first.inject("load", "hang", 100)
    wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
    limit = time.monotonic() + 20
    while all(thread.name != "closing refused" for thread in threading.enumerate()):
        assert time.monotonic() < limit
        time.sleep(0.001)
    closer = threading.Thread(target=guard.close)
    closer.start()
    closer.join(10)
    assert (closer.is_alive(), refused.is_closed) == (False, False)
    refused.may_close.set()
    while not refused.is_closed:
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_guard_of_a_store_that_cannot_register_the_memory_leaves_nothing():
    class Unregistered(MemoryStore):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    with nothing_left():
        store = Unregistered(verifies=False)
        with pytest.raises(StoreError, match="no memory can be locked"):
            Guard(store)
        store.close()


def test_refused_clients_that_do_not_close_leave_room_for_others_up_to_a_bound(blocks, monkeypatch):
    class Unregistered(Closing):
        def register_memory(self, address, nbytes):
            raise StoreError("no memory can be locked")

    monkeypatch.setattr(guards, "MAX_REFUSED", 3)
    kind = {"verifies": False, "writes_late": True}
    first, opened, usable = MemoryStore(**kind), [], threading.Event()

    def reopen():
        opened.append(MemoryStore(**kind) if usable.is_set() else Unregistered(**kind))
        return opened[-1]

    breaker = Breaker(first_pause=0.001, longest_pause=0.002)
    with Guard(first, deadline=SOON, budget_bytes=24 * 4096, breaker=breaker, reopen=reopen) as guard:
        first.inject("load", "hang", 100)
        wait(guard, guard.submit_load(random_keys(8), blocks.pieces()))
        limit = time.monotonic() + 20
        while len(opened) < 3:
            assert time.monotonic() < limit
            time.sleep(0.001)
        guard.poll()
        time.sleep(0.02)  # ten pauses
        assert len(opened) == 3, "no more clients are opened while three do not close"
        usable.set()
        opened[0].may_close.set()
        while guard.health().num_reopened == 0:
            assert time.monotonic() < limit
            time.sleep(0.001)
        keys = random_keys(8, seed=3)
        stored(guard, blocks, keys)
        opened[1].may_close.set()
        while not opened[1].is_closed:
            time.sleep(0.001)
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        opened[2].may_close.set()
        guard.check_invariants()


@pytest.mark.parametrize("what", ["thread", "first descriptor", "second descriptor"])
@pytest.mark.parametrize("framed", [False, True])
def test_a_guard_without_threads_or_descriptors_is_refused_and_leaves_nothing(what, framed, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    eventfd, left = os.eventfd, ["second"] * (what == "second descriptor")

    def no_descriptor(*arguments):
        if left:
            left.pop()
            return eventfd(*arguments)
        raise OSError(errno.EMFILE, "Too many open files")

    mappings = []

    class Mapped(StagingMemory):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            mappings.append(self)

    monkeypatch.setattr("pagecore.tiers.guard.core.StagingMemory", Mapped)
    with nothing_left():
        store = MemoryStore(verifies=not framed)
        with monkeypatch.context() as patch:
            if what == "thread":
                patch.setattr(threading.Thread, "start", no_thread)
            else:
                patch.setattr(os, "eventfd", no_descriptor)
            with pytest.raises(DeviceError, match=f"memory has no {what.split()[-1]}.*raise the limit"):
                Guard(store)
        assert [each._mmap for each in mappings] == [None] * framed
        assert not store.is_closed
        Guard(store).close()


def test_a_client_that_does_not_close_is_replaced_once_it_has_and_delays_no_batch(blocks):
    clients = [Closing(verifies=False, writes_late=True)]

    def reopen():
        clients.append(MemoryStore(verifies=False, writes_late=True))
        return clients[-1]

    keys = random_keys(8)
    with Guard(clients[0], deadline=SOON, budget_bytes=24 * 4096, reopen=reopen) as guard:
        stored(guard, blocks, keys)
        clients[0].inject("load", "hang", 100)
        wait(guard, guard.submit_load(keys, blocks.pieces()))
        while guard._core.store is not None:
            time.sleep(0.001)
        assert "being reopened" in wait(guard, guard.submit_lookup(keys)).error
        clients[0].may_close.set()
        while guard.health().num_reopened == 0:
            time.sleep(0.001)
        assert clients[0].is_closed
        assert guard.health().lost_bytes == 0


def test_close_releases_everything_if_the_store_raises(blocks):
    class Stubborn(MemoryStore):
        def close(self):
            super().close()
            raise StoreError("the server is gone")

    before = len(os.listdir("/proc/self/fd"))
    guard = Guard(Stubborn(verifies=False))
    stored(guard, blocks, random_keys(8))
    with pytest.raises(StoreError, match="the server is gone"):
        guard.close()
    assert len(os.listdir("/proc/self/fd")) == before
    guard.close()


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
    with pytest.raises(UnsupportedOption, match="give one with the methods of BlockStore"):
        Guard(5)


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


def test_a_closed_guard_writes_to_no_descriptor():
    guard = Guard(MemoryStore(manual=True))
    tickets, wake = [guard.submit_lookup(random_keys(2)) for _ in range(2)], guard._wake
    guard.close()
    opened = [os.eventfd(0, os.EFD_NONBLOCK)]
    try:
        while opened[-1] < wake:
            opened.append(os.dup(opened[0]))
        assert wake in opened  # its number belongs to another file now
        for ticket in (*tickets, 99):
            guard.cancel(ticket)
        assert sorted(done.ticket for done in guard.poll()) == tickets
        guard.unlock(random_keys(2))
        with pytest.raises(BlockingIOError):
            os.eventfd_read(opened[0])
    finally:
        for each in opened:
            os.close(each)


def test_a_store_that_was_closed_without_its_guard_fails_each_batch(blocks):
    store = MemoryStore(verifies=False)
    with Guard(store, breaker=Breaker(failures=100)) as guard:
        store.close()
        for _ in range(3):  # the copies of each need the guard's thread
            done = wait(guard, guard.submit_store(random_keys(8), blocks.pieces()), 5.0)
            assert (done.ok.any(), done.error) == (False, "AssertionError: the store is closed")
