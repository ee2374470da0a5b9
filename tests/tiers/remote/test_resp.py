"""RespStore over real servers, Redis and Valkey."""

import signal
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest

from pagecore.errors import DeviceError, ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.remote.resp import RespStore
from pagecore.tiers.remote.resp.address import Address
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.leaks import nothing_left
from tests.tiers.proxy import Proxy
from tests.tiers.remote.contract import LARGE, NBYTES, Contract, fingerprint
from tests.tiers.remote.resp_servers import command
from tests.together import together


class RedisContract(Contract):
    def open(self, salt):
        return RespStore(self.url, fingerprint=fingerprint(salt))

    def name(self, store, key):
        return store._prefix + key.tobytes()

    def content(self, store, key):
        return command(self.url, b"GET", self.name(store, key))

    def replace(self, store, key, content):
        if content is None:
            assert command(self.url, b"DEL", self.name(store, key)) == b":1"
        else:
            assert command(self.url, b"SET", self.name(store, key), content) == b"+OK"

    def spoil(self, store, key, byte, size=None):
        content = bytearray(self.content(store, key))
        if byte is not None:
            content[byte] ^= 4
        else:
            content = content[:size] + bytes(max(0, size - len(content)))
        self.replace(store, key, bytes(content))


class TestTcp(RedisContract):
    @pytest.fixture(autouse=True)
    def server(self, resp_server):
        self.url = f"redis://127.0.0.1:{resp_server.port}/3"


class TestUnix(RedisContract):
    @pytest.fixture(autouse=True)
    def server(self, resp_server):
        self.url = f"unix://{resp_server.socket}?db=4"


@pytest.fixture
def url(resp_server):
    return f"redis://127.0.0.1:{resp_server.port}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", Address("host")),
        ("valkey://host:7000/2", Address("host", 7000, None, 2)),
        ("rediss://me:s%40cret@[::1]:1/0", Address("::1", 1, None, 0, "me", "s@cret", True)),
        ("redis://:pass@host?db=5", Address("host", database=5, password="pass")),
        ("unix:///tmp/a%20b.sock?db=9", Address(path="/tmp/a b.sock", database=9)),
    ],
)
def test_urls_name_servers(url, expected):
    assert Address.parse(url) == expected
    assert "cret" not in expected.name + repr(expected)


@together(
    "url",
    ["", "host:6379", "http://host", "redis://host:port", "redis://host:99999", "redis://host/name", "unix://", "redis://[::1",
     "redis://host?retries=3", "redis://host/1#x", "unix://host/path", 7,
     f"redis://{'a' * 64}", "redis://a..b/0", "redis://:\ud800@host", "unix:///tmp/\ud800"],
)  # fmt: skip
def test_urls_that_do_not_parse_are_refused(url):
    with pytest.raises(UnsupportedOption, match=r"redis://\[user:password@\]host"):
        RespStore(url, fingerprint=fingerprint())


def test_options_are_checked(url):
    for option in ("connections", "timeout", "ttl"):
        for value in (0, "1", float("nan")):
            with pytest.raises(ShapeError, match=f"{option} is"):
                RespStore(url, fingerprint=fingerprint(), **{option: value})
    with pytest.raises(UnsupportedOption, match="ssl_context is 3"):
        RespStore(url, fingerprint=fingerprint(), ssl_context=3)
    with pytest.raises(UnsupportedOption, match="fingerprint is None; give"):
        RespStore(url, fingerprint=None)


def test_an_address_without_a_server_is_refused():
    with pytest.raises(StoreError, match=r"cannot be reached.*start a server there or correct the URL"):
        RespStore("redis://127.0.0.1:1", fingerprint=fingerprint())
    with pytest.raises(StoreError, match="cannot be reached"):
        RespStore("unix:///nonexistent/redis.sock", fingerprint=fingerprint())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"ERROR\r\n", b"\x15\x03\x01\x00\x02", b"", b"+OK\r\n", None]
)
def test_a_server_that_is_not_redis_is_named(answer):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            client, _ = listener.accept()
            with client:
                client.recv(100)
                if answer is None:
                    client.recv(100)  # until the other side gives up
                client.sendall(answer or b"")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreError, match=r"expected (a Redis or Valkey server|a reply in RESP2)"):
            RespStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", fingerprint=fingerprint(), timeout=0.2)
        thread.join(20)
        assert not thread.is_alive()


