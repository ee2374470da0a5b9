"""Tiers.evict_prefix: one prefix leaves the device, the host and the stores, and others keep what they continue."""

import numpy as np
import pytest

from pagecore import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.manager.stores import StoreSide
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.blocks import Blocks, random_keys
from tests.tiers.manager.served import LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

SYSTEM = np.arange(12, dtype=np.int32)
CHAT, OTHER = (np.append(SYSTEM, np.arange(first, first + 20, dtype=np.int32)) for first in (100, 200))


def asked(served, tokens, **options):
    """Return the tokens that device, host and stores have of a prefix."""
    longer = np.append(tokens, 0)
    request = served.tiers.wait(served.tiers.request(longer, deadline=10, **options))
    served.tiers.poll()
    request.release()
    return served.cache.match_length(longer, **options)


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    return lambda fingerprint: DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20)


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
def test_a_prefix_leaves_device_host_and_stores(store, layers):
    with Served([store], layers=layers, num_blocks=40, host_blocks=40) as served:
        for tokens in (CHAT, OTHER):
            served.serve(tokens)
        served.flush()
        assert served.tiers.evict_prefix(CHAT) >= 10  # five blocks on the device and in the host
        served.tiers.drain(10)
        assert (asked(served, CHAT), asked(served, OTHER)) == (12, 32)
        served.forget()
        assert asked(served, OTHER) == 32  # its system prompt is still in the stores
        served.forget()
        assert asked(served, CHAT) == 12
        stats = next(iter(served.tiers.stats().requests.stores.values()))
        assert stats.num_removed == 5 * len(served.tiers.host.payload_bytes)


@pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 4), (4, 4), (17, 20), (31, 32), (99, 32)])
def test_tokens_that_are_kept_stay_everywhere(store, keep, left):
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        served.flush()
        assert served.tiers.evict_prefix(np.append(CHAT, [5, 6, 7]), keep=keep) == 2 * (32 - left) // 4
        served.tiers.drain(10)
        assert asked(served, CHAT) == left
        served.forget()
        assert asked(served, CHAT) == left


def test_a_prefix_that_only_the_stores_have_is_deleted(store):
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT, namespace="tenant")
        served.flush()
        served.forget()
        assert served.tiers.evict_prefix(CHAT, keep=8) == 0
        served.tiers.drain(10)
        assert asked(served, CHAT, namespace="tenant") == 32  # of another namespace
        served.forget()
        assert served.tiers.evict_prefix(CHAT, keep=8, namespace="tenant") == 0
        served.tiers.drain(10)
        assert asked(served, CHAT, namespace="tenant") == 8


def test_a_prefix_that_is_being_saved_stays_in_host_and_stores():
    store = MemoryStore(manual=True)
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.compute(CHAT)
        served.tiers.poll()
        assert [each.kind for each in store.hanging] == ["store"]
        assert served.tiers.evict_prefix(CHAT) == 8  # the host's blocks are being read
        assert served.tiers.evict_prefix(CHAT) == 0
        store.manual = False
        store.release()
        assert served.tiers.drain(10)
        assert len(store.data) == 8
        assert served.tiers.evict_prefix(CHAT) == 8
        assert served.tiers.drain(10)
        assert not store.data


def test_a_prefix_in_use_stays_in_the_stores():
    store = MemoryStore()
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        served.flush()
        with served.cache.add_sequence(CHAT):
            assert served.tiers.evict_prefix(CHAT) == 9
            served.tiers.drain(10)
            assert len(store.data) == 7  # the sequence uses what it has matched
        served.flush()  # what the sequence had was copied once more
        assert served.tiers.evict_prefix(CHAT) == 14
        served.tiers.drain(10)
        assert not store.data


@pytest.mark.parametrize("fault", ["error", "raise", "hang"])
def test_a_store_that_fails_keeps_its_entries_and_nothing_else(fault):
    store = MemoryStore()
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        served.flush()
        store.inject("remove", fault)
        assert served.tiers.evict_prefix(CHAT) == 16
        if fault == "hang":
            assert not served.tiers.drain(0.01)
            store.release(fault="error")
        assert served.tiers.drain(10)
        assert len(store.data) == 8
        served.tiers.check_invariants()
        assert asked(served, CHAT) == 32


