"""ObjectStore over memory, a folder, and real servers: moto (S3) and Azurite (Azure Blob)."""

import json
import os
import threading
import time
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from pagecore.errors import DeviceError, ShapeError, StoreError, UnsupportedOption
from pagecore.tiers.remote import objects
from pagecore.tiers.remote.listing import ListedEntries
from pagecore.tiers.remote.objects import ObjectStore
from tests.tiers.blocks import Blocks, random_keys, wait
from tests.tiers.leaks import nothing_left
from tests.tiers.remote.contract import LARGE, Contract, fingerprint
from tests.tiers.remote.fake_gcs import fake_gcs
from tests.together import together

# The account and key that Azurite publishes.
AZURITE = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}
S3 = {"access_key_id": "testing", "secret_access_key": "testing", "region": "us-east-1"}
PLAIN = {"allow_http": True}
# Name of an eventfd in /proc.
EVENT = "anon_inode:[eventfd]"


class ObjectContract(Contract):
    options: ClassVar = {}

    def open(self, salt):
        return ObjectStore(self.url, fingerprint=fingerprint(salt), **self.options)

    def path(self, store, key):
        return f"{store._folder}/{key.tobytes().hex()}"

    def content(self, store, key):
        return bytes(store._api.get(store._objects, self.path(store, key)).bytes())

    def replace(self, store, key, content):
        if content is None:
            store._api.delete(store._objects, self.path(store, key))
        else:
            store._api.put(store._objects, self.path(store, key), content)

    def spoil(self, store, key, byte, size=None):
        content = bytearray(self.content(store, key))
        if byte is not None:
            content[byte] ^= 4
        else:
            content = content[:size] + bytes(max(0, size - len(content)))
        self.replace(store, key, bytes(content))

    def test_a_listing_reports_what_others_delete(self):
        keys, blocks = random_keys(3, 0, 1), Blocks(3, LARGE)
        with ObjectStore(self.url, fingerprint=fingerprint(b"listed"), list_seconds=0.05, **self.options) as store:
            assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
            self.replace(store, keys[1], None)
            until(lambda: not store.has(keys).all())
            assert store.has(keys).tolist() == [True, False, True]
            assert store.take_evicted().tolist() == [keys[1].tolist()]


class TestMemory(ObjectContract):
    IS_SHARED = False  # memory belongs to one client
    url = "memory:///"


class TestFolder(ObjectContract):
    @pytest.fixture(autouse=True)
    def server(self, tmp_path):
        self.url = tmp_path.as_uri()


class TestS3(ObjectContract):
    @pytest.fixture(autouse=True)
    def server(self, moto_server):
        self.url = "s3://bucket/prefix"
        self.options = {**S3, "endpoint": moto_server.url, "client_options": PLAIN}
        urllib.request.urlopen(urllib.request.Request(f"{moto_server.url}/bucket", method="PUT")).close()


@pytest.fixture(scope="module")
def gcs():
    with fake_gcs() as url:
        yield url


class TestGcs(ObjectContract):
    """A server of the tests' own, because no emulator of GCS serves the interface that obstore uses."""

    @pytest.fixture(autouse=True)
    def server(self, gcs):
        self.url = "gs://bucket/prefix"
        account = {"gcs_base_url": gcs, "disable_oauth": True, "client_email": "", "private_key": ""}
        self.options = {
            "service_account_key": json.dumps(account | {"private_key_id": ""}),
            "client_options": PLAIN,
        }


class TestAzure(ObjectContract):
    @pytest.fixture(autouse=True)
    def server(self, azurite_server):
        self.url = "az://container/prefix"
        self.options = {
            **AZURITE,
            "endpoint": f"{azurite_server.url}/{AZURITE['account_name']}",
            "client_options": PLAIN,
        }
        create_container(azurite_server.url)


