"""Tiers over a cache with bytes: prompts that device and host have forgotten come back from stores."""

import threading

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Guard
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served
from tests.tiers.memory_store import MemoryStore

PROMPT = np.arange(33, dtype=np.int32)


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
def test_a_forgotten_prompt_comes_back_from_a_store(layers):
    with Served([MemoryStore(medium="DISK")], layers=layers) as served:
        first = served.serve(PROMPT)
        assert (first.num_tokens, served.computed) == (0, 33)
        served.forget()
        again = served.serve(PROMPT)
        assert (again.num_tokens, again.loaded_tokens, again.error) == (32, {"DISK": 32}, None)
        assert (served.reused, served.computed) == (32, 34)
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": 0, "DISK": 32}


def test_a_forgotten_prompt_of_the_device_comes_back_from_the_host():
    with Served() as served:
        served.serve(PROMPT)
        served.cache.clear_prefix_cache()
        request = served.serve(PROMPT)
        assert (request.state, request.num_host_tokens, request.num_device_tokens) == ("ready", 32, 0)
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": 32}
        served.serve(PROMPT)
        assert served.tiers.stats().hit_tokens == {"GPU": 32, "CPU": 32}


def test_a_look_up_finds_what_a_request_would_bring():
    with Served([MemoryStore(medium="DISK"), MemoryStore()], min_tokens=64) as served:
        served.serve(PROMPT)
        served.forget()
        for media, found in ((None, 32), (["EXTERNAL"], 32), ([], 0), (["CPU"], 0)):
            request = served.tiers.wait(served.tiers.lookup(np.append(PROMPT[:32], 7), deadline=20, media=media))
            assert (request.num_found_tokens, request.num_tokens, request.loaded_tokens) == (found, 0, {})
        assert served.tiers.match_length(PROMPT) == served.tiers.stats().requests.loaded_tokens.get("DISK", 0) == 0


def test_two_processes_share_a_store():
    data = {}
    with Served([MemoryStore(data=data)]) as writer:
        writer.serve(PROMPT)
        writer.serve(PROMPT[:17], namespace="tenant")
        writer.flush()
    with Served([MemoryStore(data=data)]) as reader:
        assert reader.serve(PROMPT).num_tokens == 32
        assert reader.serve(PROMPT, namespace="tenant").num_tokens == 16


def test_nothing_is_written_to_read_only_stores():
    shared, near = {}, {}
    with Served([MemoryStore(data=shared)]) as writer:
        writer.serve(PROMPT)
        writer.flush()
    before = dict(shared)
    stores = [MemoryStore(data=near, medium="DISK"), Guard(MemoryStore(data=shared), read_only=True)]
    with Served(stores) as reader:
        assert reader.serve(PROMPT).num_tokens == 32
        reader.serve(PROMPT + 100)
        reader.flush()
        assert reader.tiers.evict_prefix(PROMPT + 100) > 0
        reader.flush()
        assert (shared, near) == (before, before)  # what was loaded is on the near store, too
    with Served([Guard(MemoryStore(data=shared), read_only=True)]) as reader:
        reader.serve(PROMPT + 100)
        assert reader.tiers.drain()
        assert shared == before


def test_nothing_is_written_to_a_guarded_store_that_takes_no_entries():
    class Archive(MemoryStore):
        takes_entries = False

    store = Archive()
    with Served([Guard(store)]) as served:
        served.serve(PROMPT)
        served.flush()
        assert (store.data, store.counts["lookup"] > 0, store.counts["store"]) == ({}, True, 0)


def test_a_store_of_another_fingerprint_is_refused(tmp_path):
    cache = PagedKVCache(LAYERS[:1], block_size=BLOCK, num_blocks=20)
    host = HostTier(cache, num_blocks=30)
    own, other = (Fingerprint.of(cache, model=model) for model in ("a", "b"))
    with (
        DiskStore(tmp_path, fingerprint=other, max_bytes=1 << 20) as disk,
        pytest.raises(UnsupportedOption, match="store 0 was opened with another fingerprint"),
    ):
        Tiers(cache, host, [disk], fingerprint=own)
    host.close()


@pytest.mark.parametrize("spans", [3, [(1, 2)], "ab"])
def test_malformed_arguments_of_a_request_are_refused(spans):
    with Served([MemoryStore()]) as served:
        with pytest.raises(ShapeError, match="expected spans as a list"):
            served.tiers.request(PROMPT, spans=spans)
        with pytest.raises(UnsupportedOption, match="expected a Request"):
            served.tiers.wait(3)
        with pytest.raises(ShapeError, match="timeout is 'x'"):
            served.tiers.drain("x")


def test_blocks_of_one_token_are_written_up_to_the_end_of_their_prefix():
    cache = PagedKVCache(LAYERS[:1], block_size=1, num_blocks=20, max_sequences=2)
    fingerprint = Fingerprint.of(cache, model="m")
    stores = [MemoryStore()]
    with Tiers(cache, HostTier(cache, num_blocks=30), stores, fingerprint=fingerprint, min_tokens=1) as tiers:
        for tokens in ([5, 6, 7, 0, 8], [5, 6, 7]):  # the host goes on after the second prompt, with token 0
            with cache.add_sequence(tokens) as sequence:
                cache.commit(cache.prepare([sequence], len(tokens) - sequence.num_cached_tokens))
                tiers.save(sequence)
        assert tiers.drain(20.0)
        assert len(stores[0].data) == 5
        tiers.check_invariants()


