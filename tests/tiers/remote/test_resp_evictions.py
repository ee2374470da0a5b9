"""RespStore(watch_evictions=True): entries that the server gives up, and watches that outlive its failures."""

import errno
import os
import threading

import numpy as np
import pytest

from pagecore.errors import DeviceError, StoreError
from pagecore.tiers.remote.resp import RespStore
from pagecore.tiers.remote.resp.connection import RespConnection
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.leaks import nothing_left
from tests.tiers.proxy import Proxy
from tests.tiers.remote.contract import LARGE, NBYTES, fingerprint
from tests.tiers.remote.resp_servers import command, until


def test_what_the_server_gives_up_is_reported(private_resp):
    url = private_resp.url + "/2"
    with pytest.raises(StoreError, match=r"notify-keyspace-events is ''; set it to 'Egex'"):
        RespStore(url, fingerprint=fingerprint(), watch_evictions=True)
    assert command(url, b"CONFIG", b"SET", b"notify-keyspace-events", b"Egex") == b"+OK"
    keys = random_keys(40, 0, 1)
    blocks = Blocks(40, LARGE)
    blocks.fill(0)
    with RespStore(url, fingerprint=fingerprint(), watch_evictions=True, timeout=0.5) as store:
        assert store.reports_evictions
        assert wait(store, store.submit_store(keys[:3], blocks.pieces()[:3])).ok.all()
        assert (store.has(keys[:3]).all(), len(store.take_evicted())) == (True, 0)
        names = [store._prefix + key.tobytes() for key in keys]
        command(url, b"DEL", names[0])
        command(url, b"PEXPIRE", names[1], b"1")
        command(url, b"SET", b"another", b"value")
        command(url, b"DEL", b"another")
        until(lambda: not store.has(keys[:2]).any())
        assert store.has(keys[2:3]).all()
        assert sorted(map(bytes, store.take_evicted())) == sorted(map(bytes, keys[:2]))
        assert len(store.take_evicted()) == 0
        assert wait(store, store.submit_store(keys[:1], blocks.pieces()[:1])).ok.all()
        assert store.has(keys[:3]).tolist() == [True, False, True]
        for setting in ((b"maxmemory", b"6mb"), (b"maxmemory-policy", b"allkeys-lru")):
            assert command(url, b"CONFIG", b"SET", *setting) == b"+OK"
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        with RespStore(url, fingerprint=fingerprint()) as other:
            there = wait(other, other.submit_lookup(keys)).ok
        assert 0 < there.sum() < 40
        until(lambda: np.array_equal(store.has(keys), there))
        assert set(map(bytes, store.take_evicted())) >= set(map(bytes, keys[~there]))
        assert not wait(store, store.submit_lookup(keys)).ok[~there].any()


def test_a_watch_of_evictions_outlives_a_name_that_does_not_resolve(private_resp, monkeypatch):
    monkeypatch.setattr("pagecore.tiers.remote.resp.watch.PAUSE", 0.02)
    private_resp.command += ["--notify-keyspace-events", "EA"]
    private_resp.kill()
    private_resp.start()
    with RespStore(private_resp.url, fingerprint=fingerprint(), watch_evictions=True) as store:
        refused = []

        def unresolved(connection):
            refused.append(connection)
            raise OSError("the name does not resolve")

        with monkeypatch.context() as patch:
            patch.setattr(RespConnection, "_connect", unresolved)
            store._watch._connection.abort()
            until(lambda: len(refused) > 1)
        until(lambda: command(private_resp.url, b"PUBLISH", b"__keyevent@0__:evicted", b"x") == b":1")


def test_a_watch_of_evictions_outlives_its_server(private_resp, monkeypatch):
    monkeypatch.setattr("pagecore.tiers.remote.resp.watch.PAUSE", 0.02)
    private_resp.command += ["--notify-keyspace-events", "EA"]
    private_resp.kill()
    private_resp.start()
    keys = random_keys(1)
    with RespStore(private_resp.url, fingerprint=fingerprint(), watch_evictions=True) as store:
        for _ in range(2):
            assert wait(store, store.submit_store(keys, Blocks(1, NBYTES).pieces())).ok.all()
            until(lambda: command(private_resp.url, b"PUBLISH", b"__keyevent@0__:evicted", b"x") == b":1")
            command(private_resp.url, b"DEL", store._prefix + keys[0].tobytes())
            until(lambda: len(store.take_evicted()) == 1)
            private_resp.kill()
            private_resp.start()


def test_a_watch_of_evictions_notices_that_its_server_answers_no_more(private_resp, monkeypatch):
    monkeypatch.setattr("pagecore.tiers.remote.resp.watch.PAUSE", 0.02)
    private_resp.command += ["--notify-keyspace-events", "EA"]
    private_resp.kill()
    private_resp.start()
    keys = random_keys(1)
    with (
        Proxy(private_resp.server.port) as proxy,
        RespStore(
            f"redis://127.0.0.1:{proxy.port}", fingerprint=fingerprint(), watch_evictions=True, timeout=0.2
        ) as store,
    ):
        assert wait(store, store.submit_store(keys, Blocks(1, NBYTES).pieces())).ok.all()
        proxy.reset()
        until(lambda: proxy.count > 0)  # the answer to a PING
        proxy.reset(hang_after=0)
        until(lambda: proxy.count > 0)
        proxy.reset()  # of new connections alone
        until(lambda: command(private_resp.url, b"PUBLISH", b"__keyevent@0__:evicted", b"x") == b":2")
        command(private_resp.url, b"DEL", store._prefix + keys[0].tobytes())
        until(lambda: len(store.take_evicted()) == 1)


@pytest.mark.parametrize("lack", ["thread", "descriptor"])
def test_a_store_that_lacks_a_thread_or_descriptor_for_its_evictions_leaves_nothing(private_resp, monkeypatch, lack):
    assert command(private_resp.url, b"CONFIG", b"SET", b"notify-keyspace-events", b"Egex") == b"+OK"
    start = threading.Thread.start

    def fails(*given):
        if lack == "descriptor":
            raise OSError(errno.EMFILE, "Too many open files")
        if given[0].name.endswith("evictions"):
            raise RuntimeError("can't start new thread")
        start(*given)

    with nothing_left():
        monkeypatch.setattr(*((threading.Thread, "start") if lack == "thread" else (os, "eventfd")), fails)
        with pytest.raises(DeviceError, match=f"has no {lack}"):
            RespStore(private_resp.url, fingerprint=fingerprint(), watch_evictions=True)
        monkeypatch.undo()