def create_container(url):
    """Create the container by a request that is signed with the shared key."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    account, date = AZURITE["account_name"], formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    resource = f"/{account}/{account}/container\nrestype:container"
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    text = "PUT" + "\n" * 12 + canonical + resource
    key = base64.b64decode(AZURITE["account_key"])
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Length": "0"}
    request = urllib.request.Request(f"{url}/{account}/container?restype=container", headers=headers, method="PUT")
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 409:  # it exists already
            raise


@together(
    "url",
    ["", "bucket/prefix", "http://host/x", "ftp://host", "s3://", "s3:/x", "az://", "redis://host", "memory://x", 7],
)
def test_urls_that_do_not_parse_are_refused(url):
    with pytest.raises(UnsupportedOption, match=r"use s3://bucket/prefix"):
        ObjectStore(url, fingerprint=fingerprint())


def test_options_are_checked():
    with pytest.raises(UnsupportedOption, match="nonsense_key"):
        ObjectStore("s3://bucket", fingerprint=fingerprint(), nonsense_key="x")
    for option in ("concurrency", "timeout"):
        for value in (0, "1", float("inf")):
            with pytest.raises(ShapeError, match=f"{option} is"):
                ObjectStore("memory:///", fingerprint=fingerprint(), **{option: value})
    with pytest.raises(UnsupportedOption, match="fingerprint is None; give"):
        ObjectStore("memory:///", fingerprint=None)
    with pytest.raises(UnsupportedOption, match="names no folder"):
        ObjectStore("file://", fingerprint=fingerprint())
    with pytest.raises(UnsupportedOption, match="/nonexistent"):
        ObjectStore("file:///nonexistent/folder", fingerprint=fingerprint())


def test_an_address_without_a_server_is_refused():
    with pytest.raises(
        StoreError, match="cannot be used.*check the URL, endpoint, region and credentials".replace(".*", r"(?s:.*)")
    ):
        ObjectStore(
            "s3://bucket",
            fingerprint=fingerprint(),
            timeout=0.3,
            endpoint="http://127.0.0.1:1",
            client_options=PLAIN,
            **S3,
        )


def test_a_bucket_that_does_not_exist_is_named(moto_server):
    with pytest.raises(StoreError, match="NoSuchBucket; create the bucket"):
        ObjectStore("s3://nowhere", fingerprint=fingerprint(), endpoint=moto_server.url, client_options=PLAIN, **S3)


@pytest.fixture
def wrong_server():
    """A server of HTTP that answers everything with one status and no object."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.send_response(self.server.status)
            self.send_header("Content-Length", "5")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(b"hello")

        do_GET = do_PUT = do_HEAD = do_DELETE = answer

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.status = 403
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_refused_credentials_are_an_error_that_names_the_remedy_and_leaves_nothing(wrong_server):
    counts = []
    for _ in range(3):
        with pytest.raises(StoreError, match="credentials"):
            ObjectStore(
                "s3://bucket",
                fingerprint=fingerprint(),
                endpoint=f"http://127.0.0.1:{wrong_server.server_port}",
                client_options=PLAIN,
                **S3,
            )
        counts.append(0)
        for each in os.scandir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # another thread has closed it, or it is that of the listing
                counts[-1] += os.readlink(each.path) == EVENT
    assert len(set(counts)) == 1


def test_a_server_that_is_not_an_object_store_gives_misses(wrong_server):
    wrong_server.status = 404
    with ObjectStore(
        "s3://bucket",
        fingerprint=fingerprint(),
        endpoint=f"http://127.0.0.1:{wrong_server.server_port}",
        client_options=PLAIN,
        timeout=1.0,
        **S3,
    ) as store:
        wrong_server.status = 200
        keys = random_keys(2)
        blocks = Blocks(2, 20_000)
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert not done.ok.any()
        assert done.error is not None
        assert blocks.is_poisoned.all()


@pytest.mark.parametrize("size", [0, 1000, 4096, 5000])
def test_an_object_that_lacks_a_whole_range_is_deleted(size, monkeypatch):
    monkeypatch.setattr(objects, "RANGE_BYTES", 4096)
    keys, blocks = random_keys(1), Blocks(1, 20_000)
    with ObjectStore("memory:///", fingerprint=fingerprint()) as store:
        path = f"{store._folder}/{keys[0].tobytes().hex()}"
        store._api.put(store._objects, path, bytes(size))
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert (done.ok.any(), "was deleted" in done.error) == (False, True)
        assert blocks.is_poisoned.all()
        assert not wait(store, store.submit_lookup(keys)).ok.any()


def test_an_object_of_the_right_size_stays_when_a_range_cannot_be_read(monkeypatch):
    monkeypatch.setattr(objects, "RANGE_BYTES", 4096)
    keys, blocks = random_keys(1), Blocks(1, 20_000)
    expected = blocks.fill(0)
    with ObjectStore("memory:///", fingerprint=fingerprint()) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        api = store._api

        class Failing:
            def __getattr__(self, name):
                return getattr(api, name)

            async def get_range_async(self, objects, path, *, start, length):
                if start:
                    raise OSError("the server is busy")
                return await api.get_range_async(objects, path, start=start, length=length)

        store._api = Failing()
        done = wait(store, store.submit_load(keys, blocks.pieces()))
        assert (done.ok.any(), done.error) == (False, "OSError: the server is busy")
        store._api = api
        blocks.poison()
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)


