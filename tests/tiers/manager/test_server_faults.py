"""Rows of the table of faults with real servers, through Tiers: Mooncake's master, S3, Redis, subscribers of events."""

import os
import threading
import time
import urllib.request

import numpy as np
import pytest

from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.remote.objects import ObjectStore
from pagecore.tiers.remote.resp import RespStore
from tests.capabilities import require
from tests.tiers.leaks import no_threads_left
from tests.tiers.manager.served import Served
from tests.tiers.proxy import Proxy
from tests.tiers.servers import shared

PROMPT = np.arange(33, dtype=np.int32)
OTHER = PROMPT + 1000
KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


def guarded(store, deadline=20.0, **options):
    breaker = Breaker(failures=100, first_pause=0.02, longest_pause=0.05)
    return Guard(store, deadline=Deadline(deadline), breaker=breaker, **options)


def serve_until_loaded(served, medium="EXTERNAL", limit=20.0):
    """Serve a prompt that only the store has, until the store works again."""
    end = time.monotonic() + limit
    while True:
        served.forget()
        if served.serve(PROMPT).loaded_tokens == {medium: 32}:
            return
        assert time.monotonic() < end, "the store has not come back"


# -- Mooncake ------------------------------------------------------------------------------------------------------


@pytest.fixture
def mooncake(private_master):
    """Return a function that opens a guarded store of a private master for a fingerprint; its threads end."""
    require("mooncake.store")
    from pagecore.tiers.remote.mooncake import MooncakeStore

    def make(fingerprint):
        def client():
            return MooncakeStore(
                f"127.0.0.1:{private_master.server.port}", fingerprint=fingerprint, segment_bytes=32 << 20, threads=1
            )

        return guarded(client(), 0.3, budget_bytes=1 << 20, reopen=client)

    with no_threads_left():
        yield make


@pytest.mark.slow
def test_a_dead_master_is_a_miss_and_hides_no_nearer_store(mooncake, private_master, tmp_path):
    def disk(fingerprint):
        return DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20, threads=2)

    with Served([disk, mooncake]) as served:
        serve_until_loaded(served, "DISK")
        served.forget()
        private_master.kill()
        assert served.serve(PROMPT).loaded_tokens == {"DISK": 32}
        private_master.start()  # without a master, Mooncake's client takes 10 s to take back the memory that it lends


@pytest.mark.slow
def test_a_dead_master_is_a_miss_until_the_next_one_is_there(mooncake, private_master):
    with Served([mooncake]) as served:
        serve_until_loaded(served)
        served.forget()
        private_master.kill()
        for _ in range(3):
            assert served.serve(PROMPT).num_tokens == 0
            served.forget()
        private_master.start()
        served.forget()
        serve_until_loaded(served, limit=60.0)


def test_a_master_that_hangs_is_late_and_what_it_still_writes_reaches_no_block(mooncake, private_master):
    with Served([mooncake]) as served:
        serve_until_loaded(served)
        served.forget()
        private_master.stop()
        try:
            assert served.serve(PROMPT).num_tokens == 0
            for number in range(4):  # the host's blocks have new owners
                served.serve(OTHER + 100 * number)
        finally:
            private_master.resume()
        for number in range(4):
            served.serve(OTHER + 100 * number)
            served.tiers.check_invariants()


# -- Redis and S3 --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "valkey", "s3"])
def shared_store(request, tmp_path_factory):
    """Return a function that opens a guarded store of a shared server for a fingerprint."""
    if request.param != "s3":
        server = shared(request.param, tmp_path_factory)
        return lambda fingerprint: guarded(RespStore(f"unix://{server.socket}", fingerprint=fingerprint, connections=1))
    server = request.getfixturevalue("moto_server")
    make_bucket(server)
    return lambda fingerprint: guarded(bucket(server.port, fingerprint))


def make_bucket(server):
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/faults", method="PUT")).close()


def bucket(port, fingerprint, kind=ObjectStore, timeout=20.0):
    options = {"endpoint": f"http://127.0.0.1:{port}", "client_options": {"allow_http": True}}
    return kind("s3://faults", fingerprint=fingerprint, concurrency=2, timeout=timeout, **KEYS, **options)