def test_another_model_finds_nothing():
    data = {}
    with Served([MemoryStore(data=data)]) as writer:
        writer.serve(PROMPT)
        writer.flush()
    with Served([MemoryStore(data=data)], model="other") as reader:
        assert reader.serve(PROMPT).num_tokens == 0


def test_explicit_writes_reach_host_and_store_by_save():
    store = MemoryStore()
    with Served([store], write="explicit") as served:
        served.serve(PROMPT)
        served.flush()
        assert not store.data
        with served.tiers.add_sequence(PROMPT) as sequence:
            assert served.tiers.save(sequence) == 8
        served.flush()
        assert len(store.data) == 8
        store.data.clear()
        with served.tiers.add_sequence(PROMPT) as sequence:
            assert served.tiers.save([sequence]) == 0
        served.flush()
        assert len(store.data) == 8


@pytest.mark.parametrize("write", ["through", "second_hit", "on_release"])
def test_write_policies_decide_when_stores_are_written(write):
    store = MemoryStore()
    with Served([store], write=write) as served:
        served.serve(PROMPT)
        served.flush()
        assert len(store.data) == (0 if write == "second_hit" else 8)
        served.serve(PROMPT)
        served.flush()
        assert len(store.data) == 8


def test_a_prompt_longer_than_the_device_is_served_in_part():
    tokens = np.arange(BLOCK * 20 + 1, dtype=np.int32)
    store = MemoryStore()
    with Served([store], num_blocks=23, host_blocks=41) as served:
        served.serve(tokens)
        served.forget()
        assert served.serve(tokens).num_tokens == 80


def test_requests_from_several_threads():
    store = MemoryStore(delay=0.002)
    with Served([store], num_blocks=65, host_blocks=65) as served:
        prompts = [PROMPT + 100 * number for number in range(6)]
        for tokens in prompts:
            served.serve(tokens)
        served.forget()
        requests = []

        def ask(tokens):
            requests.append(served.tiers.wait(served.tiers.request(tokens), 20.0))

        threads = [threading.Thread(target=ask, args=[tokens]) for tokens in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [request.num_tokens for request in requests] == [32] * 6
        for tokens in prompts:
            assert served.compute(tokens) == 32


def test_refusals_change_nothing():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=BLOCK)
    host = HostTier(cache, num_blocks=9)
    other = PagedKVCache(AttentionSpec(2, 8), num_blocks=9, block_size=BLOCK)
    store = MemoryStore()
    with pytest.raises(UnsupportedOption, match="fingerprint"):
        Tiers(cache, host, [store])
    with pytest.raises(ShapeError, match=r"Fingerprint\.of"):
        Tiers(cache, host, [store], fingerprint=Fingerprint.of(other, model="m"))
    with Tiers(cache, host, [store], fingerprint=Fingerprint.of(cache, model="m")) as tiers:
        with pytest.raises(UnsupportedDtype, match="outside this process"):
            tiers.request(range(9), namespace=frozenset([1]))
        with pytest.raises(ShapeError, match="deadline"):
            tiers.request(range(9), deadline=float("nan"))
        assert tiers.stats().requests.num_requests == 0
        tiers.check_invariants()
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.request(range(9))


@pytest.mark.parametrize(
    ("stores", "options", "error", "says"),
    [
        (5, {}, UnsupportedOption, r"stores are 5; expected a list .* \[store\]"),
        (object(), {}, UnsupportedOption, r"stores are <object .*; expected a list .* \[store\]"),
        ([MemoryStore, 5], {}, UnsupportedOption, "store 1 is 5; expected an object .* of BlockStore"),
        ((), {"fingerprint": 5}, UnsupportedOption, r"fingerprint is 5; .* Fingerprint\.of"),
        ((), {"agree": 5}, UnsupportedOption, "agree is 5; expected a callable"),
        ((), {"pin_seconds": "long"}, ShapeError, "pin_seconds is 'long'"),
        ((), {"pin_seconds": -1.0}, ShapeError, "pin_seconds is -1.0; expected .* 0 or more"),
        ((), {"pin_seconds": float("nan")}, ShapeError, "pin_seconds is nan"),
        ([MemoryStore], {"fingerprint": None}, UnsupportedOption, r"without a fingerprint.*Fingerprint\.of"),
    ],
)
def test_invalid_arguments_are_refused_and_start_no_guard(stores, options, error, says):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=BLOCK)
    host = HostTier(cache, num_blocks=9)
    threads = threading.active_count()
    opened = MemoryStore()
    given = [opened if store is MemoryStore else store for store in stores] if isinstance(stores, list) else stores
    with pytest.raises(error, match=says):
        Tiers(cache, host, given, write="on_evict", **{"fingerprint": Fingerprint.of(cache, model="m"), **options})
    assert threading.active_count() == threads
    assert not host.is_exclusive
    with Tiers(cache, host) as tiers:
        assert tiers.stores == ()
    opened.close()