def test_a_store_without_deletions_is_left_alone():
    store = MemoryStore()
    store.can_remove = False
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        served.flush()
        assert served.tiers.evict_prefix(CHAT) == 16
        assert served.tiers.drain(10)
        assert (len(store.data), store.stats().num_removed) == (8, 0)


def test_a_removal_waits_for_what_is_being_saved():
    store = MemoryStore(manual=True)
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.compute(CHAT)
        served.tiers.poll()
        assert served.tiers.evict_prefix(OTHER) == 0
        assert [each.kind for each in store.hanging] == ["store"]
        store.release()
        served.tiers.poll()
        assert [each.kind for each in store.hanging] == ["remove"]
        store.release()


def test_a_removal_that_waits_ends_when_the_store_closes():
    store, ends = MemoryStore(manual=True), []
    port = StorePort(store, 0, None)
    keys, pieces = random_keys(2), Blocks(2, 100).pieces()
    port.save(keys, pieces, lambda ok, error: ends.append(("save", ok.tolist(), error)))
    port.remove(keys, lambda ok, error: ends.append(("remove", ok.tolist(), error)))
    assert port.num_pending == 2
    port.close()
    assert ends == [(kind, [False, False], "the store was closed") for kind in ("remove", "save")]
    assert port.num_pending == 0


@pytest.mark.parametrize("raises", ["poll", "close", "ended"])
def test_closing_goes_on_after_an_error(monkeypatch, raises):
    store, ends = MemoryStore(manual=True), []
    port = StorePort(store, 0, None)
    keys, pieces = random_keys(2), Blocks(2, 100).pieces()

    def ended(ok, _):
        ends.append(ok.tolist())
        if raises == "ended":
            raise ArithmeticError(raises)

    def broken():
        raise ArithmeticError(raises)

    port.save(keys, pieces, ended)
    port.save(keys, pieces, ended)
    port.remove(keys, ended)
    monkeypatch.setattr(store, "submit_load", lambda *_: 1 / 0)
    port.load(keys, pieces, ended)
    assert (port.num_pending, ends) == (4, [])
    closed, close = [], store.close
    monkeypatch.setattr(store, "close", lambda: closed.append(close()))
    if raises != "ended":
        monkeypatch.setattr(store, raises, broken)
    with pytest.raises(ArithmeticError, match=raises):
        port.close()
    if raises == "close":
        close()
    assert (len(closed), ends) == (raises != "close", [[False, False]] * 4)
    assert port.num_pending == 0


def test_invalid_arguments_are_refused_before_anything_is_evicted():
    with Served([MemoryStore()], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        for options, error in [
            ({"keep": -1}, ShapeError),
            ({"keep": 1.5}, ShapeError),
            ({"namespace": []}, UnsupportedDtype),
            ({"spans": 3}, ShapeError),
            ({"spans": [(5, 2, b"x")]}, ShapeError),
            ({"cross_digest": "x"}, UnsupportedDtype),
        ]:
            with pytest.raises(error):
                served.tiers.evict_prefix(CHAT, **options)
        assert served.cache.match_length(np.append(CHAT, 0)) == 32
        tiers = served.tiers
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.evict_prefix(CHAT)


def test_a_load_that_another_thread_begins_during_a_revocation_brings_no_revoked_block_back(monkeypatch):
    store = MemoryStore()
    with Served([store], num_blocks=40, host_blocks=40) as served:
        served.serve(CHAT)
        served.forget()
        store.manual = True
        drain, wait, requests = Tiers.drain, StoreSide.wait, []

        def drain_and_request(tiers, timeout=None):
            ended = drain(tiers, timeout)
            if not requests:
                requests.append(tiers.request(CHAT))  # as another thread can before the call takes the lock
                while requests[0].state == "searching":
                    store.release()
                    tiers.poll()
            return ended

        def release_and_wait(side, timeout):
            store.release()
            wait(side, timeout)

        monkeypatch.setattr(Tiers, "drain", drain_and_request)
        monkeypatch.setattr(StoreSide, "wait", release_and_wait)
        served.tiers.revoke_prefix(CHAT)
        served.flush()
        assert requests[0].has_ended
        requests[0].release()
        assert served.tiers.match_length(CHAT) == 0
        assert not store.data
