"""The format of events: msgpack, as vLLM's `KVEventBatch`.

A message has three frames: topic, sequence number (8 bytes, big-endian), payload. The payload is
``[timestamp, [event, ...], rank]``; an event is a map whose first key is "type". Older versions of vLLM, and SGLang,
send events as arrays that begin with the type, and some versions send the payload as a map: `decode_batch` reads all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.storage.checks import INT32_MAX, shown

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
COPIES_LEFT = "remaining_copy_counts"
# Sequence number after the last batch of a replay or snapshot: -1.
END = b"\xff" * 8
# A lone surrogate, or the spelling of one.
SURROGATE = re.compile(r"[\ud800-\udfff]|\\ud[89a-f][0-9a-f]{2}")
Event = dict[str, Any]
BlockHash = int | bytes | str

# Fields in the order in which events without field names have them.
FIELDS = {
    STORED: (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    REMOVED: ("block_hashes", "medium", "group_idx"),
    CLEARED: (),
}
REQUIRED = {STORED: ("block_hashes", "token_ids", "block_size"), REMOVED: ("block_hashes",), CLEARED: ()}


class EventFormatError(PagecoreError, ValueError):
    """Bytes that are not a batch of events."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that were published together.

    Attributes
    ----------
    timestamp : float
        Seconds since the epoch.
    events : list of dict
        Each with the key "type".
    rank : int or None
        Data-parallel rank of the publisher.
    """

    timestamp: float
    events: list[Event]
    rank: int | None = None


def optional(module: str, extra: str = "tiers") -> Any:
    """Import an optional library; raise UnsupportedOption that names the extra if it is missing."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedOption(f"{module} is not installed ({error}); run pip install 'pagecore[{extra}]'") from None


def encoder() -> Callable[[object], bytes]:
    """Return a function that encodes msgpack."""
    encode: Callable[[object], bytes] = optional("msgspec.msgpack").Encoder().encode
    return encode


def sequence_bytes(number: int) -> bytes:
    """Return a sequence number as its frame."""
    return number.to_bytes(8, "big")


def encodable(name: str) -> str:
    r"""Return a namespace as UTF-8 can have it; different namespaces stay different.

    A lone surrogate is spelt as ``\ud800``. In a name with a lone surrogate, or with such a spelling, each backslash
    becomes two.
    """
    if not SURROGATE.search(name):
        return name
    return name.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode()


def decode_batch(payload: bytes) -> Batch:
    """Decode a payload of any version of the format.

    Returns
    -------
    Batch
        Its events have field names, also where the payload has none.

    Raises
    ------
    EventFormatError
        The payload is not a batch of events.
    """
    msgspec = optional("msgspec")
    try:
        return batch_of(msgspec.msgpack.decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EventFormatError(f"the payload of {len(payload)} bytes is not msgpack ({error})") from None


def batch_of(content: object) -> Batch:
    """Return the batch of a decoded payload, as `decode_batch`; also of one read from JSON."""
    if isinstance(content, Mapping):
        content = [content.get("ts"), content.get("events"), content.get("data_parallel_rank")]
    if not isinstance(content, list | tuple) or len(content) < 2:
        raise EventFormatError("expected [timestamp, events, rank]")
    timestamp, events, rank = content[0], content[1], content[2] if len(content) > 2 else None
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not isinstance(events, list | tuple):
        raise EventFormatError("expected [timestamp, events, rank]")
    if not abs(timestamp) <= sys.float_info.max:  # nor NaN
        raise EventFormatError(f"timestamp is {shown(timestamp)}; expected a finite number of seconds")
    if rank is not None and not isinstance(rank, int):
        raise EventFormatError(f"rank is {shown(rank)}; expected an integer or nothing")
    return Batch(float(timestamp), [_event_of(event) for event in events], rank)


def _event_of(event: object) -> Event:
    if isinstance(event, list | tuple) and event and isinstance(event[0], str):
        fields = FIELDS.get(event[0], ())
        event = {"type": event[0], **dict(zip(fields, event[1:], strict=False))}
    kind = event.get("type") if isinstance(event, Mapping) else None
    if not isinstance(event, Mapping) or not isinstance(kind, str) or kind not in FIELDS:
        raise EventFormatError(f"expected an event with type {', '.join(FIELDS)}, got {str(event)[:60]}")
    for field in REQUIRED[kind]:
        if field not in event:
            raise EventFormatError(f"{kind} has no field {field}")
    read = dict(event)
    for field in FIELDS[kind]:
        is_valid, expected = CHECKS.get(field, (_is_anything, ""))
        if field in read and not is_valid(read[field]):
            raise EventFormatError(f"{kind} has {field} {shown(read[field])}; expected {expected}")
    for block in read.get("block_hashes", ()):
        if not _is_hash(block):
            raise EventFormatError(f"a block hash is {shown(block)}; expected an integer, bytes or a string")
    _check_copies(read)
    return read


def _check_copies(event: Event) -> None:
    """Check the copies of each block that a removal leaves: a field that some publishers add to their maps."""
    counts = event.get(COPIES_LEFT)
    if counts is None:
        return
    if not _is_list(counts) or len(counts) != len(event.get("block_hashes", ())) or not all(map(_is_count, counts)):
        raise EventFormatError(
            f"{event['type']} has {COPIES_LEFT} {shown(counts)}; expected a number for each block hash, or nothing"
        )


def _is_anything(_value: object) -> bool:
    return True


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_hash(value: object) -> bool:
    return isinstance(value, BlockHash) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT32_MAX


# Predicate on the value of each field, and a description of valid values.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_hashes": (_is_list, "a list"),
    "parent_block_hash": (lambda value: value is None or _is_hash(value), "an integer, bytes, a string or nothing"),
    "token_ids": (_is_list, "a list"),
    "block_size": (_is_count, "a number of tokens"),
    "medium": (_is_name, "a string or nothing"),
    "lora_name": (_is_name, "a string or nothing"),
    "extra_keys": (lambda value: value is None or _is_list(value), "a list or nothing"),
    "group_idx": (lambda value: value is None or _is_count(value), "a number or nothing"),
    "kv_cache_spec_kind": (_is_name, "a string or nothing"),
    "kv_cache_spec_sliding_window": (
        lambda value: value is None or _is_count(value, 1),
        "a number of tokens above 0, or nothing",
    ),
}
