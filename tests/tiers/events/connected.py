"""Publishers and subscribers on loopback: construction, changes, and waits."""

import time

from tests.capabilities import require
from tests.tiers.events.following import compute, ids

zmq = require("zmq")
require("msgspec")
from pagecore.tiers.events import EventPublisher, Subscriber  # noqa: E402

ANY = "tcp://127.0.0.1:*"


def publisher_of(cache, tiers=None, **options):
    return EventPublisher(cache, tiers, **{"endpoint": ANY, "replay": ANY, "snapshot": ANY, "interval": None} | options)


def follower_of(publisher, **options):
    given = {"replay": publisher.replay, "snapshot": publisher.snapshot, "timeout": 20.0} | options
    return Subscriber(publisher.endpoint, **given)


def change(cache, publisher, seed):
    compute(cache, ids(9, seed))
    return publisher.publish()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def connected(cache, publisher, subscriber):
    """Publish until the subscriber gets batches."""
    seeds = iter(range(1000, 10_000))
    until(lambda: change(cache, publisher, next(seeds)) >= 0 and subscriber.poll(0.01) > 0)
    assert subscriber.wait_for(publisher.stats().sequence)