def test_passwords_users_and_databases(private_resp, tmp_path):
    assert command(private_resp.url, b"CONFIG", b"SET", b"requirepass", b"pass word") == b"+OK"
    address = f"127.0.0.1:{private_resp.server.port}"
    with RespStore(f"redis://:pass%20word@{address}", fingerprint=fingerprint()) as store:
        assert "pass" not in store.name
        assert not wait(store, store.submit_lookup(random_keys(2))).ok.any()
    with pytest.raises(StoreError, match=r"NOAUTH.*put user and password into the URL"):
        RespStore(f"redis://{address}", fingerprint=fingerprint())
    with pytest.raises(StoreError, match="WRONGPASS"):
        RespStore(f"redis://:wrong@{address}", fingerprint=fingerprint())
    with pytest.raises(StoreError, match="DB index is out of range"):
        RespStore(f"redis://:pass%20word@{address}/999", fingerprint=fingerprint())
    user = (b"ACL", b"SETUSER", b"reader", b"on", b">secret", b"~pc1:*", b"+ping", b"+touch", b"+get")
    assert command(f"redis://:pass%20word@{address}", *user) == b"+OK"
    blocks = Blocks(2, NBYTES)
    with RespStore(f"redis://reader:secret@{address}", fingerprint=fingerprint()) as store:
        done = wait(store, store.submit_store(random_keys(2), blocks.pieces()))
        assert not done.ok.any()
        assert "allow the commands" in done.error


def test_a_full_server_fails_stores_with_a_remedy_and_serves_loads(private_resp):
    keys = random_keys(40, 0, 1)
    blocks = Blocks(40, LARGE)
    expected = blocks.fill(0)
    assert command(private_resp.url, b"CONFIG", b"SET", b"maxmemory", b"6mb") == b"+OK"
    with Guard(RespStore(private_resp.url, fingerprint=fingerprint()), deadline=Deadline(20.0)) as store:
        done = wait(store, store.submit_store(keys, blocks.pieces()))
        for _ in range(3):
            assert wait(store, store.submit_store(keys[~done.ok], blocks.pieces()[~done.ok])).is_full
        assert 0 < done.ok.sum() < 40
        assert "set maxmemory-policy to allkeys-lru" in done.error
        blocks.poison()
        loaded = wait(store, store.submit_load(keys, blocks.pieces()))
        assert (loaded.ok == done.ok).all()
        np.testing.assert_array_equal(blocks.payloads[loaded.ok], expected[loaded.ok])
        assert blocks.is_poisoned[~loaded.ok].all()
        assert command(private_resp.url, b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-lru") == b"+OK"
        blocks.payloads[:] = expected
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()


def test_entries_expire(private_resp):
    keys = random_keys(2)
    with RespStore(private_resp.url, fingerprint=fingerprint(), ttl=100) as store:
        assert wait(store, store.submit_store(keys, Blocks(2, NBYTES).pieces())).ok.all()
        left = command(private_resp.url, b"TTL", store._prefix + keys[0].tobytes())
        assert 0 < int(left[1:]) <= 100


@pytest.mark.parametrize("timeout", [5e-7, 1e7, float("nan"), float("inf")])
def test_a_timeout_that_sockets_cannot_keep_is_refused(timeout):
    with pytest.raises(ShapeError, match=r"timeout is .*; give seconds from 0.001 to 1000000"):
        RespStore("redis://127.0.0.1:1", fingerprint=fingerprint(), timeout=timeout)


@pytest.fixture
def signals():
    """Interrupt the main thread every few milliseconds; after 10 s, with an error."""
    limit = time.monotonic() + 10

    def handle(*_):
        if time.monotonic() > limit:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise AssertionError("the timeout began again after each signal")

    before = [(each, signal.signal(each, handle)) for each in (signal.SIGALRM, signal.SIGUSR1)]
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for each, handler in before:
        signal.signal(each, handler)


@pytest.mark.usefixtures("signals")
def test_the_timeout_of_a_server_that_does_not_answer_counts_on_through_signals():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StoreError, match=r"did not answer within 0\.1 s"):
            RespStore(f"redis://127.0.0.1:{port}", fingerprint=fingerprint(), timeout=0.1)


