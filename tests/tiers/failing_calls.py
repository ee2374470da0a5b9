"""Calls of tiers for tests in which memory runs out: what a prompt reuses afterwards has the right bytes."""

import gc
import select
import tempfile
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from pagecore.tiers.disk._io import IoQueue
from tests.failing_calls import Case
from tests.faults import is_full
from tests.tiers.disk.kit import Memory, finish, get, keys_of, open_store, put
from tests.tiers.host.test_stream_faults import PROMPT, deliver, stage
from tests.tiers.manager.served import BLOCK, WINDOWED, Served, vectors

# Prompts of the host and of the device.
OTHER, LONG = PROMPT + 1000, np.arange(53, dtype=np.int32)


class HostState:
    """A sequence of which the host has nothing, and a prompt that the host has and the device has evicted."""

    def __init__(self, *, is_exclusive=False, **options):
        self.served = Served(**{"num_blocks": 30, "host_blocks": 48, **options})
        self.cache, self.host = self.served.cache, self.served.tiers.host
        self.host.is_exclusive = is_exclusive
        self.served.compute(LONG)
        self.host.clear()
        self.sequence = self.cache.add_sequence(LONG)
        self.served.compute(OTHER)
        self.cache.evict_prefix(OTHER)
        self.held = []

    def signature(self):
        """Raise AssertionError if anything is inconsistent, is held, or has wrong bytes."""
        for one in self.held:
            one.release()
        self.held.clear()
        gc.collect()
        self.host.poll()
        self.served.tiers.check_invariants()
        self.host.backup(self.sequence)
        if self.host.num_blocks[0] > 13:
            assert self.host.match_both(LONG)[1] == self.sequence.num_cached_tokens
        self.cache.remove(self.sequence)
        for prompt in (OTHER, LONG):
            self.served.compute(prompt)  # compares what is reused
        assert (self.host.num_leases, self.host.num_holds, self.cache.stats().num_sequences) == (0, 0, 0)
        self.served.close()


class CollectedState(HostState):
    """A hold that was made while the collector collected others, after it had cleared the references to them."""

    def __init__(self):
        super().__init__()
        self.made = []
        first, last = SimpleNamespace(), SimpleNamespace()
        first.cycle, first.last = first, last
        first.holds = [self.host.hold(OTHER) for _ in range(8)]
        last.watched = type("Watched", (), {})()
        watch = weakref.ref(last.watched, lambda _: self.made.append(self.host.hold(OTHER)))
        del first, last
        gc.collect()
        assert watch() is None
        assert len(self.made) == 1

    def collect(self):
        """Collect the hold; the list is an allocation that may fail."""
        self.made.clear()
        return [0] * 1000


def adopt(state):
    """Load the beginning of a prompt, as from a store."""
    lease = state.host.reserve([np.arange(5)] * state.host.num_lanes)
    state.held.append(lease)
    for layer in range(len(state.served.layers)):
        rows = vectors(LONG + 500, None, layer)[: 5 * BLOCK].reshape(5, BLOCK, 1, -1)
        state.host.kv_pools[0].plane("key", layer).numpy()[lease.blocks[0]] = rows
        state.host.kv_pools[0].plane("value", layer).numpy()[lease.blocks[0]] = -rows
    state.host.adopt(lease, LONG[: 5 * BLOCK] + 500)


def hold(state):
    held = state.host.hold(OTHER)
    state.held.append(held)
    held.entries(0)


HOST_CALLS = {
    "promote": lambda state: state.host.promote(OTHER),
    "match_both": lambda state: state.host.match_both(OTHER),
    "backup": lambda state: state.host.backup(state.sequence),
    "spill": lambda state: state.host.spill([9] * state.host.num_groups),
    "spill everything": lambda state: state.host.spill([30] * state.host.num_groups),
    "publish_spilled": lambda state: (state.host.spill([9] * state.host.num_groups), state.host.publish_spilled()),
    "hold": hold,
    "reserve": lambda state: state.held.append(state.host.reserve([np.arange(9)] * state.host.num_lanes)),
    "adopt": adopt,
    "make_room": lambda state: state.host.make_room([30] * state.host.num_lanes),
    "evict_prefix": lambda state: state.host.evict_prefix(OTHER, keep=8),
    "revoke_prefix": lambda state: state.host.revoke_prefix(OTHER, valid=9),
    "clear": lambda state: state.host.clear(),
}
STREAM_CALLS = {"stage": stage, "deliver": deliver}
# Calls of other hosts, if not all are tried.
WITH_WINDOWS = {"promote", "backup", "spill", "hold"}
EXCLUSIVE = {"promote", "spill everything", "publish_spilled"}


