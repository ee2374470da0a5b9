"""Requests from CSV files, which hold lengths only: BurstGPT, the Azure LLM inference traces, and files of their kind.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type     BurstGPT
    TIMESTAMP,ContextTokens,GeneratedTokens                                  Azure LLM inference traces 2023 and 2024

The first line names the columns. Their order, capitals, spaces and underscores do not matter, and other columns are
ignored. Times are numbers of seconds, or ISO 8601; these count from the first row. Logs have rows of requests that
failed: a row with a prompt of 0 tokens is checked like any other, and is not a request.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pagecore.serving.replay.trace_fields import checked_lengths
from pagecore.serving.replay.trace_file import TraceError
from pagecore.serving.replay.trace_request import TraceRequest, TraceUnits
from pagecore.serving.replay.trace_source import TracePlace
from pagecore.storage.checks import shown

__all__ = ["CsvTrace", "csv_trace"]

# Names of the columns for time, prompt and answer, in lower case without spaces and underscores.
COLUMNS = {
    "time": ("timestamp", "arrivedat"),
    "prompt": ("requesttokens", "contexttokens", "inputlength", "numprefilltokens"),
    "answer": ("responsetokens", "generatedtokens", "outputlength", "numdecodetokens"),
}
SHOWN_COLUMNS = {
    "time": "Timestamp or arrived_at",
    "prompt": "Request tokens, ContextTokens, input_length or num_prefill_tokens",
    "answer": "Response tokens, GeneratedTokens, output_length or num_decode_tokens",
}
MILLISECOND = timedelta(milliseconds=1)


@dataclass(slots=True)
class CsvTrace:
    """Parser of the rows of a CSV trace.

    Parameters
    ----------
    names : list of str
        Names of all columns.
    places : dict of str to int
        Column of the time, the prompt and the answer.
    units : TraceUnits
        Unit of times that are numbers; seconds by default.
    """

    names: list[str]
    places: dict[str, int]
    units: TraceUnits
    _first: datetime | float | None = field(default=None, init=False)

    def request(self, place: TracePlace, text: bytes, number: int) -> TraceRequest | None:
        """Return the request of a row, or None if its prompt has no tokens; raise TraceError if it is malformed."""
        cells = _cells(place, text)
        if len(cells) != len(self.names):
            raise place.refusal(f"{len(cells)} fields; the header names {len(self.names)}")
        prompt, answer = self.places["prompt"], self.places["answer"]
        lengths = checked_lengths(
            place, _integer(cells[prompt]), _integer(cells[answer]), (self.names[prompt], self.names[answer]), least=0
        )
        milliseconds = self._milliseconds(place, cells[self.places["time"]])
        if not lengths[0]:
            return None
        return TraceRequest(number, place.number, milliseconds, *lengths, hash_ids=None)

    def _milliseconds(self, place: TracePlace, text: str) -> float:
        """Return the time of a request in milliseconds; that of a date counts from the first request."""
        name, time = self.names[self.places["time"]], _time(text)
        number = self.units.milliseconds(time, "s")
        if number is None and not isinstance(time, datetime):
            unit = self.units.time_name("s")
            raise place.refusal(f"{name} is {shown(text)}; expected a number of {unit}, 0 or more, or an ISO 8601 time")
        self._first = first = time if self._first is None else self._first
        if isinstance(time, datetime) and isinstance(first, datetime) and _has_zone(time) == _has_zone(first):
            return (time - first) / MILLISECOND
        if number is not None and isinstance(first, float):
            return number
        raise place.refusal(
            f"{name} is {shown(text)}, but the first time of the trace is {first}; give all times in one form"
        )


def csv_trace(place: TracePlace, line: Any, units: TraceUnits) -> CsvTrace | None:
    """Return the parser for a trace that begins with `line`; None if that is not the header of a CSV trace.

    Raises
    ------
    TraceError
        A column is missing, or two have its name.
    """
    if not isinstance(line, bytes) or line.lstrip().startswith((b"{", b"[")):
        return None
    try:
        names = [name.strip() for name in _cells(place, line.removeprefix(b"\xef\xbb\xbf"))]
    except TraceError:
        return None
    plain = [name.lower().replace(" ", "").replace("_", "") for name in names]
    found = {what: [i for i, name in enumerate(plain) if name in known] for what, known in COLUMNS.items()}
    if not any(found.values()) and ".csv" not in place.trace.lower():
        return None
    for what, columns in found.items():
        if len(columns) != 1:
            count = f"{len(columns)} columns have" if columns else "no column has"
            raise place.refusal(
                f"{count} the {what} of a request; expected a header with one of {SHOWN_COLUMNS[what]}, got "
                f"{shown(names)}"
            )
    return CsvTrace(names, {what: columns[0] for what, columns in found.items()}, units)


def _cells(place: TracePlace, text: bytes) -> list[str]:
    try:
        return next(csv.reader([text.decode()], strict=True, skipinitialspace=True))
    except UnicodeDecodeError:
        raise place.refusal("not UTF-8 text") from None
    except csv.Error as error:
        raise place.refusal(f"not CSV: {error}") from None


def _integer(text: str) -> int | str:
    """Return the integer of a cell, or the text if it is not one."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else text


def _time(text: str) -> float | datetime | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        return None


def _has_zone(time: datetime) -> bool:
    return time.utcoffset() is not None
