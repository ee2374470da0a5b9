"""Publisher and subscriber over sockets: gaps, replays, snapshots, slow subscribers, restarts, refusals."""

import sys
import threading
import time

import pytest

from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.index import RadixTree, chain_hashes
from tests.capabilities import require
from tests.faults import Interrupt
from tests.tiers.events.following import compute, contents, ids, make, state_of, tree_of

zmq = require("zmq")
require("msgspec")

from pagecore.tiers.events import EventPublisher, Mirror, Subscriber  # noqa: E402
from pagecore.tiers.events.mirror import MissingBatch  # noqa: E402
from pagecore.tiers.events.wire import decode_batch, encoder, sequence_bytes  # noqa: E402

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


def test_a_late_subscriber_starts_from_a_snapshot_and_follows():
    cache = make()
    compute(cache, ids(13))
    with publisher_of(cache) as publisher:
        change(cache, publisher, 1)
        with follower_of(publisher) as subscriber:
            assert subscriber.sync() == publisher.stats().sequence == 1
            assert state_of(subscriber.mirror) == contents(publisher) != {}
            connected(cache, publisher, subscriber)
            cache.clear_prefix_cache()
            assert subscriber.wait_for(publisher.publish())
            assert subscriber.mirror.places == []
            assert contents(publisher) == {}


def test_a_snapshot_is_the_state_after_its_number_also_in_several_frames(monkeypatch):
    monkeypatch.setattr("pagecore.tiers.events.publisher.SNAPSHOT_EVENTS", 2)
    cache = make(num_blocks=40)
    with publisher_of(cache) as publisher, follower_of(publisher) as subscriber:
        for seed in range(6):
            compute(cache, ids(9, seed))
        assert subscriber.sync() == 1  # the changes became batch 1 first
        assert state_of(subscriber.mirror) == contents(publisher)
        assert len(subscriber.mirror.blocks()) == 12
        cache.clear_prefix_cache()
        assert subscriber.sync() == 2
        assert subscriber.mirror.places == []


def test_replays_have_vllm_s_form():
    cache = make()
    with publisher_of(cache, buffer=3, topic="kv") as publisher:
        for seed in range(5):
            change(cache, publisher, seed)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(publisher.replay)
            for first, expected in ((0, [3, 4, 5]), (4, [4, 5]), (6, [])):
                socket.send_multipart([b"", first.to_bytes(8, "big")])
                numbers = []
                while True:
                    assert socket.poll(20_000)
                    empty, topic, number, payload = socket.recv_multipart()
                    assert (empty, topic) == (b"", b"kv" if payload else b"")
                    if not payload:
                        assert number == (-1).to_bytes(8, "big", signed=True)
                        break
                    assert decode_batch(payload).events
                    numbers.append(int.from_bytes(number, "big"))
                assert numbers == expected
            socket.send_multipart([b"", b"not a number"])
            assert socket.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        finally:
            socket.close()
        assert publisher.stats().num_replays == 3


def test_a_replay_is_complete_for_a_client_that_reads_late():
    cache = make(num_blocks=60)
    with publisher_of(cache, buffer=40) as publisher:
        for seed in range(60):
            change(cache, publisher, seed)
        last = publisher.stats().sequence
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger, socket.rcvhwm = 0, 1
        try:
            socket.connect(publisher.replay)
            for number in range(4):
                socket.send_multipart([b"", (0).to_bytes(8, "big")])
                until(lambda so_far=number: publisher.stats().num_replays > so_far)
                numbers = []
                while (answer := socket.recv_multipart())[-1]:
                    numbers.append(int.from_bytes(answer[-2], "big"))
                assert numbers == list(range(last - 39, last + 1))
        finally:
            socket.close()


class Endless:
    """Socket of a publisher that has sent the next batch whenever the subscriber looks."""

    closed = True  # there is nothing to end

    def __init__(self):
        self.payload = encoder()([1.0, [], 0])
        self.number = -1

    def poll(self, _milliseconds):
        assert self.number < 100_000
        return 1

    def recv_multipart(self):
        self.number += 1
        return [b"", sequence_bytes(self.number), self.payload]

    def close(self):
        pass


@pytest.fixture
def flooded():
    with Subscriber("tcp://127.0.0.1:1", timeout=0.05) as subscriber:
        subscriber._socket.close()
        subscriber._socket = Endless()
        yield subscriber


def test_a_poll_returns_although_the_publisher_is_faster(flooded):
    assert flooded.poll() == 1024
    assert flooded.poll(1.0, max_messages=3) == 3
    assert flooded.mirror.sequence == flooded._socket.number == 1026


def test_a_wait_ends_at_its_timeout_although_the_publisher_is_faster(flooded):
    assert not flooded.wait_for(10**9)
    assert flooded.mirror.sequence > 0


def test_messages_beyond_the_bound_are_applied_by_the_next_poll():
    cache = make(num_blocks=60)
    with publisher_of(cache) as publisher, follower_of(publisher) as subscriber:
        connected(cache, publisher, subscriber)
        before = publisher.stats().sequence
        for seed in range(5):
            change(cache, publisher, seed)
        assert subscriber.poll(20.0, max_messages=1) == 1
        assert subscriber.mirror.sequence == before + 1
        assert subscriber.wait_for(before + 5)
        assert state_of(subscriber.mirror) == contents(publisher)


@pytest.mark.parametrize(
    "arguments",
    [{"timeout": -1.0}, {"timeout": float("nan")}, {"timeout": "1"}, {"max_messages": 0}, {"max_messages": 1.5}],
)
def test_invalid_arguments_of_a_poll_are_refused_before_anything_is_received(flooded, arguments):
    with pytest.raises(ShapeError, match=next(iter(arguments))):
        flooded.poll(**arguments)
    assert flooded._socket.number == -1


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


@pytest.mark.parametrize("frames", [[b"x"], [b"12345678", b"y"][::-1], [b"", b"1234567", b"z"]])
def test_an_answer_that_is_not_of_a_publisher_is_named(frames):
    with zmq.Context.instance().socket(zmq.ROUTER) as server, publisher_of(make()) as publisher:
        port = server.bind_to_random_port("tcp://127.0.0.1")

        def answer():
            way = server.recv_multipart()[0]
            server.send_multipart([way, *frames])

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            Subscriber(publisher.endpoint, snapshot=f"tcp://127.0.0.1:{port}", timeout=10.0) as subscriber,
            pytest.raises(DeviceError, match="frames that are not a batch"),
        ):
            subscriber.sync()
        thread.join()


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
        with pytest.raises(UnsupportedOption, match="has a journal already"):
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


def test_subscribers_refuse_what_they_cannot_ask():
    with publisher_of(make()) as publisher:
        with Subscriber(publisher.endpoint) as subscriber:
            with pytest.raises(UnsupportedOption, match="snapshot is None"):
                subscriber.sync()
            with pytest.raises(UnsupportedOption, match="replay is None"):
                subscriber.catch_up()
        alone = Subscriber(publisher.endpoint, snapshot="tcp://127.0.0.1:1", timeout=0.02)
        with alone, pytest.raises(DeviceError, match=r"does not answer within 0\.02 s"):
            alone.sync()