def test_two_processes_that_store_one_prompt_at_once(shared_store):
    model = os.urandom(8).hex()
    with Served([shared_store], model=model) as one, Served([shared_store], model=model) as two:
        threads = [threading.Thread(target=served.serve, args=[PROMPT]) for served in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for served in (one, two, one):
            served.forget()
            assert served.serve(PROMPT).loaded_tokens == {"EXTERNAL": 32}


def test_another_model_finds_nothing_on_a_shared_server(shared_store):
    model = os.urandom(8).hex()
    with Served([shared_store], model=model) as served:
        served.serve(PROMPT)
        served.flush()
    with Served([shared_store], model=f"{model} retrained") as served:
        assert served.serve(PROMPT).num_tokens == 0
    with Served([shared_store], model=model) as served:
        assert served.serve(PROMPT).num_tokens == 32


def test_entries_that_a_server_evicts_between_lookup_and_load(private_resp):
    class Evicting(RespStore):
        def submit_load(self, keys, pieces):
            private_resp.kill()
            private_resp.start()
            return super().submit_load(keys, pieces)

    def make(fingerprint, kind=RespStore):
        return guarded(kind(private_resp.url, fingerprint=fingerprint, connections=1))

    with Served([make]) as served:
        served.serve(PROMPT)
        served.flush()
    with Served([lambda fingerprint: make(fingerprint, Evicting)]) as served:
        assert served.serve(PROMPT).num_tokens == 0
    with Served([make]) as served:  # computed and stored once more
        assert served.serve(PROMPT).num_tokens == 32


def test_a_load_that_is_cancelled_inside_a_payload(private_resp):
    def make(port):
        return lambda fingerprint: guarded(
            RespStore(f"redis://127.0.0.1:{port}", fingerprint=fingerprint, connections=1, timeout=20.0)
        )

    with Served([make(private_resp.server.port)]) as served:
        served.serve(PROMPT)
        served.flush()
    with Proxy(private_resp.server.port) as proxy, Served([make(proxy.port)]) as served:
        proxy.reset(hang_after=1000)  # the answers to a lookup have fewer bytes
        request = served.tiers.request(PROMPT)
        end = time.monotonic() + 20
        while request.state == "searching" or proxy.count <= 1000:
            served.tiers.poll()
            assert time.monotonic() < end
        request.cancel()
        served.tiers.wait(request, 20.0)
        assert (request.state, request.num_tokens) == ("late", 0)
        proxy.reset()
        served.serve(OTHER)
        proxy.released.set()
        served.serve(OTHER)
        request.release()
        serve_until_loaded(served)


@pytest.mark.parametrize("fault", [{"flip_at": 9000}, {"cut_after": 9000}], ids=str)
def test_the_way_to_a_bucket_fails(moto_server, fault):
    """The answers to eight HEAD requests have fewer bytes; those to GET requests have 3 KiB of payload and more."""
    make_bucket(moto_server)
    model = os.urandom(8).hex()
    with Served([lambda fingerprint: guarded(bucket(moto_server.port, fingerprint))], model=model) as served:
        served.serve(PROMPT)
        served.flush()
    # A bit of a header may flip, so that the client waits for bytes that never come.
    with (
        Proxy(moto_server.port) as proxy,
        Served([lambda fingerprint: guarded(bucket(proxy.port, fingerprint, timeout=5.0))], model=model) as served,
    ):
        proxy.reset(**fault)
        assert served.serve(PROMPT).num_tokens in range(0, 33, 4)
        assert proxy.count > 9000
        proxy.reset()
        serve_until_loaded(served)


# -- events --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_subscriber_blocks_no_tier_and_catches_up(tmp_path):
    require("zmq")
    require("msgspec")
    from pagecore.tiers.events import EventPublisher, Subscriber
    from tests.tiers.events.following import contents, state_of

    def disk(fingerprint):
        return DiskStore(tmp_path / "disk", fingerprint=fingerprint, max_bytes=1 << 20, threads=2)

    (tmp_path / "disk").mkdir()
    address = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay", "snapshot")}
    with Served([disk]) as served:
        publisher = EventPublisher(served.cache, served.tiers, **address, interval=None, max_waiting=1)
        address["endpoint"] = publisher.endpoint
        with publisher, Subscriber(**{**address, "timeout": 20.0, "max_waiting": 1}) as subscriber:
            subscriber.sync()
            first = publisher.stats()
            for number in range(200):
                served.serve(PROMPT + 100 * (number % 20))
                publisher.publish()
            assert publisher.stats().sequence == first.sequence + 200
            assert served.asked == 200
            end, number = time.monotonic() + 20, 0
            while subscriber.mirror.sequence < publisher.stats().sequence:  # it learns what it lost from a later batch
                number += 1
                served.serve(OTHER + 100 * number)
                publisher.publish()
                while subscriber.poll(0.05):
                    assert time.monotonic() < end
                assert time.monotonic() < end
            assert (subscriber.num_lost, publisher.stats().num_replays > first.num_replays) == (0, True)
            assert state_of(subscriber.mirror) == contents(publisher)
            assert {medium for medium, _ in subscriber.mirror.places} >= {"GPU", "CPU"}
