"""Entries that others remove from a Mooncake cluster: found without leases, in bounded requests, and never invented."""

import os
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from pagecore.errors import ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.remote import directory_watch
from pagecore.tiers.remote.directory_watch import DirectoryWatch
from pagecore.tiers.remote.listing import ListedEntries
from pagecore.tiers.remote.master import Directory
from pagecore.tiers.remote.mooncake import MooncakeStore
from tests.capabilities import require
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.remote.contract import NBYTES, fingerprint

SEGMENT = 64 << 20


@pytest.fixture(scope="module")
def addresses(mooncake_master):
    require("mooncake.store")
    return f"127.0.0.1:{mooncake_master.port}", f"127.0.0.1:{mooncake_master.second_port}"


@pytest.fixture
def stores(addresses):
    """Two clients of the same entries; the first lends memory and watches."""
    master, admin = addresses
    own = fingerprint(os.urandom(8))
    options = {"segment_bytes": SEGMENT, "list_seconds": 0.02, "admin": admin}
    with (
        MooncakeStore(master, fingerprint=own, **options) as first,
        MooncakeStore(master, fingerprint=own) as second,
    ):
        yield first, second


def until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "too late"
        time.sleep(0.002)


def counted(store):
    """Count the rounds of a store's watch; return a function that waits for two more whole rounds."""
    directory = store._watch._directory
    ask, answers = directory.absent, []

    def absent(names):
        gone = ask(names)
        answers.append(len(names))
        return gone

    directory.absent = absent

    def rounds():
        begin = len(answers)
        until(lambda: len(answers) >= begin + 2)
        return answers

    return rounds


def test_what_another_client_removes_is_reported(stores):
    first, second = stores
    keys, blocks = random_keys(6, 1), Blocks(6, NBYTES)
    assert first.reports_evictions
    assert not second.reports_evictions
    rounds = counted(first)
    assert wait(first, first.submit_store(keys[:4], blocks.pieces()[:4])).ok.all()
    rounds()
    assert (len(first.take_evicted()), first.has(keys).all()) == (0, True)
    # The watch has asked for the entries, and has not leased them: the master lets another client remove them.
    assert [second._client.remove(second._prefix + key.tobytes().hex()) for key in keys[:2]] == [0, 0]
    until(lambda: not first.has(keys[:2]).any())
    assert sorted(map(bytes, first.take_evicted())) == sorted(map(bytes, keys[:2]))
    assert first.has(keys).tolist() == [False, False, True, True, True, True]
    # Entries that come back, and those that this store removes itself, are not reported.
    assert wait(first, first.submit_store(keys[:1], blocks.pieces()[:1])).ok.all()
    assert wait(first, first.submit_remove(keys[2:3])).ok.all()
    rounds()
    assert (len(first.take_evicted()), first.has(keys[[0, 2, 3]]).all()) == (0, True)
    # An entry of the other client is known once it was found.
    assert wait(second, second.submit_store(keys[5:], blocks.pieces()[5:])).ok.all()
    assert wait(first, first.submit_lookup(keys[5:])).ok.all()
    second._client.remove(first._prefix + keys[5].tobytes().hex(), True)
    until(lambda: len(first.take_evicted()) == 1)


def test_what_the_master_drops_is_reported_through_a_guard(addresses):
    master, admin = addresses
    store = MooncakeStore(
        master, fingerprint=fingerprint(os.urandom(8)), segment_bytes=SEGMENT, list_seconds=0.02, admin=admin
    )
    guard = Guard(store, deadline=Deadline(20.0))
    try:
        keys, blocks = random_keys(5, 2), Blocks(5, NBYTES)
        assert guard.reports_evictions
        assert wait(guard, guard.submit_store(keys, blocks.pieces())).ok.all()
        assert store._client.remove_by_regex(f"^{store._prefix}", True) == 5
        until(lambda: not guard.has(keys).any())
        assert len(guard.take_evicted()) == 5
    finally:
        guard.close()


def test_a_dead_master_removes_nothing(private_master):
    require("mooncake.store")
    server = private_master.server
    store = MooncakeStore(
        f"127.0.0.1:{server.port}",
        fingerprint=fingerprint(),
        segment_bytes=SEGMENT,
        list_seconds=0.02,
        admin=f"127.0.0.1:{server.second_port}",
    )
    try:
        keys, blocks = random_keys(3, 3), Blocks(3, NBYTES)
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        counted(store)()
        private_master.kill()
        until(lambda: store._watch._directory._connection.sock is None)
        time.sleep(0.1)
        assert (len(store.take_evicted()), store.has(keys).all()) == (0, True)
    finally:
        private_master.start()  # without a master, Mooncake's client takes 10 s to take back the memory that it lends
        store.close()