@pytest.mark.usefixtures("signals")
def test_the_timeout_of_a_batch_counts_on_through_signals_to_its_thread(resp_server):
    with (
        Proxy(resp_server.port) as proxy,
        RespStore(f"redis://127.0.0.1:{proxy.port}", fingerprint=fingerprint(), connections=1, timeout=0.1) as store,
    ):
        proxy.reset(hang_after=0)
        ticket = store.submit_lookup(random_keys(1))
        while store.stats().num_pending:
            signal.pthread_kill(store._workers[0].thread.ident, signal.SIGUSR1)
            time.sleep(0.01)
        assert "sent nothing for 0.1 s" in wait(store, ticket).error


def test_threads_block_all_signals_but_those_of_faults_and_profilers(url):
    with RespStore(url, fingerprint=fingerprint(), connections=1) as store:
        assert not wait(store, store.submit_lookup(random_keys(1))).ok.any()
        with open(f"/proc/self/task/{store._workers[0].thread.native_id}/status") as status:
            (mask,) = (int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    blocked = {each for each in signal.valid_signals() if mask >> (each - 1) & 1}
    left = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGPROF"}
    never = {signal.SIGKILL, signal.SIGSTOP}
    assert {signal.Signals(each).name for each in signal.valid_signals() - blocked - never} == left


@pytest.mark.parametrize("count", [0, 2])
def test_a_store_without_threads_for_its_connections_leaves_nothing(url, monkeypatch, count):
    start, started = threading.Thread.start, []

    def fails(thread):
        if len(started) == count:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    with nothing_left():
        monkeypatch.setattr(threading.Thread, "start", fails)
        with pytest.raises(DeviceError, match="has no thread for a connection: can't start new thread; use fewer"):
            RespStore(url, fingerprint=fingerprint(), connections=4)
        monkeypatch.undo()
    assert len(started) == count


def test_a_value_of_another_type_is_an_error_and_keeps_the_connection(url):
    keys = random_keys(3)
    blocks = Blocks(3, NBYTES)
    blocks.fill(0)
    with RespStore(url, fingerprint=fingerprint(b"types"), connections=1) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        name = store._prefix + keys[1].tobytes()
        command(url, b"DEL", name)
        assert command(url, b"LPUSH", name, b"x") == b":1"
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert done.ok.tolist() == [True, False, True]
        assert "WRONGTYPE" in done.error


def test_a_restarted_server_is_used_again(private_resp):
    keys = random_keys(2)
    blocks = Blocks(2, NBYTES)
    with RespStore(private_resp.url, fingerprint=fingerprint()) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        private_resp.kill()
        assert "cannot be reached" in wait(store, store.submit_lookup(keys)).error
        private_resp.start()
        done = wait(store, store.submit_lookup(keys))
        assert (done.ok.any(), done.error) == (False, None)
        private_resp.kill()
        private_resp.start()
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()


@pytest.mark.parametrize("private_resp", ["redis"], indirect=True)  # the wheel of Valkey has no TLS
def test_tls(tmp_path, private_resp):
    certificate, secret = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", secret, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    for name, value in (("tls-cert-file", certificate), ("tls-key-file", secret), ("tls-auth-clients", "no")):
        answer = command(private_resp.url, b"CONFIG", b"SET", name.encode(), str(value).encode())
        if answer != b"+OK":
            pytest.skip(f"needs redis: a server with TLS, {answer!r}")
    from tests.tiers.servers import free_port

    port = free_port()
    assert command(private_resp.url, b"CONFIG", b"SET", b"tls-port", str(port).encode()) == b"+OK"
    context = ssl.create_default_context(cafile=str(certificate))
    keys = random_keys(3, 0, 1)
    blocks = Blocks(3, LARGE)
    expected = blocks.fill(0)
    with RespStore(f"rediss://127.0.0.1:{port}", fingerprint=fingerprint(), ssl_context=context) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        blocks.poison()
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)
    with pytest.raises(StoreError, match="certificate verify failed"):
        RespStore(f"rediss://127.0.0.1:{port}", fingerprint=fingerprint())
    with pytest.raises(StoreError, match="cannot be reached"):
        RespStore(f"rediss://127.0.0.1:{private_resp.server.port}", fingerprint=fingerprint(), timeout=0.5)
