"""Requests from the fields of a JSON object, with hash ids or token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagecore.serving.replay.trace_file import TraceError
from pagecore.serving.replay.trace_request import BAILIAN_FIELD, REQUEST_TOKENS_MAX, TraceRequest, TraceUnits
from pagecore.serving.replay.trace_source import TracePlace
from pagecore.storage.checks import INT32_MAX, shown

__all__ = [
    "checked_lengths",
    "has_token_ids",
    "is_array",
    "not_an_object",
    "parse_json",
    "request_of_fields",
    "request_of_token_ids",
    "text_field",
    "text_refusal",
]

TOKEN_FIELDS = ("token_ids", "prompt_token_ids", "tokens")
# Fields with text: those of ShareGPT, of requests to an engine's server, and of collections of chats.
TEXT_FIELDS = ("conversations", "conversation", "messages", "prompt", "text")
ARRAY_REMEDY = ": jq -c '.[]' FILE writes those of an array"
# Ids of the tokens that a replay generates are larger.
TOKEN_ID_MAX = (1 << 30) - 1


def parse_json(place: TracePlace, text: Any) -> Any:
    """Return the JSON value of a line; a record of a list is one. Raise TraceError if the line is malformed."""
    if not isinstance(text, bytes):
        return text
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        packed = text.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))  # gzip, zstd
        remedy = "; decompress it first, or pass '-' and pipe it in" if packed else ""
        raise place.refusal("not UTF-8 text" + remedy) from None
    except RecursionError:
        raise place.refusal("not JSON: it is nested too deeply") from None
    except ValueError as error:
        remedy = ARRAY_REMEDY if text.lstrip().startswith(b"[") else ""
        raise place.refusal(f"not JSON: {str(error)[:80]}; expected one JSON object on each line{remedy}") from None


def request_of_fields(place: TracePlace, fields: Any, number: int, units: TraceUnits) -> TraceRequest:
    """Return the request of an object with `timestamp`, `input_length`, `output_length` and `hash_ids`.

    Raises
    ------
    TraceError
        A field is missing or malformed; the message names the trace and the line.
    """
    if not isinstance(fields, Mapping):
        raise not_an_object(place, fields)
    if "hash_ids" not in fields and (text := text_field(fields)) is not None:
        raise text_refusal(place, text)
    hash_block, units = units.of_line(fields)
    milliseconds = _milliseconds(place, _field(place, fields, "timestamp"), units)
    lengths = [_field(place, fields, name) for name in ("input_length", "output_length")]
    input_length, output_length = checked_lengths(place, *lengths)
    hash_ids = _hash_ids(place, fields, input_length, output_length, hash_block)
    chat, earlier = _chats(place, fields)
    return TraceRequest(
        number, place.number, milliseconds, input_length, output_length, hash_ids, hash_block, None, None, chat, earlier
    )


def text_field(fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field of text or of messages; None if a line has none, or only ids under such a name."""
    return next((name for name in TEXT_FIELDS if name in fields and not _are_ids(fields[name])), None)


def _are_ids(content: Any) -> bool:
    return isinstance(content, list) and len(content) > 0 and isinstance(content[0], int)


def is_array(content: Any) -> bool:
    """Return True for an array of objects, in which a JSON file has all of its requests."""
    return isinstance(content, list | tuple) and len(content) > 0 and isinstance(content[0], Mapping)


def text_refusal(place: TracePlace, name: str) -> TraceError:
    """Return the error of a line with text in place of ids, as in ShareGPT."""
    return place.refusal(
        f"field {name!r} is text, of which equal prefixes depend on the tokenizer; write a line with token_ids, "
        "output_length and a timestamp for each prompt, as docs/simulator.md shows"
    )


def not_an_object(place: TracePlace, fields: Any) -> TraceError:
    """Return the error of a line that is not an object; a batch of KV events is a list."""
    if is_array(fields):
        return place.refusal(f"an array of objects; expected one JSON object on each line{ARRAY_REMEDY}")
    if isinstance(fields, list | tuple) and len(fields) > 1 and isinstance(fields[1], list | tuple):
        return place.refusal(
            "a batch of KV events, which say nothing of prompts that were found and of answers; pass the trace to "
            "pagecore whatif"
        )
    return place.refusal(f"expected a JSON object, got {shown(fields)}")


def has_token_ids(fields: Any) -> bool:
    """Return True for an object with token ids in place of hash ids."""
    return isinstance(fields, Mapping) and "hash_ids" not in fields and any(name in fields for name in TOKEN_FIELDS)


