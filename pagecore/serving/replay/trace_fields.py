"""Requests from the fields of a JSON object with hash ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagecore.serving.replay.trace_request import REQUEST_TOKENS_MAX, TraceRequest, TraceUnits
from pagecore.serving.replay.trace_source import TracePlace
from pagecore.storage.checks import shown

__all__ = ["checked_lengths", "parse_json", "request_of_fields"]


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
        raise place.refusal(f"not JSON: {str(error)[:80]}") from None


def request_of_fields(place: TracePlace, fields: Any, number: int, units: TraceUnits) -> TraceRequest:
    """Return the request of an object with `timestamp`, `input_length`, `output_length` and `hash_ids`.

    Raises
    ------
    TraceError
        A field is missing or malformed; the message names the trace and the line.
    """
    if not isinstance(fields, Mapping):
        raise place.refusal(f"expected a JSON object, got {shown(fields)}")
    timestamp = _field(place, fields, "timestamp")
    milliseconds = units.milliseconds(timestamp)
    if milliseconds is None:
        raise place.refusal(
            f"timestamp is {shown(timestamp)}; expected a finite number of {units.time_name()}, 0 or more"
        )
    lengths = [_field(place, fields, name) for name in ("input_length", "output_length")]
    input_length, output_length = checked_lengths(place, *lengths)
    hash_ids = _hash_ids(place, fields, input_length, units)
    return TraceRequest(number, place.number, milliseconds, input_length, output_length, hash_ids, units.hash_block)


def checked_lengths(
    place: TracePlace, input_length: Any, output_length: Any, names: tuple[str, str] = ("input_length", "output_length")
) -> tuple[int, int]:
    """Return the lengths of prompt and answer as ints; raise TraceError if one is out of range."""
    lengths = (
        _integer(place, names[0], input_length, 1),
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


def _hash_ids(place: TracePlace, fields: Mapping[str, Any], input_length: int, units: TraceUnits) -> tuple[int, ...]:
    """Return the ids of the input: exactly one for each `hash_block` tokens, or else `hash_block` is wrong."""
    ids = _field(place, fields, "hash_ids")
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    if not isinstance(ids, list | tuple):
        raise place.refusal(f"hash_ids is {shown(ids)}; expected a list of integers")
    size, largest = units.hash_block, units.max_hash_id
    needed = -(-input_length // size)
    if len(ids) != needed:
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
    return tuple(map(int, ids))
