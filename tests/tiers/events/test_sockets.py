"""Subscribers over sockets: snapshots, replays, polls and their bounds, and answers that are refused."""

import threading

import pytest

from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from tests.capabilities import require
from tests.tiers.events.connected import change, connected, follower_of, publisher_of, until
from tests.tiers.events.following import compute, contents, ids, make, state_of

zmq = require("zmq")
require("msgspec")
from pagecore.tiers.events import Subscriber  # noqa: E402
from pagecore.tiers.events.wire import decode_batch, encoder, sequence_bytes  # noqa: E402


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