@pytest.mark.slow
def test_large_payloads_are_read_by_ranges(tmp_path):
    class Large:
        name = "large"
        payload_bytes = (20 << 20,)

    keys = random_keys(2)
    blocks = Blocks(2, 20 << 20)
    expected = blocks.fill(0)
    with ObjectStore(tmp_path.as_uri(), fingerprint=Large()) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        blocks.poison()
        assert wait(store, store.submit_load(keys, blocks.pieces())).ok.all()
        np.testing.assert_array_equal(blocks.payloads, expected)


def listed(store):
    """Wait until a listing has begun and ended."""
    counts = store.listings
    until(lambda: store.listings >= counts + 2)


class CountingStore(ObjectStore):
    listings = 0

    async def _list(self, missing):
        await super()._list(missing)
        self.listings += 1


def until(condition):
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "too late"
        time.sleep(0.002)


def test_what_others_delete_is_reported_after_a_listing():
    keys, blocks = random_keys(5, 0, 1), Blocks(5, LARGE)
    with CountingStore("memory:///", fingerprint=fingerprint(), list_seconds=0.002) as store:
        assert store.reports_evictions
        store._api.put(store._objects, f"{store._folder}/not an entry", b"")
        assert wait(store, store.submit_store(keys[:4], blocks.pieces()[:4])).ok.all()
        listed(store)
        assert (len(store.take_evicted()), store.has(keys).all()) == (0, True)
        for key in keys[:2]:
            store._api.delete(store._objects, f"{store._folder}/{key.tobytes().hex()}")
        until(lambda: not store.has(keys[:2]).any())
        assert sorted(map(bytes, store.take_evicted())) == sorted(map(bytes, keys[:2]))
        assert store.has(keys).tolist() == [False, False, True, True, True]
        assert wait(store, store.submit_store(keys[:1], blocks.pieces()[:1])).ok.all()
        assert wait(store, store.submit_remove(keys[2:3])).ok.all()
        assert wait(store, store.submit_lookup(keys)).ok.tolist() == [True, False, False, True, False]
        listed(store)
        assert (len(store.take_evicted()), store.has(keys).all()) == (0, True)


def test_an_incomplete_listing_reports_nothing():
    class Broken(CountingStore):
        async def _list(self, missing):
            self.listings += 1
            raise OSError("the connection is lost")

    keys, blocks = random_keys(2, 0, 1), Blocks(2, LARGE)
    with Broken("memory:///", fingerprint=fingerprint(), list_seconds=0.002) as store:
        assert wait(store, store.submit_store(keys, blocks.pieces())).ok.all()
        listed(store)
        assert (len(store.take_evicted()), store.has(keys).all()) == (0, True)


def test_a_listing_reports_nothing_that_a_batch_has_touched():
    entries, keys = ListedEntries(), [b"a", b"b", b"c"]
    entries.note(keys)
    missing = entries.begin()
    entries.expect([b"a", b"d"])
    entries.note([b"a", b"d"])
    assert missing == set(keys)
    entries.end(missing - {b"c"})
    assert entries.gone.take() == [b"b"]
    assert [entries.gone.has_gone(key) for key in keys] == [False, True, False]
    entries.end(entries.begin())
    assert sorted(entries.gone.take()) == [b"a", b"c", b"d"]


@pytest.mark.parametrize("seconds", [0, -1, 1e7, float("nan")])
def test_seconds_between_listings_are_checked(seconds):
    with pytest.raises(ShapeError, match=r"list_seconds is .*; give seconds from 0.001 to 1000000"):
        ObjectStore("memory:///", fingerprint=fingerprint(), list_seconds=seconds)


@pytest.mark.parametrize("lack", ["thread", "descriptor"])
def test_a_store_that_lacks_a_thread_or_descriptor_leaves_nothing(monkeypatch, lack):
    def fails(*_):
        raise RuntimeError("can't start new thread") if lack == "thread" else OSError(24, "Too many open files")

    ObjectStore("memory:///", fingerprint=fingerprint()).close()  # the descriptors that stay
    with nothing_left():
        if lack == "thread":
            monkeypatch.setattr(threading.Thread, "start", fails)
        else:
            monkeypatch.setattr(objects.asyncio, "new_event_loop", fails)
        with pytest.raises(DeviceError, match=f"has no {lack}"):
            ObjectStore("memory:///", fingerprint=fingerprint())
        monkeypatch.undo()


def test_an_interrupt_while_a_store_starts_leaves_nothing(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    ObjectStore("memory:///", fingerprint=fingerprint()).close()  # the runtime of obstore stays
    with nothing_left(), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ObjectStore("memory:///", fingerprint=fingerprint())
