"""Tiers.clear: the prefixes of some media go, and everything else stays."""

from threading import Thread

import numpy as np
import pytest

from pagecore.errors import StoreError, UnsupportedOption
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.manager.stores import StoreSide
from pagecore.tiers.manager.tiers import Tiers
from pagecore.tiers.store import KEY_BYTES
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

PROMPTS = [np.arange(first, first + 33, dtype=np.int32) for first in (0, 100)]
LENGTH = 32


class Lister(MemoryStore):
    """A store that lists its entries, or fails to if `fault` is given."""

    can_list = True
    fault = None

    def keys(self):
        if self.fault is not None:
            return self.fault()
        return np.frombuffer(b"".join(self.data), np.uint8).reshape(-1, KEY_BYTES)


class Keeper(Lister):
    """A store that lists its entries and deletes none."""

    def __init__(self, **options):
        super().__init__(**options)
        self.can_remove = False


def gone():
    raise OSError("the disk is gone")


def let_go(store, monkeypatch):
    """Let hanging batches of a store end once the tiers wait for one."""
    wait = StoreSide.wait

    def release_and_wait(side, timeout):
        store.release()
        wait(side, timeout)

    monkeypatch.setattr(StoreSide, "wait", release_and_wait)


@pytest.fixture
def disk(tmp_path):
    return lambda fingerprint: DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20)


def there(served, prompt, media):
    """Return the tokens that device, host and the stores of some media have of a prompt."""
    found = served.tiers.wait(served.tiers.lookup(prompt, deadline=20.0, media=media))
    found.release()
    return found.num_device_tokens, found.num_host_tokens, found.num_found_tokens


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("media", [(), ["GPU"], ["CPU"], ("GPU", "CPU"), {"DISK"}, ["GPU", "CPU", "DISK"]])
def test_only_the_media_that_are_named_are_cleared(disk, layers, media):
    with Served([disk], layers=layers, num_blocks=40, host_blocks=40) as served:
        for prompt in PROMPTS:
            served.serve(prompt)
        freed = served.tiers.clear(media)
        assert served.tiers.drain(20)
        each = len(PROMPTS) * LENGTH // BLOCK
        num_cleared = len({"GPU", "CPU"} & set(media))
        assert (freed > 0) == (num_cleared > 0)
        assert freed >= each * num_cleared
        left = {"GPU", "CPU", "DISK"} - set(media)
        for prompt in PROMPTS:
            device, host, found = there(served, prompt, ["DISK"])
            assert (device, host) == (LENGTH * ("GPU" in left), LENGTH * ("CPU" in left))
            assert found == LENGTH * bool(left)
        assert (served.tiers.stores[0].keys().shape[0] > 0) == ("DISK" in left)
        served.tiers.check_invariants()
        for prompt in PROMPTS:
            served.serve(prompt)  # which compares what is reused


