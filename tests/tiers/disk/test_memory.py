"""DiskStore without memory: a call raises MemoryError, and what it leaves is done by a later one, once."""

import threading
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from pagecore.tiers.disk.batch import Batch
from pagecore.tiers.disk.lane import Lane
from pagecore.tiers.disk.ledger import Ledger
from tests.cache.verdicts import wrong_error
from tests.faults import PAGECORE, fail_allocation, is_full, raise_at, runs
from tests.tiers.disk.kit import FileOps, Memory, finish, get, keys_of, look, open_store, put

DISK = PAGECORE / "tiers" / "disk"
TABLE, SLOT = 8192 + 4096, 8192
STRIDE = 1 if is_full() else 9


class Filled:
    """A store with entries 0 to 5, of which 5 is damaged, and two free slots; `submit_all` needs a `gated` one.

    The thread of a gated store calls Python, which ends the process if it cannot allocate meanwhile.
    """

    def __init__(self, folder, *, gated=False):
        self.may_move = threading.Event()
        self.may_move.set()

        def wait(fd, parts, offset):
            if offset >= TABLE:  # the table is locked while it is written
                self.may_move.wait()

        self.store = open_store(folder, slots=8, threads=1, ops=FileOps(wait, wait) if gated else None)
        put(self.store, range(6), before=[])
        (slab,) = self.store.path.glob("*.slab")
        slot = self.store._lanes[0].entries[keys_of(self.store, [5]).tobytes()]
        with open(slab, "r+b", buffering=0) as file:
            file.seek(TABLE + slot * SLOT)
            file.write(b"damage")
        self.store.take_evicted()
        self.memory, self.tickets = [], []

    def submit(self, name, numbers, **options):
        keys = keys_of(self.store, numbers)
        if name in ("submit_load", "submit_store"):
            self.memory.append(Memory(len(numbers)))
            pieces = [(self.memory[-1].fill(keys) if name == "submit_store" else self.memory[-1]).pieces]
        else:
            pieces = []
        call = getattr(self.store, name)
        return lambda: self.tickets.append(call(keys, *pieces, **options))

    def submit_all(self):
        """Submit batches of all kinds, whose ends the store has not seen."""
        self.may_move.clear()
        self.submit("submit_lookup", [0, 9])()
        self.submit("submit_load", [0, 1, 5, 9])()
        self.submit("submit_store", [6, 7, 0], before=keys_of(self.store, [4]))()
        self.submit("submit_store", [7, 8, 7])()
        self.submit("submit_remove", [2, 9])()
        self.submit("submit_load", [1])()
        self.may_move.set()
        assert self.store._queue.drain(20)

    def ends(self):
        """Return the results of all batches and what the store has then."""
        store = self.store
        ended = {ticket: finish(store, ticket) for ticket in self.tickets}
        assert store.poll() == []
        store.check_invariants()
        stats = astuple(store.stats())
        assert store.stats().num_pending == 0
        there = look(store, range(12)).ok.tolist()
        store.unlock(keys_of(store, range(12)))
        assert get(store, [number for number in range(12) if there[number]]).ok.all()
        assert put(store, range(20, 30)).ok.sum() == 8 - store.stats().num_held  # no slot is lost
        store.check_invariants()
        store.close()
        return [(done.ok.tolist(), done.error, done.is_full) for done in ended.values()], stats, there


def test_a_poll_without_memory_is_made_up_for_by_the_next(tmp_path_factory):
    filled = Filled(tmp_path_factory.mktemp("whole"), gated=True)
    filled.submit_all()
    expected = filled.ends()
    assert [ok for ok, _, _ in expected[0]][1] == [True, True, False, False]

    def polled(n):
        nonlocal filled
        filled = Filled(tmp_path_factory.mktemp("poll"), gated=True)
        filled.submit_all()
        return fail_allocation(lambda: polls.__setitem__(0, filled.store.poll()), n)

    polls = [[]]
    for run in runs(polled, stride=STRIDE):
        assert not wrong_error(run, may_lack_memory=True)
        filled.store._kept = {done.ticket: done for done in polls[0]}
        polls[0] = []
        assert filled.ends() == expected, run.where


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("submit_lookup", [0, 1, 9]),
        ("submit_load", [0, 1, 9, 0]),
        ("submit_store", [6, 7, 0, 7, 8, 9]),
        ("submit_remove", [0, 1, 9]),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_submission_without_memory_takes_nothing(tmp_path_factory, name, numbers, count):
    def submitted(n):
        nonlocal filled
        filled = filled or Filled(tmp_path_factory.mktemp("submit"))
        return fail_allocation(filled.submit(name, numbers), n, count=count)

    filled, changes = None, name == "submit_store"  # it may evict an entry and fail then
    for run in runs(submitted, stride=STRIDE if changes else 1 if is_full() else 3):
        assert not wrong_error(run, may_lack_memory=True)
        store = filled.store
        while filled.tickets:
            finish(store, filled.tickets.pop())
        assert store.drain(20)
        store.poll()  # a batch whose ticket was lost
        store.check_invariants()
        assert store.stats().num_pending == 0
        store.unlock(keys_of(store, numbers))
        assert not any(lane._pins or lane.writing for lane in store._lanes), run.where
        if run.finished or changes:
            assert put(store, range(20, 30)).ok.sum() == 8
            store.close()
            filled = None