class DiskState:
    """A disk store with a few entries, and the tickets of the batches that were submitted."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(Path(self.folder.name), threads=1)
        put(self.store, range(5))
        self.memory, self.sent = Memory(9), []

    def submit(self, name, numbers):
        keys = keys_of(self.store, numbers)
        pieces = [] if name == "submit_remove" else [self.memory.fill(keys).pieces[: len(keys)]]
        self.sent.append(getattr(self.store, name)(keys, *pieces))

    def signature(self):
        """Return which entries there are once everything has ended; each has its bytes."""
        with self.store as store:
            for ticket in self.sent:
                finish(store, ticket)
            assert store.drain(20)
            found = get(store, range(9)).ok.tolist()
            store.check_invariants()
        self.folder.cleanup()
        return found


def look_up(state):
    state.sent.append(state.store.submit_lookup(keys_of(state.store, range(3))))


DISK_CALLS = {
    "submit_store": lambda state: state.submit("submit_store", range(5, 9)),
    "submit_load": lambda state: state.submit("submit_load", range(5)),
    "submit_lookup": look_up,
    "submit_remove": lambda state: state.submit("submit_remove", range(2)),
    "open another": lambda state: open_store(Path(state.folder.name) / "other", threads=2).close(),
    "reads": lambda state: (state.store.has(keys_of(state.store, range(9))), state.store.keys(), state.store.stats()),
}


class QueueState:
    """An I/O queue with three batches that have ended, and that no call has returned."""

    def __init__(self):
        self.queue, self.found = IoQueue(1), None
        for ticket in range(3):
            self.queue.submit_erase(ticket, [])
        assert self.queue.drain(20)

    def poll(self):
        self.found = self.queue.poll()

    def signature(self):
        """Return every batch in the order of the ends."""
        readable, _, _ = select.select([self.queue.fileno()], [], [], 0)
        assert (self.found is None) == bool(readable)
        self.queue.check_invariants()
        found = [*(self.found or []), *self.queue.poll()]
        self.queue.close()
        return found


QUEUE_CALLS = {
    "poll": lambda state: state.poll(),
    "new": lambda state: IoQueue(3).close(),
}

CASES = {
    **{f"host: {name}": Case(HostState, call, checks_itself=True) for name, call in HOST_CALLS.items()},
    **{
        f"host with windows: {name}": Case(
            partial(HostState, layers=WINDOWED, host_blocks=(48, 30)), call, checks_itself=True
        )
        for name, call in HOST_CALLS.items()
        if call is not adopt and (is_full() or name in WITH_WINDOWS)
    },
    **{
        f"exclusive host: {name}": Case(partial(HostState, is_exclusive=True, host_blocks=20), call, checks_itself=True)
        for name, call in HOST_CALLS.items()
        if is_full() or name in EXCLUSIVE
    },
    **{
        f"host: {name}": Case(
            partial(HostState, host_blocks=9), lambda state, call=call: call(state.served)(), checks_itself=True
        )
        for name, call in STREAM_CALLS.items()
    },
    "host: collect holds": Case(CollectedState, lambda state: state.collect(), checks_itself=True),
    **{f"queue: {name}": Case(QueueState, call) for name, call in QUEUE_CALLS.items()},
    # The entries go first: a removal that has no memory for its end may be found again.
    **{
        f"disk: {name}": Case(DiskState, call, may_be_done=name == "submit_remove") for name, call in DISK_CALLS.items()
    },
}