def test_by_default_device_and_host_are_cleared(disk):
    with Served([disk], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        assert served.tiers.clear() == 2 * LENGTH // BLOCK
        assert there(served, PROMPTS[0], ()) == (0, 0, 0)
        assert served.serve(PROMPTS[0]).loaded_tokens == {"DISK": LENGTH}


def test_what_sequences_and_pins_use_stays(disk):
    with Served([disk], num_blocks=40, host_blocks=40) as served:
        for prompt in PROMPTS:
            served.serve(prompt)
        running = served.tiers.add_sequence(PROMPTS[0])
        with served.tiers.host.hold(PROMPTS[1]):
            served.tiers.clear(["GPU", "CPU", "DISK"])
            assert served.tiers.drain(20)
            assert [there(served, prompt, ["DISK"])[:2] for prompt in PROMPTS] == [(LENGTH, 0), (0, LENGTH)]
        served.verify(running, PROMPTS[0], None, LENGTH)
        served.cache.remove(running)


def test_requests_that_have_ended_pin_nothing(disk):
    with Served([disk]) as served:
        served.serve(PROMPTS[0])
        served.tiers.wait(served.tiers.request(PROMPTS[0]))  # not released
        served.tiers.clear()
        assert served.tiers.host.num_available == served.tiers.host.num_blocks[0] - 1
        assert served.tiers.host.stats().num_cached_blocks == 0


def test_what_is_being_saved_is_cleared_as_well(monkeypatch):
    store = Lister(medium="DISK", manual=True)
    let_go(store, monkeypatch)
    with Served([store]) as served:
        served.serve(PROMPTS[0])
        assert [each.kind for each in store.hanging] == ["store"]
        served.tiers.clear(["DISK"])
        served.flush()
        assert not store.data
        assert store.stats().num_removed > 0


def test_what_another_thread_saves_while_the_call_waits_is_cleared_as_well(monkeypatch):
    store = Lister(medium="DISK", manual=True)
    let_go(store, monkeypatch)
    drain, late = Tiers.drain, [PROMPTS[1]]

    def drain_and_serve(tiers, timeout=None):
        ended = drain(tiers, timeout)
        if late:
            served.compute(late.pop())  # as another thread can before the call takes the lock
        return ended

    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        monkeypatch.setattr(Tiers, "drain", drain_and_serve)
        served.tiers.clear(["DISK"])
        served.flush()
        assert not late
        assert not store.data


def test_the_lock_is_free_while_the_call_waits_for_what_another_thread_saves(monkeypatch):
    store = Lister(medium="DISK")
    drain, wait, late, free = Tiers.drain, StoreSide.wait, [PROMPTS[1]], []

    def drain_and_serve(tiers, timeout=None):
        ended = drain(tiers, timeout)
        if late:
            served.compute(late.pop())
        return ended

    def see_lock_and_wait(side, timeout):
        other = Thread(target=served.cache.match_length, args=(PROMPTS[0],), daemon=True)
        other.start()
        other.join(2.0)
        free.append(not other.is_alive())
        store.release()
        wait(side, timeout)

    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        store.manual = True
        monkeypatch.setattr(Tiers, "drain", drain_and_serve)
        monkeypatch.setattr(StoreSide, "wait", see_lock_and_wait)
        served.tiers.clear(["DISK"])
        served.tiers.revoke_prefix(PROMPTS[1])
        served.flush()
        assert not late
        assert free
        assert all(free)


def test_requests_that_end_while_the_call_waits_are_returned_by_the_next_poll(monkeypatch):
    store = Lister(manual=True)
    with Served([store]) as served:
        request = served.tiers.request(PROMPTS[0])
        let_go(store, monkeypatch)
        served.tiers.clear(())
        assert request.has_ended
        other = served.tiers.wait(served.tiers.request(PROMPTS[1]), 20.0)  # which returns only its own
        assert other.has_ended
        assert served.tiers.poll() == [request]
        assert served.tiers.poll() == []


@pytest.mark.parametrize("fault", [gone, list, lambda: np.zeros((3, 16), np.uint8), lambda: None])
def test_nothing_is_evicted_if_a_store_cannot_list_its_entries(disk, fault):
    store = Lister(medium="DISK", name="tape")
    with Served([disk, store], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        store.fault = fault
        with pytest.raises(StoreError, match=r"tape cannot list its entries.*nothing was evicted"):
            served.tiers.clear(["GPU", "CPU", "DISK"])
        assert there(served, PROMPTS[0], ["DISK"]) == (LENGTH, LENGTH, LENGTH)
        assert len(served.tiers.stores[0].keys()) == len(store.data) > 0


def test_entries_that_a_store_keeps_are_an_error(disk):
    store = Lister(medium="DISK", name="tape")
    with Served([disk, store], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        count = len(store.data)
        store.inject("remove", "error")
        with pytest.raises(StoreError, match=rf"tape has kept {count} of {count} entries \(injected\)"):
            served.tiers.clear(["GPU", "DISK"])
        assert there(served, PROMPTS[0], ())[:2] == (0, LENGTH)
        assert len(served.tiers.stores[0].keys()) == 0, "the other store is cleared all the same"
        assert len(store.data) == count
        served.tiers.clear(["DISK"])
        assert not store.data


def test_a_store_without_a_client_is_an_error_before_anything_is_evicted():
    store = Lister(medium="DISK")
    guard = Guard(store)
    with Served([guard]) as served:
        served.serve(PROMPTS[0])
        guard._core.store = None  # as while `reopen` makes a new client
        with pytest.raises(StoreError, match="memory is being reopened or was closed; clear again"):
            served.tiers.clear(["GPU", "DISK"])
        with pytest.raises(StoreError, match="memory is being reopened"):
            guard.keys()
        guard._core.store = store
        assert there(served, PROMPTS[0], ()) == (LENGTH, LENGTH, LENGTH)


def test_an_error_of_a_guard_that_loses_its_client_meanwhile_comes_out_once(monkeypatch):
    guard = Guard(Lister(medium="DISK"))
    with Served([guard]) as served:
        served.serve(PROMPTS[0])
        drain, store = Tiers.drain, guard.store

        def drain_and_lose(tiers, timeout=None):
            ended = drain(tiers, timeout)
            guard._core.store = None  # as while `reopen` makes a new client
            return ended

        with monkeypatch.context() as patch:
            patch.setattr(Tiers, "drain", drain_and_lose)
            with pytest.raises(StoreError) as caught:
                served.tiers.clear(["GPU", "DISK"])
        guard._core.store = store
        assert str(caught.value) == (
            "the store memory is being reopened or was closed; nothing was evicted: clear again later, or leave DISK "
            "out of media"
        )


def test_tiers_that_another_thread_closes_before_a_store_answers_say_what_is_kept(monkeypatch):
    store = Lister(medium="DISK", name="tape")
    served = Served([store])
    served.serve(PROMPTS[0])
    count = len(store.data)
    store.inject("remove", "hang")
    side = served.tiers._stores
    held = side.held

    def close_first():
        side.held = held
        side.close(0.0)  # as another thread can that takes the lock first
        return held()

    def close_before_the_next_look(_side, _timeout):
        monkeypatch.undo()
        side.held = close_first

    monkeypatch.setattr(StoreSide, "wait", close_before_the_next_look)
    with pytest.raises(StoreError, match=rf"tape has kept {count} of {count} entries.*everything else.*is cleared"):
        served.tiers.clear(["GPU", "DISK"])
    assert served.tiers.host.match_both(PROMPTS[0]) == (0, LENGTH)
    served.tiers.close()


def test_an_open_breaker_is_an_error():
    store = Lister(medium="DISK")
    guard = Guard(store, deadline=Deadline(20.0), breaker=Breaker(failures=1))
    with Served([guard], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        count = len(store.data)
        store.inject("lookup", "raise")
        served.serve(PROMPTS[1])
        assert guard.health().breaker == "open"
        with pytest.raises(StoreError, match=f"memory has kept {count} of {count} entries.*breaker is open"):
            served.tiers.clear(["GPU", "CPU", "DISK"])
        assert len(store.data) == count > 0
        assert there(served, PROMPTS[0], ())[:2] == (0, 0)


def test_cpu_names_stores_of_that_medium_as_well():
    store = Lister(medium="CPU")
    with Served([store]) as served:
        served.serve(PROMPTS[0])
        assert store.data
        served.tiers.clear(["GPU"])
        assert store.data
        served.tiers.clear(["CPU"])
        assert not store.data


@pytest.mark.parametrize("other", [MemoryStore(medium="CPU"), Keeper(medium="CPU")], ids=["cannot list", "keeps all"])
def test_stores_of_medium_cpu_that_cannot_be_cleared_stay_as_they_are(other):
    lister = Lister(medium="CPU")
    with Served([other, lister]) as served:
        served.serve(PROMPTS[0])
        count = len(other.data)
        assert served.tiers.clear() == 2 * LENGTH // BLOCK
        assert len(other.data) == count > 0
        assert not lister.data
        assert there(served, PROMPTS[0], ()) == (0, 0, 0)


def test_a_prefix_that_the_host_keeps_is_written_again_by_a_save(disk):
    with Served([disk], num_blocks=40, host_blocks=40) as served:
        served.serve(PROMPTS[0])
        served.tiers.clear(["DISK"])
        served.serve(PROMPTS[0])
        served.flush()
        assert len(served.tiers.stores[0].keys()) == 0
        with served.tiers.add_sequence(PROMPTS[0]) as sequence:
            served.cache.commit(served.cache.prepare([sequence], 1))
            served.tiers.save(sequence)
        served.flush()
        assert there(served, PROMPTS[0], ["DISK"]) == (LENGTH, LENGTH, LENGTH)
        assert len(served.tiers.stores[0].keys()) == LENGTH // BLOCK


def test_a_store_that_cannot_be_cleared_is_refused_before_anything_is_evicted(disk):
    with Served([disk, MemoryStore()]) as served:
        served.serve(PROMPTS[0])
        with pytest.raises(UnsupportedOption, match="memory"):
            served.tiers.clear(["GPU", "CPU", "DISK", "EXTERNAL"])
        assert there(served, PROMPTS[0], ["DISK"]) == (LENGTH, LENGTH, LENGTH)
        served.tiers.clear(["DISK"])  # the other one is not named
        served.flush()
        assert len(served.tiers.stores[0].keys()) == 0


@pytest.mark.parametrize(
    ("store", "options", "reason"),
    [
        (Lister, {"read_only": True}, "its guard is read-only; clear it in a process that writes it"),
        (MemoryStore, {}, "it does not list its entries; clear it by its own tools"),
        (Keeper, {}, "it does not delete entries on request; clear it by its own tools"),
    ],
)
def test_a_refusal_has_its_reason(store, options, reason):
    guard = Guard(store(medium="DISK", name="tape"), **options)
    refused = f"the store tape cannot be cleared: {reason}, or leave DISK out"
    with Served([guard]) as served, pytest.raises(UnsupportedOption, match=refused):
        served.tiers.clear(["GPU", "DISK"])


@pytest.mark.parametrize("media", ["GPU", None, 3, ["TAPE"], [7]])
def test_other_media_are_refused(media):
    with Served() as served:
        served.serve(PROMPTS[0])
        with pytest.raises(UnsupportedOption, match="media"):
            served.tiers.clear(media)
        assert there(served, PROMPTS[0], ()) == (LENGTH, LENGTH, LENGTH)


def test_closed_tiers_are_refused():
    served = Served()
    served.close()
    with pytest.raises(UnsupportedOption, match="closed"):
        served.tiers.clear()