def request_of_token_ids(
    place: TracePlace, fields: Any, number: int, units: TraceUnits, *, has_answer: bool = True
) -> TraceRequest:
    """Return the request of an object with token ids, a timestamp or none, and a namespace or none.

    With `has_answer` the object has an `output_length`, which is 0 otherwise.

    Raises
    ------
    TraceError
        A field is missing or malformed; the message names the trace and the line.
    """
    if not isinstance(fields, Mapping):
        raise place.refusal(f"expected a JSON object, got {shown(fields)}")
    name = next((each for each in TOKEN_FIELDS if each in fields), None)
    if name is None:
        raise place.refusal(f"field {TOKEN_FIELDS[0]!r} is missing")
    ids = fields[name].tolist() if isinstance(fields[name], np.ndarray) else fields[name]
    is_listed = isinstance(ids, list | tuple) and ids
    if not is_listed or not all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in ids):
        raise place.refusal(f"{name} is {shown(ids)}; expected a list of integers that is not empty")
    largest = TOKEN_ID_MAX if has_answer else INT32_MAX
    if min(ids) < 0 or max(ids) > largest:
        raise place.refusal(f"{name} has an id outside 0 to {largest}")
    milliseconds = _milliseconds(place, fields.get("timestamp", 0), units)
    namespace = fields.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise place.refusal(f"namespace is {shown(namespace)}; expected a string")
    answer = _field(place, fields, "output_length") if has_answer else 0
    lengths = checked_lengths(place, len(ids), answer, (f"length of {name}", "output_length"))
    prompt = np.array(ids, np.int32)
    chat, earlier = _chats(place, fields)
    return TraceRequest(
        number, place.number, milliseconds, *lengths, hash_ids=None, token_ids=prompt, namespace=namespace, chat=chat,
        earlier_chat=earlier,
    )  # fmt: skip


def _chats(place: TracePlace, fields: Mapping[str, Any]) -> tuple[int | str | None, int | str | None]:
    """Return `chat_id`, and `parent_chat_id` or, without one, `chat_id`: -1 and null name no request."""
    found: list[int | str | None] = []
    for name in ("chat_id", BAILIAN_FIELD):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
            raise place.refusal(f"{name} is {shown(value)}; expected an integer or a string")
        found.append(None if value == -1 else value)
    chat, earlier = found
    return chat, earlier if BAILIAN_FIELD in fields else chat


def _milliseconds(place: TracePlace, timestamp: Any, units: TraceUnits) -> float:
    milliseconds = units.milliseconds(timestamp)
    if milliseconds is None:
        raise place.refusal(
            f"timestamp is {shown(timestamp)}; expected a finite number of {units.time_name()}, 0 or more"
        )
    return milliseconds


def checked_lengths(
    place: TracePlace,
    input_length: Any,
    output_length: Any,
    names: tuple[str, str] = ("input_length", "output_length"),
    *,
    least: int = 1,
) -> tuple[int, int]:
    """Return the lengths of prompt and answer as ints; raise TraceError if one is out of range.

    `least` is the minimum length of a prompt.
    """
    lengths = (
        _integer(place, names[0], input_length, least),
        _integer(place, names[1], output_length, 0),
    )
    if sum(lengths) > REQUEST_TOKENS_MAX:
        raise place.refusal(f"{' + '.join(names)} is {sum(lengths)}; a request has at most {REQUEST_TOKENS_MAX} tokens")
    return lengths


def _field(place: TracePlace, fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise place.refusal(f"field {name!r} is missing")
    return fields[name]


def _integer(place: TracePlace, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= REQUEST_TOKENS_MAX:
        raise place.refusal(f"{name} is {shown(value)}; expected an integer between {least} and {REQUEST_TOKENS_MAX}")
    return int(value)


def _hash_ids(
    place: TracePlace, fields: Mapping[str, Any], input_length: int, output_length: int, size: int
) -> tuple[int, ...]:
    """Return the ids of the input, one for each `size` tokens; those of the answer may follow, and are left out.

    With fewer ids or more, `size` is wrong.
    """
    ids = _field(place, fields, "hash_ids")
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if not isinstance(ids, list | tuple):
        raise place.refusal(f"hash_ids is {shown(ids)}; expected a list of integers")
    largest = (INT32_MAX - (size - 1)) // size  # whose token ids fit int32
    needed, most = -(-input_length // size), -(-(input_length + output_length) // size)
    if not needed <= len(ids) <= most:
        raise place.refusal(
            f"hash_ids has {len(ids)} ids; an input of {input_length} tokens has {needed}, one for each {size} tokens; "
            "pass hash_block if an id names another number of tokens"
        )
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= largest:
            raise place.refusal(
                f"hash_ids contains {shown(value)}; expected integers between 0 and {largest}; renumber "
                "the ids of a trace that has larger ones"
            )
    return tuple(map(int, ids[:needed]))