def test_a_master_without_a_directory_is_refused(addresses):
    master, admin = addresses
    own = fingerprint()
    for address in ("", "host", "host:x", "host:0", 5):
        with pytest.raises(UnsupportedOption, match=r"admin is .*; give 'host:port' of the HTTP server"):
            MooncakeStore(master, fingerprint=own, admin=address)
    with pytest.raises(UnsupportedOption, match="which only list_seconds uses"):
        MooncakeStore(master, fingerprint=own, admin=admin)
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ShapeError, match="list_seconds is"):
            MooncakeStore(master, fingerprint=own, list_seconds=seconds, admin=admin)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for address in (f"127.0.0.1:{port}", master):
        with pytest.raises(StoreError, match=f"at {address}: .*; give admin='host:port'"):
            MooncakeStore(master, fingerprint=own, list_seconds=1.0, admin=address)


# ---- a directory of the test ----


class Entries(BaseHTTPRequestHandler):
    """A directory that answers with status and content of `server.answer(names)`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        names = unquote(self.path.partition("?keys=")[2]).split(",")
        self.server.asked.append(names)
        status, content = self.server.answer(names)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def has_none(names):
    return 200, b'{"data":{%b}}' % b",".join(
        b'"%b":{"ok":false,"error":"OBJECT_NOT_FOUND"}' % name.encode() for name in names
    )


@contextmanager
def served(answer):
    with ThreadingHTTPServer(("127.0.0.1", 0), Entries) as server:
        server.answer, server.asked, server.daemon_threads = answer, [], True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


WRONG_ANSWERS = {
    "status": lambda _: (500, b"{}"),
    "not JSON": lambda _: (200, b"<html>"),
    "no entries": lambda _: (200, b'{"data":null}'),
    "other entries": lambda _: (200, b'{"data":{"x":{"error":"OBJECT_NOT_FOUND"}}}'),
    "entries that are not objects": lambda names: (200, b'{"data":{"%b":5}}' % names[0].encode()),
    "too many bytes": lambda names: (200, has_none(names)[1] + b" " * (1 << 20)),
    "another error": lambda names: (200, b'{"data":{"%b":{"error":"REPLICA_IS_NOT_READY"}}}' % names[0].encode()),
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
def test_an_answer_that_is_wrong_removes_nothing(answer):
    with served(answer) as server:
        directory = Directory(*server.server_address)
        with pytest.raises(StoreError, match="no directory of a Mooncake master answers"):
            directory.check()
        entries = ListedEntries()
        entries.note([b"a"])
        watch = DirectoryWatch(directory, entries, "p:", 0.02)
        asked = len(server.asked)
        until(lambda: len(server.asked) >= asked + 2)
        watch.close()
        assert entries.gone.take() == []
        assert entries.known() == [b"a"]
        server.answer = has_none
        again = DirectoryWatch(directory, entries, "p:", 0.02)
        until(lambda: entries.gone.take() == [b"a"])
        again.close()


def test_requests_are_bounded_and_spread_over_a_round(monkeypatch):
    monkeypatch.setattr(directory_watch, "KEYS_PER_REQUEST", 4)
    keys = [bytes([number]) * 17 for number in range(10)]
    with served(lambda names: (200, has_none(names)[1].replace(b"OBJECT_NOT_FOUND", b""))) as server:
        entries = ListedEntries()
        entries.note(keys)
        begin = time.monotonic()
        watch = DirectoryWatch(Directory(*server.server_address), entries, "p:", 0.3)
        until(lambda: len(server.asked) >= 3)
        assert time.monotonic() - begin >= 0.3 * 0.99
        watch.close()
        asked = server.asked[:3]
        assert [len(names) for names in asked] == [4, 4, 2]
        assert {name for names in asked for name in names} == {f"p:{key.hex()}" for key in keys}


def test_a_hanging_directory_does_not_delay_close():
    hanging = threading.Event()

    def hangs(_):
        hanging.wait(20)
        return 200, b"{}"

    with served(hangs) as server:
        entries = ListedEntries()
        entries.note([b"a"])
        watch = DirectoryWatch(Directory(*server.server_address), entries, "p:", 0.02)
        until(lambda: server.asked)
        begin = time.monotonic()
        watch.close()
        assert time.monotonic() - begin < 2.0
        hanging.set()
        assert entries.gone.take() == []


def test_what_a_batch_touches_during_a_request_is_not_removed():
    entries = ListedEntries()
    entries.note([b"a", b"b"])

    def touches(names):
        entries.expect([b"a"])
        entries.note([b"a"])
        return has_none(names)

    with served(touches) as server:
        watch = DirectoryWatch(Directory(*server.server_address), entries, "p:", 0.02)
        until(lambda: entries.known() == [b"a"])
        watch.close()
        assert entries.gone.take() == [b"b"]
