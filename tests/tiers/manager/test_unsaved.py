"""Entries that a store fails to take, and that are written again when their prefix is used again."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagecore.tiers.manager.writing import writes
from pagecore.tiers.manager.writing.unsaved import PAUSE_SECONDS, Unsaved
from tests.tiers.blocks import random_keys
from tests.tiers.manager.request_world import PROMPT, chain_of, lane_keys
from tests.tiers.manager.served import BLOCK, Served
from tests.tiers.memory_store import MemoryStore

LONGER = np.append(PROMPT[:24], np.arange(500, 509, dtype=np.int32))


def prefix(tokens, start, stop, spans=None):
    return SimpleNamespace(tokens=tokens, namespace=None, spans=spans, start=start, stop=stop)


def end_all(w, fails=()):
    """End the open batches of the first store; the stores that it is asked for fail at the indices in `fails`."""
    for store in w.stores:
        while store.batches:
            kind, keys, _ = next(iter(store.batches.values()))
            store.finish(fails=[index for index in range(len(keys)) if kind == "store" and index in fails])
    w.side.poll()


def names(tokens, begin, end):
    return {bytes(key) for key in lane_keys(chain_of(tokens)[begin:end], 0)}


@pytest.mark.parametrize("refuses", [False, True])
def test_the_beginning_of_a_prefix_is_written_with_what_continues_it(world, refuses):
    w = world()
    w.host.fill(LONGER)
    w.stores[0].refuses = OSError("gone") if refuses else None
    w.side.write([prefix(LONGER, 0, 24)])
    end_all(w, fails=range(6))
    assert not w.stores[0].entries
    w.stores[0].refuses = None
    w.clock.now += PAUSE_SECONDS
    w.side.write([prefix(LONGER, 24, 32)])
    order = [keys for kind, keys, _ in w.stores[0].batches.values()]
    assert set(order[0]) == names(LONGER, 0, 6)  # first, for a store that takes no end of a prefix alone
    end_all(w)
    assert set(w.stores[0].entries) == names(LONGER, 0, 8)
    assert not w.side.has_unsaved


def test_only_what_failed_is_written_again_and_only_to_the_store_that_failed(world):
    w = world(2)
    w.host.fill(PROMPT)
    w.side.write([prefix(PROMPT, 0, 24)])
    w.stores[0].finish(fails=[2, 4])
    end_all(w)
    w.clock.now += PAUSE_SECONDS
    w.side.write_again(PROMPT[:24], None, None)
    assert not w.stores[1].batches
    ((_, keys, _),) = w.stores[0].batches.values()
    assert set(keys) == names(PROMPT, 2, 3) | names(PROMPT, 4, 5)
    end_all(w)
    assert w.stores[0].entries == w.stores[1].entries


def test_a_failure_pauses_before_the_next_try(world):
    w = world()
    w.host.fill(PROMPT)
    w.side.write([prefix(PROMPT, 0, 24)])
    end_all(w, fails=range(6))
    w.side.write_again(PROMPT[:24], None, None)
    assert not w.stores[0].batches
    for _ in range(2):
        w.clock.now += PAUSE_SECONDS
        w.side.write_again(PROMPT[:24], None, None)
        assert len(w.stores[0].batches) == 1
        w.side.write_again(PROMPT[:24], None, None)
        end_all(w, fails=range(6))


def test_what_the_host_has_lost_is_not_written_again(world):
    w = world(slots=4)
    w.host.fill(PROMPT, stop=16)
    w.side.write([prefix(PROMPT, 0, 16)])
    end_all(w, fails=range(4))
    assert w.host.evict(0, 2)  # the first two
    w.clock.now += PAUSE_SECONDS
    w.side.write_again(PROMPT[:16], None, None)
    end_all(w)
    assert not w.stores[0].entries
    assert w.side.has_unsaved


@pytest.mark.parametrize("fault", ["error", "raise"])
def test_a_prompt_that_is_used_again_reaches_a_store_that_was_away(fault, monkeypatch):
    monkeypatch.setattr("pagecore.tiers.manager.writing.unsaved.PAUSE_SECONDS", 0.0)
    store = MemoryStore()
    prompt = list(range(6 * BLOCK + 1))
    with Served([store], num_blocks=30, host_blocks=30) as served:
        store.inject("store", fault)
        served.compute(prompt)
        served.tiers.drain()
        assert not store.data
        served.compute(prompt)
        served.tiers.drain()
        assert len(store.data) == 6


def test_the_oldest_failures_are_forgotten():
    now = [0.0]
    unsaved = Unsaved(lambda: now[0], max_keys=4)
    keys = random_keys(6)
    unsaved.note(keys[:3], np.zeros(3, np.bool_))
    unsaved.note(keys[:1], np.zeros(1, np.bool_))  # counts as new
    unsaved.note(keys[3:], np.array([False, True, False]))
    assert len(unsaved) == 4
    assert not unsaved.due(keys).any()
    now[0] = PAUSE_SECONDS
    assert unsaved.due(keys).tolist() == [True, False, True, True, False, True]
    unsaved.note(keys, np.ones(6, np.bool_))
    assert not unsaved


def test_a_batch_that_cannot_be_made_leaves_no_pin(world, monkeypatch):
    w = world(2, chunk_bytes=256)
    w.host.fill(PROMPT)
    concatenate, left = np.concatenate, [0]

    def fails(arrays):
        left[0] -= 1
        if not left[0]:
            raise MemoryError("planted")
        return concatenate(arrays)

    for planted in range(1, 8):
        left[0] = planted
        with monkeypatch.context() as patch:
            patch.setattr(writes.np, "concatenate", fails)
            with pytest.raises(MemoryError, match="planted"):
                w.side.write([prefix(PROMPT, 0, 24)])
        end_all(w)
        assert w.side._writer.num_pins == 0
        assert not w.side._writer._touches