@pytest.mark.parametrize("name", ["submit_lookup", "submit_load", "submit_store", "submit_remove", "poll"])
def test_an_interrupt_at_any_bytecode_of_the_index_leaves_no_pin_and_no_slot(tmp_path_factory, name):
    numbers = {"submit_lookup": [0, 1, 9], "submit_store": [6, 7, 0, 8, 9]}.get(name, [0, 1, 9])

    def interrupted(n):
        nonlocal filled
        filled = filled or Filled(tmp_path_factory.mktemp("bytecode"))
        if name == "poll":
            filled.submit_all()
            call = filled.store.poll
        else:
            look(filled.store, [0, 0])  # another reader's
            call = filled.submit(name, numbers)
        return raise_at(call, n, DISK / "lane.py", opcodes=True)

    filled = None
    for run in runs(interrupted, stride=1 if is_full() else 11):
        store = filled.store
        assert store.drain(20)
        store.poll()
        store.check_invariants()
        assert store.stats().num_pending == 0, run.where
        (lane,) = store._lanes
        key = keys_of(store, [0]).tobytes()
        if name in ("submit_lookup", "submit_store"):
            assert lane._pins[key] == lane.held[key] == 2 + (run.finished and name == "submit_lookup"), run.where
        store.unlock(keys_of(store, numbers * 3))
        assert [lane._pins, lane.writing, lane.held, lane.orphans] == [{}] * 4, run.where
        assert put(store, range(20, 30)).ok.sum() == 8
        store.check_invariants()
        store.close()
        filled = None


@pytest.mark.parametrize("file", ["lane.py", "ledger.py"])
def test_an_interrupted_lookup_holds_nothing_and_has_no_result(tmp_path, file):
    with open_store(tmp_path, slots=8) as store:
        put(store, range(4))
        keys, before = keys_of(store, [0, 1, 9]), store.stats()
        for run in runs(lambda n: raise_at(lambda: store.submit_lookup(keys), n, DISK / file, opcodes=True)):
            assert (run.finished, store.stats(), store.poll()) == (False, before, []), run.where
            store.check_invariants()


@pytest.mark.slow
def test_an_interrupted_poll_counts_each_batch_once(tmp_path_factory):
    def polled(n):
        nonlocal filled
        filled = Filled(tmp_path_factory.mktemp("counts"), gated=True)
        filled.submit_all()
        return raise_at(filled.store.poll, n, DISK / "ledger.py", opcodes=is_full())

    filled = expected = None
    for point in (100_000, *range(1, 100_000)):
        run = polled(point)
        filled.store.poll()
        filled.store.check_invariants()
        expected = expected or filled.store.stats()
        assert filled.store.stats() == expected, run.where
        filled.store.close()
        if point < 100_000 and not run.reached:
            return


def test_an_interrupted_store_leaves_no_slot_and_no_batch(tmp_path_factory):
    def submitted(n):
        nonlocal filled
        filled = Filled(tmp_path_factory.mktemp("interrupt"))
        return raise_at(filled.submit("submit_store", [6, 7, 8]), n, DISK)

    filled = None
    for run in runs(submitted, stride=1 if is_full() else 7):
        store = filled.store
        assert store.drain(20)
        store.poll()
        assert (store.stats().num_pending, len(store._lanes[0].writing)) == (0, 0), run.where
        store.close()


class Ends:
    """A queue that has ended batches."""

    def __init__(self, *ended):
        self.ended = list(ended)

    def poll(self, found):
        while self.ended:
            found.append(self.ended[0])
            del self.ended[0]


def waited_for(num_present, num_waiting):
    """Return a ledger and a lane with a store that has ended: of a new key, for which others wait, and present ones."""
    keys = [bytes([n]) * 16 + b"\0" for n in range(num_present + 1)]
    lane = Lane(num_present + 1, {key: slot for slot, key in enumerate(keys[1:])})
    ledger = Ledger(SimpleNamespace(lanes=[lane]), (1,))
    first = Batch(1, keys, "store", [False] + [True] * num_present, places=[0])
    for key in keys[1:]:
        lane.pin(key)
        first.present.append(key)
    lane.take(keys[0])
    ledger.begin(first)
    for ticket in range(2, 2 + num_waiting):
        ledger.begin(Batch(ticket, keys[:1], "store", [False], num_shared=1), [(keys[0], 0)])
    return ledger, lane


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("num_present", "num_waiting"), [(3, 0), (0, 3)])
def test_a_store_that_ends_without_memory_ends_once(num_present, num_waiting, count):
    def collected(n):
        nonlocal ledger, lane, queue
        (ledger, lane), queue = waited_for(num_present, num_waiting), Ends((1, [0]))
        return fail_allocation(lambda: ledger.collect(queue), n, count=count)

    ledger = lane = queue = None
    for run in runs(collected):
        ledger.collect(queue)
        assert sorted(done.ticket for done in ledger.take_ready()) == list(range(1, 2 + num_waiting)), run.where
        stats = ledger.stats(0)
        assert (stats.num_stored, stats.num_pending) == (1 + num_present + num_waiting, 0), run.where
        lane.check_invariants()
        assert not lane._pins
