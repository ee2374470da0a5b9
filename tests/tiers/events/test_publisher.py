"""Publishers over sockets: what they send of caches, tiers and namespaces, how they end, and what they refuse."""

import sys
import threading

import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import RadixTree, chain_hashes
from tests.capabilities import require
from tests.faults import Interrupt
from tests.tiers.events.connected import change, follower_of, publisher_of, until
from tests.tiers.events.following import compute, contents, ids, make, state_of, tree_of

zmq = require("zmq")
require("msgspec")
from pagecore.tiers.events import EventPublisher, Mirror  # noqa: E402
from pagecore.tiers.events.wire import decode_batch  # noqa: E402


def test_groups_are_announced_before_they_hold_blocks():
    with publisher_of(make("state")) as publisher, follower_of(publisher) as subscriber:
        assert [event["kv_cache_spec_kind"] for event in decode_batch(publisher._batches[0][1]).events[1:]] == [
            "full_attention",
            "mamba",
        ]
        subscriber.sync()
        assert subscriber.mirror.kind(1) == ("mamba", None)
        assert subscriber.mirror.places == []


def test_a_full_journal_publishes_the_whole_state():
    cache = make(num_blocks=60)
    with publisher_of(cache, max_bytes=500) as publisher, follower_of(publisher) as subscriber:
        for seed in range(20):
            compute(cache, ids(9, seed))
        number = publisher.publish()
        assert publisher.stats().num_overflows == 1
        events = decode_batch(publisher._batches[-1][1]).events
        assert events[0]["type"] == "AllBlocksCleared"
        subscriber.mirror.apply(number, decode_batch(publisher._batches[-1][1]))
        assert state_of(subscriber.mirror) == contents(publisher)
        assert len(subscriber.mirror.blocks()) == 40


@pytest.mark.parametrize("by", ["publish", "snapshot"])
def test_changes_that_could_not_be_sent_are_followed_by_the_whole_state(by):
    def fails(_):
        raise MemoryError

    cache = make()
    with publisher_of(cache) as publisher, follower_of(publisher) as subscriber:
        change(cache, publisher, 1)
        compute(cache, ids(9, 2))
        encode, publisher._encode = publisher._encode, fails
        with pytest.raises(MemoryError):
            publisher.publish()
        publisher._encode = encode
        if by == "snapshot":
            subscriber.sync()
        assert publisher.publish() == 2
        assert change(cache, publisher, 3) == 3
        mirror = Mirror()
        for number, payload in publisher._batches:
            mirror.apply(number, decode_batch(payload))
        assert state_of(mirror) == contents(publisher)
        assert len(mirror.blocks()) == 6
        assert publisher.stats().num_overflows == 1


@pytest.mark.parametrize("namespace", ["tenant \ud800", "\udfff", ("a", "\ud800")])
def test_a_namespace_that_utf_8_cannot_encode_is_published(namespace):
    cache = make()
    compute(cache, ids(9, 1), namespace=namespace)
    with publisher_of(cache) as publisher, follower_of(publisher) as subscriber:
        compute(cache, ids(9, 2), namespace=namespace)
        publisher.publish()
        subscriber.sync()
        assert state_of(subscriber.mirror) == contents(publisher)
        assert subscriber.mirror.match(ids(9, 2), namespace=namespace) == 8


def test_namespaces_with_and_without_a_surrogate_stay_apart_in_a_mirror_by_tokens():
    names = ["t\ud800", r"t\ud800", r"t\\ud800", "t\\\ud800", r"t\d", r"t\\d", "t"]
    for name in names:
        cache = make()
        compute(cache, ids(9, 1), namespace=name)
        with publisher_of(cache) as publisher:
            mirror = Mirror(by_tokens=True)
            for number, payload in publisher._batches:
                mirror.apply(number, decode_batch(payload))
        found = [mirror.match(ids(9, 1), namespace=other) for other in names]
        assert found == [8 if other == name else 0 for other in names]


@pytest.mark.parametrize("step", ["_publish_state", "thread"])
def test_a_publisher_that_cannot_start_leaves_the_cache_to_another(step, monkeypatch):
    def fails(*_):
        raise MemoryError

    cache = make()
    with monkeypatch.context() as patch:
        if step == "thread":
            patch.setattr(threading.Thread, "start", fails)
        else:
            patch.setattr(EventPublisher, step, fails)
        with pytest.raises(MemoryError):
            publisher_of(cache)
    with publisher_of(cache) as publisher:
        assert change(cache, publisher, 1) == 1


def test_a_close_whose_last_batch_fails_leaves_the_cache_to_another_publisher():
    def fails(_):
        raise MemoryError

    cache = make()
    publisher = publisher_of(cache)
    publisher._encode = fails
    compute(cache, ids(9, 1))
    with pytest.raises(MemoryError):
        publisher.close()
    with publisher_of(cache) as publisher:
        assert change(cache, publisher, 2) == 1


def failing(publisher):
    """Make the thread of a publisher end by an error."""

    def fails(_):
        raise MemoryError("no memory for a batch")

    publisher._encode = fails


def test_an_error_that_ends_the_thread_is_in_the_statistics_and_close_raises_it():
    cache = make()
    publisher = publisher_of(cache, interval=0.002)
    assert publisher.stats().error is None
    failing(publisher)
    compute(cache, ids(9, 1))
    until(lambda: publisher.stats().error is not None)
    assert publisher.stats().error == "MemoryError: no memory for a batch"
    with pytest.raises(MemoryError, match="no memory for a batch"):
        publisher.close()
    publisher.close()  # said once
    with publisher_of(cache) as publisher:
        assert change(cache, publisher, 2) == 1


