"""Bytes of events, read by decoders that were written from vLLM's documentation."""

import pytest

from pagecore.index import chain_hashes
from pagecore.tiers.events.wire import EventFormatError, batch_of, decode_batch
from tests.capabilities import require
from tests.tiers.events.following import compute, ids, make
from tests.together import together

msgspec = require("msgspec")
zmq = require("zmq")

from pagecore.tiers.events import EventPublisher  # noqa: E402


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list["BlockStored | BlockRemoved | AllBlocksCleared"]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


@pytest.fixture
def cache():
    return make("window")


def received(cache, act, **options):
    """Return the frames that a subscriber gets for the changes of `act`."""
    with EventPublisher(cache, endpoint="tcp://127.0.0.1:*", interval=None, **options) as publisher:
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.linger = 0
        socket.subscribe(options.get("topic", ""))
        socket.connect(publisher.endpoint)
        try:
            while not socket.poll(10):  # the subscription reaches the publisher
                compute(cache, [1, 2, 3, 4, 5])
                cache.clear_prefix_cache()
                publisher.publish()
            while socket.poll(50):
                socket.recv_multipart()
            act()
            number = publisher.publish()
            assert socket.poll(5000)
            frames = socket.recv_multipart()
            assert int.from_bytes(frames[1], "big") == number
            return frames
        finally:
            socket.close()


def test_structs_of_vllm_read_what_is_published(cache):
    tokens = ids(11)
    topic, number, payload = received(cache, lambda: compute(cache, tokens), topic="kv@pod", rank=3)
    assert topic == b"kv@pod"
    assert len(number) == 8
    batch = msgspec.msgpack.decode(payload, type=EventBatch)
    assert batch.data_parallel_rank == 3
    hashes = chain_hashes(tokens, 4).tolist()
    full, windowed = batch.events
    assert full == BlockStored(
        hashes, None, tokens[:8], 4, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    # The first block has left the window by the end of the step.
    assert windowed.kv_cache_spec_kind == "sliding_window"
    assert windowed.kv_cache_spec_sliding_window == 6
    assert windowed.group_idx == 1
    assert windowed.block_hashes == hashes[-len(windowed.block_hashes) :]


def test_structs_of_vllm_read_removals(cache):
    tokens = ids(11)
    payload = received(cache, lambda: (compute(cache, tokens), cache.clear_prefix_cache()))[2]
    events = msgspec.msgpack.decode(payload, type=EventBatch).events
    for group in (0, 1):
        stored, removed = (
            [
                block
                for event in events
                if type(event) is kind and event.group_idx == group
                for block in event.block_hashes
            ]
            for kind in (BlockStored, BlockRemoved)
        )
        assert sorted(removed) == sorted(stored)
        assert stored
    assert {event.medium for event in events} == {"GPU"}


def test_plain_msgpack_reads_what_is_published(cache):
    msgpack = require("msgpack")
    tokens = ids(9)
    options = {"namespace": "tenant", "spans": [(2, 6, b"cat"), (6, 7, 2**200)]}
    payload = received(cache, lambda: compute(cache, tokens, **options))[2]
    timestamp, events, rank = msgpack.unpackb(payload)
    assert 1.7e9 < timestamp < 1e11
    assert rank is None
    assert next(iter(events[0])) == "type"
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": chain_hashes(tokens, 4, **options).tolist(),
        "parent_block_hash": None,
        "token_ids": tokens[:8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "tenant",
        "extra_keys": [["tenant", [b"cat", 2, 6]], [[b"cat", -2, 2], [str(2**200), 2, 3]]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def test_events_of_older_versions_get_field_names():
    stored = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2, None, "GPU"]
    as_arrays = [1.5, [stored, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]]
    as_maps = {"ts": 1.5, "events": batch_of(as_arrays).events, "data_parallel_rank": 0}
    for payload, rank in ((as_arrays, None), (as_maps, 0)):
        batch = decode_batch(msgspec.msgpack.encode(payload))
        assert (batch.timestamp, batch.rank) == (1.5, rank)
        assert [event["type"] for event in batch.events] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
        assert batch.events[0]["token_ids"] == [5, 6, 7, 8]
        assert batch.events[1]["medium"] == "GPU"


@together(
    ("content", "message"),
    [
        (None, "expected"),
        ([1.0], "expected"),
        ([True, []], "expected"),
        ([1.0, 5], "expected"),
        ([1.0, [], "zero"], "rank is 'zero'"),
        ([1.0, [["BlockMoved", 1]]], "BlockMoved"),
        ([1.0, [{"block_hashes": []}]], "expected an event"),
        ([1.0, [{"type": "BlockStored", "block_hashes": []}]], "no field token_ids"),
        ([1.0, [["BlockRemoved", 7]]], "expected a list"),
        ([1.0, [["BlockRemoved", [[1]]]]], r"a block hash is \[1\]; expected an integer"),
        ([1.0, [{"type": ["BlockRemoved"], "block_hashes": []}]], "expected an event"),
        (
            [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": 1}]],
            "expected a number for each",
        ),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [1, 0]}]], r"has .* \[1, 0\]"),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [-1]}]], "expected a number"),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "remaining_copy_counts": [True]}]], "expected a number"),
        ([float("nan"), []], "timestamp is nan; expected a finite number"),
        ([float("inf"), []], "timestamp is inf; expected a finite number"),
    ],
)
def test_other_content_is_refused(content, message):
    with pytest.raises(EventFormatError, match=message):
        decode_batch(msgspec.msgpack.encode(content))


@together(
    ("field", "value"),
    [
        ("block_hashes", [None]),
        ("block_hashes", [True]),
        ("parent_block_hash", [1]),
        ("token_ids", 5),
        ("block_size", "four"),
        ("block_size", -1),
        ("block_size", True),
        ("medium", 5),
        ("lora_name", 7),
        ("extra_keys", "abc"),
        ("group_idx", "a"),
        ("group_idx", -1),
        ("group_idx", 2**31),
        ("kv_cache_spec_kind", 5),
        ("kv_cache_spec_sliding_window", 0),
        ("kv_cache_spec_sliding_window", 2**63),
        ("kv_cache_spec_sliding_window", "w"),
    ],
)
def test_fields_of_other_types_are_refused_before_anything_is_applied(field, value):
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5, 6], "block_size": 2, field: value}
    with pytest.raises(EventFormatError, match=f"{field}|a block hash is"):
        batch_of([1.0, [event], 0])


def test_a_time_that_no_float_holds_is_refused():
    with pytest.raises(EventFormatError, match=r"timestamp is 1000.*expected a finite number"):
        batch_of([10**400, []])


@pytest.mark.parametrize("payload", [b"\xc1\x00\x00", b"\xa2\xe1\xe1", b"\x91" * 5000], ids=["type", "UTF-8", "depth"])
def test_bytes_that_are_not_msgpack_are_refused(payload):
    with pytest.raises(EventFormatError, match=f"{len(payload)} bytes is not msgpack"):
        decode_batch(payload)