def test_a_store_that_cannot_be_closed_does_not_keep_the_host_open():
    class Broken(MemoryStore):
        def close(self):
            super().close()
            raise OSError("planted")

    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=BLOCK, device="none")
    tiers = Tiers(cache, HostTier(cache, num_blocks=9), [Broken()], fingerprint=Fingerprint.of(cache, model="m"))
    with pytest.raises(OSError, match="planted"):
        tiers.close()
    with pytest.raises(UnsupportedOption, match="closed"):
        tiers.host.backup([])
    with Tiers(cache, HostTier(cache, num_blocks=9)):
        pass


def test_a_drain_waits_for_host_and_stores_within_one_timeout(monkeypatch):
    with Served([MemoryStore()]) as served:
        now = [100.0]
        monkeypatch.setattr("time.monotonic", lambda: now[0])
        limits = []

        def drain(timeout):
            limits.append(timeout)
            now[0] += 4.0
            return True

        with monkeypatch.context() as patch:
            patch.setattr(served.tiers.host, "drain", drain)
            patch.setattr(served.tiers._stores, "drain", drain)
            assert served.tiers.drain(10.0)
        assert limits == [10.0, 6.0]


def test_a_save_writes_the_whole_sequence_while_the_backup_of_another_one_ends(monkeypatch):
    store = MemoryStore()
    with Served([store], write="explicit", num_blocks=25) as served:
        with served.tiers.add_sequence(PROMPT) as one, served.tiers.add_sequence(PROMPT + 1000) as two:
            for sequence in (one, two):
                served.cache.commit(served.cache.prepare([sequence], len(PROMPT)))
            served.tiers.host.backup([one, two])
            late = served.tiers.host.poll()  # ends of copies that a device has not finished yet
            assert [backup.start for backup in late] == [0, 0]
            polls = [[], late[1:], []]
            monkeypatch.setattr(served.tiers.host, "poll", lambda: polls.pop(0) if polls else [])
            served.tiers.save(one)
            served.flush()
        assert len(store.data) == 2 * 8


def test_a_namespace_without_a_value_of_its_own_stays_in_the_process():
    store = MemoryStore()
    with Served([store]) as served:
        served.compute(PROMPT, frozenset([1]))
        served.flush()
        assert not store.data
        served.cache.clear_prefix_cache()
        assert served.compute(PROMPT, frozenset([1])) == 32


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("write", ["through", "on_evict"])
def test_stores_are_attached_and_detached_while_the_host_keeps_what_it_has(layers, write):
    with Served(layers=layers, write=write) as served:
        host = served.tiers.host

        def replace_stores(*stores, **options):
            served.tiers.close(keep_host=True)
            served.tiers = Tiers(served.cache, host, stores, fingerprint=served.fingerprint, min_tokens=1, **options)

        served.serve(PROMPT)
        served.cache.clear_prefix_cache()
        store = MemoryStore()
        replace_stores(store)
        assert served.serve(PROMPT).num_host_tokens == (32 if write == "through" else 0)
        served.serve(PROMPT + 100)
        served.tiers.drain()
        served.forget()
        assert served.serve(PROMPT + 100).num_tokens == 32
        store.inject("lookup", "hang")
        pending = served.tiers.request(PROMPT + 200)
        assert not pending.has_ended
        replace_stores()
        assert (pending.has_ended, store.is_closed) == (True, True)
        served.cache.clear_prefix_cache()
        assert served.serve(PROMPT + 100).num_host_tokens == 32
        replace_stores(MemoryStore(data=store.data))
        served.forget()
        assert served.serve(PROMPT + 100).num_tokens == 32
        served.tiers.check_invariants()


def test_a_host_that_stays_open_is_no_longer_exclusive():
    with Served(write="on_evict") as served:
        served.serve(PROMPT)
        host = served.tiers.host
        with pytest.raises(UnsupportedOption, match="keep_host"):
            served.tiers.close(keep_host="yes")
        served.tiers.close(keep_host=True)
        served.tiers.close()
        assert not host.is_exclusive
        assert host.match_both(PROMPT) == (32, 0)
        host.close()


def test_a_poll_holds_the_lock_while_it_notes_what_the_host_has_saved(monkeypatch):
    alive = []

    def forget(*_):
        other = threading.Thread(target=served.cache.match_length, args=(PROMPT,), daemon=True)
        other.start()
        other.join(0.05)
        alive.append(other.is_alive())

    with Served([MemoryStore()]) as served:
        served.compute(PROMPT)
        saved = Backup(PROMPT, None, None, 0, 4)
        with monkeypatch.context() as patch:
            patch.setattr(served.tiers.host, "poll", lambda: [saved])
            patch.setattr(served.tiers._stores.loaded, "forget", forget)
            served.tiers.poll()
        assert alive == [True]
