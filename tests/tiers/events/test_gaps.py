"""Batches that a subscriber has not received, and publishers that start again: replays and snapshots."""

import time

import pytest

from tests.capabilities import require
from tests.tiers.events.connected import change, connected, follower_of, publisher_of, until
from tests.tiers.events.following import compute, contents, ids, make, state_of

zmq = require("zmq")
require("msgspec")
from pagecore.tiers.events import Mirror  # noqa: E402
from pagecore.tiers.events.mirror import MissingBatch  # noqa: E402
from pagecore.tiers.events.wire import decode_batch  # noqa: E402


def test_lost_batches_are_replayed():
    cache = make()
    with publisher_of(cache) as publisher, follower_of(publisher, snapshot=None) as subscriber:
        connected(cache, publisher, subscriber)
        subscriber._socket.unsubscribe(b"")
        until(lambda: change(cache, publisher, 7) and not subscriber.poll(0.02))
        subscriber._socket.subscribe(b"")
        connected(cache, publisher, subscriber)
        assert state_of(subscriber.mirror) == contents(publisher)
        assert subscriber.num_lost == 0


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_batches_that_are_no_longer_buffered_need_a_snapshot(has_snapshot):
    cache = make(num_blocks=60)
    with publisher_of(cache, buffer=1) as publisher:
        options = {} if has_snapshot else {"snapshot": None}
        with follower_of(publisher, **options) as subscriber:
            subscriber.mirror.sequence = 0
            for seed in range(4):
                change(cache, publisher, seed)
            subscriber._receive(4, publisher._batches[-1][1])
            assert subscriber.mirror.sequence == 4
            assert (state_of(subscriber.mirror) == contents(publisher)) == has_snapshot
            assert subscriber.num_lost == (0 if has_snapshot else 3)


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_replay_with_a_broken_batch_needs_a_snapshot(has_snapshot):
    cache = make(num_blocks=60)
    with publisher_of(cache) as publisher:
        options = {} if has_snapshot else {"snapshot": None}
        with follower_of(publisher, **options) as subscriber:
            subscriber.mirror.sequence = 0
            for seed in range(4):
                change(cache, publisher, seed)
            publisher._batches[2] = (2, b"broken")
            subscriber._receive(4, publisher._batches[-1][1])
            assert subscriber.mirror.sequence == 4
            assert (state_of(subscriber.mirror) == contents(publisher)) == has_snapshot
            assert subscriber.num_lost == (0 if has_snapshot else 1)


def test_what_a_replay_still_has_is_applied_after_a_gap():
    cache = make(num_blocks=60)
    with publisher_of(cache, buffer=3) as publisher, follower_of(publisher, snapshot=None) as subscriber:
        for seed in range(6):
            change(cache, publisher, seed)
        subscriber._receive(6, publisher._batches[-1][1])  # 4 to 6 are there, 0 to 3 are not
        assert (subscriber.mirror.sequence, subscriber.num_lost) == (6, 4)
        assert [subscriber.mirror.match(ids(9, seed)) for seed in range(6)] == [0, 0, 0, 8, 8, 8]
        subscriber.mirror.reset()
        with pytest.raises(MissingBatch, match="batch 4 follows 3, but the last one applied is -1"):
            subscriber.catch_up()


def test_a_publisher_that_starts_again_before_its_old_time_is_followed(monkeypatch):
    cache, other = make(num_blocks=60), make(num_blocks=60)
    with publisher_of(cache) as publisher:
        for seed in range(3):
            change(cache, publisher, seed)
        monkeypatch.setattr(time, "time", lambda: 1.0)  # the clock was set back
        with publisher_of(other) as again, follower_of(again, snapshot=None) as subscriber:
            for number, payload in publisher._batches:
                subscriber._receive(number, payload)
            change(other, again, 7)
            for number, payload in again._batches:
                subscriber._receive(number, payload)
            assert state_of(subscriber.mirror) == contents(again)
            assert (subscriber.mirror.sequence, subscriber.num_lost) == (1, 0)


def test_a_replay_that_breaks_after_the_batch_that_came_loses_none():
    cache = make(num_blocks=60)
    with publisher_of(cache) as publisher, follower_of(publisher, snapshot=None) as subscriber:
        subscriber.mirror.sequence = 0
        for seed in range(4):
            change(cache, publisher, seed)
        payload = publisher._batches[2][1]
        publisher._batches[-1] = (4, b"broken")
        subscriber._receive(2, payload)
        assert (subscriber.mirror.sequence, subscriber.num_lost) == (3, 0)


def test_a_slow_subscriber_loses_batches_and_never_blocks_the_cache(tmp_path):
    cache = make(num_blocks=400, max_tokens_per_sequence=1024)
    publisher = publisher_of(cache, endpoint=f"ipc://{tmp_path}/events", max_waiting=1)
    with publisher, follower_of(publisher, max_waiting=1) as subscriber:
        connected(cache, publisher, subscriber)
        before = publisher.stats()
        for seed in range(300):  # more bytes than the buffers of a Unix socket hold
            compute(cache, ids(1000, seed))
            publisher.publish()
        assert publisher.stats().sequence == before.sequence + 300
        assert publisher.stats().num_bytes > before.num_bytes + 1_000_000
        connected(cache, publisher, subscriber)
        assert state_of(subscriber.mirror) == contents(publisher)
        assert publisher.stats().num_replays > before.num_replays
        assert subscriber.num_lost == 0


def test_a_restarted_publisher_starts_at_0_and_its_subscribers_follow():
    cache = make()
    mirror = Mirror()
    with publisher_of(cache, snapshot=None) as publisher:
        for seed in range(4):
            change(cache, publisher, seed)
        for number, payload in publisher._batches:
            mirror.apply(number, decode_batch(payload))
        assert mirror.sequence == 4
        address = publisher.endpoint
        with follower_of(publisher) as subscriber:
            subscriber.mirror = mirror
    cache.clear_prefix_cache()
    with publisher_of(cache) as again, follower_of(again) as subscriber:
        subscriber.mirror = mirror
        change(cache, again, 9)
        subscriber._receive(1, again._batches[-1][1])
        assert subscriber.mirror.sequence == 1
        assert state_of(mirror) == contents(again) != {}
        assert again.endpoint != address


@pytest.mark.parametrize("sockets", [("replay", "snapshot"), ("replay",), ("snapshot",)], ids="-".join)
@pytest.mark.parametrize("ahead", [0, 6])
def test_a_new_publisher_that_sent_as_many_batches_before_its_subscriber_is_back_is_followed(tmp_path, sockets, ahead):
    """The first batch that arrives has the next number, or a later one, and its publisher another history."""
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay", "snapshot")}
    old, new = make(), make()
    publisher = publisher_of(old, **addresses)
    with follower_of(publisher, **{name: None for name in ("replay", "snapshot") if name not in sockets}) as subscriber:
        connected(old, publisher, subscriber)
        while publisher.stats().sequence < 3:
            change(old, publisher, publisher.stats().sequence)
        until(lambda: subscriber.poll(0.01) >= 0 and subscriber.mirror.sequence == publisher.stats().sequence)
        last = publisher.stats().sequence
        publisher.close()
        with publisher_of(new, **addresses) as again:
            while again.stats().sequence < last + ahead:  # before the subscriber connects
                change(new, again, 50 + again.stats().sequence)
            connected(new, again, subscriber)
            assert state_of(subscriber.mirror) == contents(again)
            assert subscriber.num_lost == 0
