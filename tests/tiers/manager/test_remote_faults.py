"""Faults of a Redis server and of the way to it, through Tiers: each ends in a miss or in the right bytes."""

import time

import numpy as np
import pytest

from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Breaker, Deadline, Guard
from pagecore.tiers.remote.resp import RespStore
from tests.tiers.leaks import nothing_left
from tests.tiers.manager.served import Served
from tests.tiers.proxy import Proxy

PROMPT = np.arange(33, dtype=np.int32)


@pytest.fixture
def leaks(private_resp):
    """Fail if a thread or descriptor is left."""
    with nothing_left():
        yield


@pytest.fixture
def proxy(private_resp, leaks):
    with Proxy(private_resp.server.port) as proxy:
        yield proxy


def redis(url, deadline=20.0):
    """Return a function that opens a guarded store for a fingerprint."""

    def make(fingerprint):
        store = RespStore(url, fingerprint=fingerprint, connections=1, timeout=20.0)
        return Guard(store, deadline=Deadline(deadline), breaker=Breaker(failures=100, first_pause=0.02))

    return make


def fill(url):
    with Served([redis(url)]) as served:
        served.serve(PROMPT)
        served.flush()


def serve_until_loaded(served, limit=20.0):
    """Serve a prompt that only the store has, until the store works again."""
    end = time.monotonic() + limit
    while True:
        served.forget()
        if served.serve(PROMPT).loaded_tokens == {"EXTERNAL": 32}:
            return
        assert time.monotonic() < end, "the store has not come back"


# The answers to a lookup take fewer than 400 bytes, those to a load 4 KiB.
@pytest.mark.parametrize(
    "fault",
    [{"flip_at": 1000}, {"cut_after": 1000}, {"cut_after": 2}, {"hang_after": 1000}, {"hang_after": 0}],
    ids=str,
)
def test_the_way_to_the_server_fails(private_resp, proxy, fault):
    fill(private_resp.url)
    deadline = 0.15 if "hang_after" in fault else 20.0
    with Served([redis(f"redis://127.0.0.1:{proxy.port}", deadline)]) as served:
        proxy.reset(**fault)
        assert served.serve(PROMPT).num_tokens in range(0, 32, 4)
        proxy.reset()
        proxy.released.set()
        # A payload that differed from its sum was deleted: it is computed and stored again.
        serve_until_loaded(served)


def test_a_connection_that_is_refused(private_resp, proxy):
    fill(private_resp.url)
    with Served([redis(f"redis://127.0.0.1:{proxy.port}")]) as served:
        proxy.refuse()
        assert served.serve(PROMPT).num_tokens == 0
        proxy.accept()
        serve_until_loaded(served)


def test_a_server_that_stops_and_goes_on(private_resp, leaks):
    fill(private_resp.url)
    with Served([redis(private_resp.url, 0.15)]) as served:
        private_resp.stop()
        try:
            assert served.serve(PROMPT).num_tokens == 0
        finally:
            private_resp.resume()
        serve_until_loaded(served)


def test_a_server_that_dies_and_comes_back_empty(private_resp, leaks):
    fill(private_resp.url)
    with Served([redis(private_resp.url)]) as served:
        private_resp.kill()
        assert served.serve(PROMPT).num_tokens == 0
        private_resp.start()
        served.forget()
        # The new server is empty; the prompt is computed and stored once more.
        assert served.serve(PROMPT).num_tokens == 0
        serve_until_loaded(served)


def test_a_dead_server_does_not_hide_the_disk(private_resp, leaks, tmp_path):
    def disk(fingerprint):
        return DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20, threads=2)

    with Served([disk, redis(private_resp.url, 0.15)]) as served:
        served.serve(PROMPT)
        served.forget()
        private_resp.kill()
        assert served.serve(PROMPT).loaded_tokens == {"DISK": 32}
