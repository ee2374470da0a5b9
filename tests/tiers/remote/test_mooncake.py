"""MooncakeStore against a real master on loopback."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagecore.errors import DeviceError, ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.guard import Deadline, Guard, closing
from pagecore.tiers.remote import mooncake
from pagecore.tiers.remote.mooncake import MooncakeStore
from pagecore.tiers.store import BlockStore
from tests.capabilities import require
from tests.tiers.blocks import Blocks, random_keys, wait, wait_all
from tests.tiers.leaks import no_threads_left
from tests.tiers.remote.contract import NBYTES, fingerprint

SEGMENT = 64 << 20


@pytest.fixture(scope="module")
def master(mooncake_master):
    require("mooncake.store")
    return f"127.0.0.1:{mooncake_master.port}"


@pytest.fixture(scope="module")
def store(master):
    with MooncakeStore(master, fingerprint=fingerprint(os.urandom(8)), segment_bytes=SEGMENT) as made:
        yield made


@pytest.fixture(scope="module")
def reader(master):
    """Another client, with a fingerprint of its own; `read_as` lets it find the entries of a store."""
    with MooncakeStore(master, fingerprint=fingerprint(b"reader"), threads=1) as made:
        yield made


def read_as(reader, store):
    reader._workers[0].connection._prefix = store._prefix


def some(store, count, seed, lane=0, nbytes=NBYTES):
    """Store a few entries; return keys, blocks and the expected payloads."""
    keys, blocks = random_keys(count, seed, lane), Blocks(count, nbytes)
    expected = blocks.fill(seed)
    done = wait(store, store.submit_store(keys, blocks.pieces()))
    assert (done.ok.all(), done.error) == (True, None)
    blocks.poison()
    return keys, blocks, expected


def test_entries_come_back_with_their_bytes(store):
    assert isinstance(store, BlockStore)
    assert (store.verifies, store.writes_late, store.medium) == (False, True, "EXTERNAL")
    keys, blocks, expected = some(store, 9, 1)
    asked = np.concatenate([keys[:4], random_keys(3, 77), keys[4:]])
    assert wait(store, store.submit_lookup(asked)).ok.tolist() == [True] * 4 + [False] * 3 + [True] * 5
    order = np.random.default_rng(0).permutation(9)
    done = wait(store, store.submit_load(keys[order], blocks.pieces(order)))
    assert (done.ok.all(), done.error) == (True, None)
    np.testing.assert_array_equal(blocks.payloads, expected)
    assert (blocks.bytes[:, blocks.nbytes :] == 0xA5).all()


def test_absent_entries_are_misses_that_write_nothing(store):
    blocks = Blocks(5, NBYTES)
    done = wait(store, store.submit_load(random_keys(5, 99), blocks.pieces()))
    assert (done.ok.any(), done.error) == (False, None)
    assert blocks.is_poisoned.all()


def test_an_entry_that_exists_stays_and_counts_as_stored(store):
    keys, blocks, expected = some(store, 1, 2)
    blocks.fill(3)
    assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
    assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
    np.testing.assert_array_equal(blocks.payloads, expected)


@pytest.mark.parametrize("size", [0, 5, NBYTES - 1, NBYTES + 1, NBYTES + 24, 3 * NBYTES])
def test_an_entry_of_another_size_is_a_miss_and_makes_room(store, size):
    keys, blocks, expected = some(store, 3, 100 + size)
    assert wait(store, store.submit_remove(keys[1:2])).ok.all()
    assert store._client.put(store._prefix + keys[1].tobytes().hex(), bytes(size)) == 0 or size == 0
    done = wait(store, store.submit_load(keys, blocks.pieces()))
    assert done.ok.tolist() == [True, False, True]
    assert done.error is None if size == 0 else "1 entries had another size" in done.error
    assert not wait(store, store.submit_lookup(keys[1:2])).ok.any()
    blocks.payloads[1] = expected[1]
    assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
    blocks.poison()
    assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
    np.testing.assert_array_equal(blocks.payloads, expected)


def test_an_entry_that_a_batch_names_twice_is_loaded_twice(store):
    keys, _, expected = some(store, 3, 8)
    order = np.array([0, 1, 0, 2, 0, 1])
    asked, targets = keys[order], Blocks(6, NBYTES)
    asked[3] = random_keys(1, 78)
    assert wait(store, store.submit_lookup(asked)).ok.tolist() == [True, True, True, False, True, True]
    done = wait(store, store.submit_load(asked, targets.pieces()))
    assert (done.ok.tolist(), done.error) == ([True, True, True, False, True, True], None)
    np.testing.assert_array_equal(targets.payloads[done.ok], expected[order[done.ok]])
    assert targets.is_poisoned[3]


class Writing:
    """A client of a cluster in which another client writes one of the entries; the others are absent."""

    def __init__(self, store, key):
        self.name = store._prefix + key.tobytes().hex()

    def _answers(self, names, *_):
        return [mooncake.NOT_READY if name == self.name else mooncake.NOT_FOUND for name in names]

    batch_get_into = batch_remove = _answers


def test_an_entry_that_another_client_writes_is_a_miss_and_stays(master, monkeypatch):
    store = MooncakeStore(master, fingerprint=fingerprint(os.urandom(8)), threads=1)
    guard = Guard(store, deadline=Deadline(20.0), budget_bytes=1 << 20)
    try:
        keys, blocks = random_keys(2, 79), Blocks(2, NBYTES)
        monkeypatch.setattr(store._workers[0].connection, "_client", Writing(store, keys[0]))
        for _ in range(4):  # one more than the breaker takes
            done = wait(guard, guard.submit_load(keys, blocks.pieces()))
            assert (done.ok.any(), done.error) == (False, None)
            done = wait(guard, guard.submit_remove(keys))
            assert (done.ok.tolist(), done.is_full) == ([False, True], True)
            assert "1 of the entries are being written; wait for the end" in done.error
        assert (guard.health().breaker, guard.health().lost_bytes) == ("closed", 0)
    finally:
        guard.close()


def test_another_fingerprint_and_another_client(store, reader):
    keys, blocks, expected = some(store, 3, 5)
    assert not wait(reader, reader.submit_lookup(keys)).ok.any()
    read_as(reader, store)
    assert wait(reader, reader.submit_load(keys, blocks.pieces())).ok.all()
    np.testing.assert_array_equal(blocks.payloads, expected)


def test_entries_that_another_client_has_just_read_are_removed(store, reader):
    keys, blocks, _ = some(store, 2, 11)
    read_as(reader, store)
    assert wait(reader, reader.submit_load(keys, blocks.pieces())).ok.all()
    assert store._client.remove(store._prefix + keys[0].tobytes().hex()) != 0  # leased to the reader
    done = wait(store, store.submit_remove(keys))
    assert (done.ok.all(), done.error) == (True, None)
    assert not wait(reader, reader.submit_lookup(keys)).ok.any()


def test_copies_are_fewer_if_fewer_clients_lend_memory(private_master):
    address = f"127.0.0.1:{private_master.server.port}"
    with MooncakeStore(address, fingerprint=fingerprint(), segment_bytes=SEGMENT, replicas=3) as store:
        keys, blocks, expected = some(store, 3, 6)
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)


@pytest.mark.slow
def test_entries_with_two_copies_outlive_a_client(private_master):
    address, identity = f"127.0.0.1:{private_master.server.port}", fingerprint()
    with (
        MooncakeStore(address, fingerprint=identity, segment_bytes=SEGMENT) as staying,
        MooncakeStore(address, fingerprint=identity, segment_bytes=SEGMENT, replicas=2) as leaving,
    ):
        once, _, _ = some(staying, 24, 5)  # in the memory of either client
        twice, blocks, expected = some(leaving, 12, 6)
        leaving.close()
        found = wait(staying, staying.submit_lookup(once)).ok
        assert not found.all()
        done = wait(staying, staying.submit_load(once, Blocks(24, NBYTES).pieces()))
        assert done.ok.tolist() == found.tolist()
        assert wait(staying, staying.submit_load(twice, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)


def test_many_batches_at_once_end_once_each(store):
    keys, blocks, expected = some(store, 40, 6)
    tickets = []
    for begin in range(0, 40, 4):
        tickets.append(store.submit_load(keys[begin : begin + 4], blocks.pieces(range(begin, begin + 4))))
        tickets.append(store.submit_lookup(keys[begin : begin + 4]))
    store.cancel(10**9)
    assert all(done.ok.all() for done in wait_all(store, tickets).values())
    np.testing.assert_array_equal(blocks.payloads, expected)
    assert store.poll() == []


def test_a_guard_verifies_in_registered_staging_memory(master):
    store = MooncakeStore(master, fingerprint=fingerprint(os.urandom(8)), segment_bytes=SEGMENT)
    guard = Guard(store, deadline=Deadline(20.0), budget_bytes=1 << 20)
    try:
        keys, blocks, expected = some(guard, 4, 7)
        assert len(store._registered) == 1
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
        # An entry whose bytes are wrong is a miss.
        name = store._prefix + keys[1].tobytes().hex()
        content = bytearray(store._client.get(name))
        content[5] ^= 1
        assert store._client.remove(name, True) == 0
        assert store._client.put(name, bytes(content)) == 0
        blocks.poison()
        done = wait(guard, guard.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True, False, True, True]
        assert (blocks.payloads[0] == expected[0]).all()
        # It is deleted, so that it can be stored again.
        limit = time.monotonic() + 20
        while wait(guard, guard.submit_lookup(keys)).ok[1]:
            assert time.monotonic() < limit
        blocks.payloads[1] = expected[1]
        assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()
        blocks.poison()
        assert wait(guard, guard.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
    finally:
        guard.close()


def test_a_cluster_without_memory_is_full_and_no_failure(private_master):
    address = f"127.0.0.1:{private_master.server.port}"
    with Guard(MooncakeStore(address, fingerprint=fingerprint()), deadline=Deadline(20.0)) as guard:
        for _ in range(4):
            done = wait(guard, guard.submit_store(random_keys(2), Blocks(2, NBYTES).pieces()))
            assert (done.ok.any(), done.is_full) == (False, True)
        assert guard.health().breaker == "closed"
        assert guard.health().lost_bytes == 0


def test_bad_arguments_are_refused(master, store):
    identity = fingerprint()
    elected = ("etcd://127.0.0.1:2379", "redis://127.0.0.1:6379", "127.0.0.1:50051;127.0.0.1:50052")
    for address in ("", "host", "host:x", "host:0", "host:70000", 5, None, *elected):
        with pytest.raises(UnsupportedOption, match="give 'host:port' of mooncake_master"):
            MooncakeStore(address, fingerprint=identity)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(StoreError, match=f"start mooncake_master --rpc_port={port}"):
        MooncakeStore(f"127.0.0.1:{port}", fingerprint=identity)
    for options in (
        {"segment_bytes": -1},
        {"segment_bytes": (16 << 20) - 1},
        {"buffer_bytes": 5},
        {"threads": 0},
        {"replicas": 0},
    ):
        with pytest.raises(ShapeError, match=next(iter(options))):
            MooncakeStore(master, fingerprint=identity, **options)
    blocks = Blocks(2, NBYTES)
    with pytest.raises(ShapeError, match="20001 bytes; an entry of lane 0 has 20000 bytes"):
        store.submit_load(random_keys(2), blocks.pieces() + np.array([0, 1], np.uint64))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"-ERR unknown command\r\n", b"", None])
def test_a_server_that_is_not_a_master_is_refused(monkeypatch, answer):
    monkeypatch.setattr("pagecore.tiers.remote.master.PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve():
            peer, _ = listener.accept()
            with peer:
                if answer is not None:  # None: it never answers
                    peer.recv(20)
                    peer.sendall(answer)
                    return
                peer.settimeout(10)
                while peer.recv(20):
                    pass

        served = pool.submit(serve)
        with pytest.raises(StoreError, match=r"expected the answer of a Mooncake master at .*; check the address"):
            MooncakeStore(f"127.0.0.1:{listener.getsockname()[1]}", fingerprint=fingerprint())
        served.result(10)


@pytest.mark.slow
def test_a_master_that_hangs_does_not_stop_the_process_that_closes_its_store(private_master, monkeypatch):
    """With memory that it lends, Mooncake's client holds the interpreter's lock for 60 s when its master hangs."""
    monkeypatch.setattr(closing, "CLOSE_SECONDS", 1.0)
    before = set(threading.enumerate())
    address = f"127.0.0.1:{private_master.server.port}"
    guard = Guard(MooncakeStore(address, fingerprint=fingerprint(), segment_bytes=SEGMENT))
    private_master.stop()
    began = time.monotonic()
    guard.close()
    assert time.monotonic() - began < 20  # not 60
    (thread,) = set(threading.enumerate()) - before
    private_master.resume()
    thread.join(30)
    assert set(threading.enumerate()) <= before


def test_a_dead_master_is_a_failed_batch_and_close_leaves_no_thread(private_master):
    before = threading.active_count()
    address = f"127.0.0.1:{private_master.server.port}"
    store = MooncakeStore(address, fingerprint=fingerprint(), segment_bytes=SEGMENT)
    idle = MooncakeStore(address, fingerprint=fingerprint(b"idle"))
    keys, blocks, _ = some(store, 2, 8)
    private_master.kill()
    done = wait(store, store.submit_load(keys, blocks.pieces()))
    assert not done.ok.any()
    assert "check its master" in done.error
    assert blocks.is_poisoned.all()
    done = wait(store, store.submit_lookup(keys))
    assert not done.ok.any()
    idle.close()
    private_master.start()  # without a master, Mooncake's client takes 10 s to take back the memory that it lends
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.submit_lookup(keys)
    assert threading.active_count() == before


@pytest.mark.parametrize("lack", ["thread", "descriptor"])
def test_a_store_that_lacks_a_thread_or_descriptor_leaves_the_cluster(master, monkeypatch, lack):
    def fails(*given):
        if lack == "descriptor":
            raise OSError(24, "Too many open files")
        if given[0].name == "pagecore mooncake directory":
            raise RuntimeError("can't start new thread")
        start(*given)

    class Client:
        """A client whose methods succeed, and which notes that it was closed."""

        is_closed = False

        def setup(self, *_):
            return 0

        def close(self):
            self.is_closed = True

    client, start = Client(), threading.Thread.start
    monkeypatch.setattr(mooncake, "_client", lambda: client)
    monkeypatch.setattr(mooncake.Directory, "check", lambda _: None)
    with no_threads_left(), monkeypatch.context() as patch:
        patch.setattr(*((threading.Thread, "start") if lack == "thread" else (os, "eventfd")), fails)
        with pytest.raises(DeviceError, match=f"has no {lack}"):
            MooncakeStore(master, fingerprint=fingerprint(), list_seconds=1.0)
    assert client.is_closed