@pytest.mark.parametrize("other", [True, False])
def test_an_error_of_the_thread_hides_no_error_that_the_caller_has(other):
    def follow(publisher):
        with publisher:
            failing(publisher)
            compute(cache, ids(9, 1))
            until(lambda: publisher.stats().error is not None)
            if other:
                raise KeyError
            publisher.publish()

    cache = make()
    publisher = publisher_of(cache, interval=0.002)
    with pytest.raises(KeyError if other else MemoryError):
        follow(publisher)
    publisher.close()
    assert not tree_of(cache).has_journal


def test_an_interrupted_close_waits_for_the_thread_before_it_closes_the_sockets(monkeypatch):
    join, interrupts = threading.Thread.join, [Interrupt]

    def interrupted(thread, timeout=None):
        if interrupts:
            raise interrupts.pop()
        join(thread, timeout)

    cache = make()
    publisher = publisher_of(cache)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(Interrupt):
        publisher.close()
    assert (publisher._thread.is_alive(), publisher._error) == (False, None)
    with publisher_of(cache) as publisher:
        assert change(cache, publisher, 1) == 1


def test_the_thread_publishes_by_itself_and_ends():
    cache = make()
    before = set(threading.enumerate())
    publisher = publisher_of(cache, interval=0.002)
    with follower_of(publisher) as subscriber:
        compute(cache, ids(9))
        until(lambda: publisher.stats().sequence == 1)
        assert subscriber.sync() == 1
        assert publisher.stats().num_snapshots == 1
    compute(cache, ids(9, 5))
    publisher.close()
    assert publisher.stats().sequence == 2
    publisher.close()
    assert set(threading.enumerate()) == before
    assert not tree_of(cache).has_journal
    with pytest.raises(UnsupportedOption, match="closed"):
        publisher.publish()


def test_media_have_blocks_of_their_own():
    cache, host = make(), RadixTree(4)
    with publisher_of(cache, [(host, "CPU")]) as publisher, follower_of(publisher) as subscriber:
        tokens = ids(12)
        compute(cache, tokens[:9])
        host.insert(tokens, [1, 2, 3])
        subscriber.sync()
        hashes = chain_hashes(tokens, 4).tolist()
        assert list(subscriber.mirror.blocks("GPU")) == hashes[:2]
        assert list(subscriber.mirror.blocks("CPU")) == hashes
        assert subscriber.mirror.match(tokens) == 8
        assert subscriber.mirror.match(tokens, media=("GPU", "CPU")) == 12
        cache.clear_prefix_cache()
        host.evict("full", 1)
        subscriber.sync()
        assert subscriber.mirror.match(tokens) == 0
        assert subscriber.mirror.match(tokens, media="CPU") == 8


# Refusals.


def test_a_cache_without_a_prefix_cache_is_refused():
    with pytest.raises(UnsupportedOption, match="prefix_cache=False"):
        publisher_of(make(prefix_cache=False))


def test_a_second_publisher_is_refused_and_leaves_the_first():
    cache, host = make(), RadixTree(4)
    with publisher_of(cache, [(host, "CPU")]) as publisher:
        with pytest.raises(UnsupportedOption, match="close the publisher that started it"):
            publisher_of(cache)
        host.insert(ids(8), [1, 2])
        assert publisher.publish() == 1
    other = RadixTree(4)
    other.start_journal()
    with pytest.raises(UnsupportedOption, match="has a journal already"):
        publisher_of(cache, [(other, "DISK")])
    assert not tree_of(cache).has_journal


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (5, "expected a host tier"),
        ([5], "expected a host tier"),
        ([(5, "CPU")], "pairs of a RadixTree and a medium"),
        ([(RadixTree(4), 5)], "pairs of a RadixTree and a medium"),
        ([(RadixTree(8), "CPU")], "blocks of 8 tokens"),
        ([(RadixTree(4, windows=(3,)), "CPU")], "has components"),
    ],
)
def test_wrong_tiers_are_refused(tiers, message):
    with pytest.raises(UnsupportedOption, match=message):
        publisher_of(make(), tiers)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"endpoint": "5557"}, UnsupportedOption, "endpoint is '5557'"),
        ({"endpoint": "tcp://*:port"}, UnsupportedOption, "cannot be bound"),
        ({"replay": "udp://127.0.0.1:1"}, UnsupportedOption, "replay 'udp"),
        ({"buffer": 0}, ShapeError, "buffer is 0"),
        ({"rank": -1}, ShapeError, "rank is -1"),
        ({"interval": 0}, UnsupportedOption, "interval is 0"),
        ({"max_bytes": 0}, ShapeError, "max_bytes is 0"),
    ],
)
def test_wrong_options_are_refused_and_leave_nothing(options, error, message):
    cache, before = make(), set(threading.enumerate())
    with pytest.raises(error, match=message):
        publisher_of(cache, **options)
    assert not tree_of(cache).has_journal
    assert set(threading.enumerate()) == before


def test_an_address_in_use_is_named():
    with publisher_of(make()) as publisher, pytest.raises(UnsupportedOption, match="another process uses it"):
        publisher_of(make(), replay=publisher.replay)


def test_missing_libraries_are_named_with_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UnsupportedOption, match=r"pip install 'pagecore\[tiers\]'"):
        publisher_of(make())
    monkeypatch.setitem(sys.modules, "msgspec.msgpack", None)
    with pytest.raises(UnsupportedOption, match="msgspec"):
        publisher_of(make())
