"""Retention options: the identity of a sequence's blocks in the prefix cache, and their eviction value."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index.radix._radix import validate_namespace, validate_spans
from pagecore.storage.checks import as_float, require_int, shown

__all__ = [
    "RetentionOptions",
    "as_finite",
    "checked_priority",
    "checked_rank",
    "retention_options",
    "reusable",
    "validate_namespace",
    "validate_spans",
]

# Tokens of a row are counted in 32 bits.
MAX_TOKENS = 2**31 - 1

Spans = Iterable[tuple[int, int, bytes | int]]
Priority = float | Sequence[tuple[Any, ...]]
# End of a range of tokens, its priority, and the seconds that it lasts; None for no end, priority or limit.
Range = tuple[int | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """Validated options of `PagedKVCache.add_sequence` that concern the prefix cache."""

    namespace: Hashable = None
    spans: tuple[tuple[int, int, bytes | int], ...] | None = None
    priority: float | None = None
    priority_ranges: tuple[Range, ...] | None = None
    time_to_live: float | None = None
    rank: float | None = None


# Most sequences have no options.
DEFAULT_OPTIONS = RetentionOptions()


def retention_options(
    policy: str,
    namespace: Hashable,
    spans: Spans | None,
    priority: Priority | None = None,
    time_to_live: float | None = None,
    rank: float | None = None,
) -> RetentionOptions:
    """Return the validated options of a sequence; its tokens are not needed."""
    if namespace is spans is priority is time_to_live is rank is None:
        return DEFAULT_OPTIONS
    if priority is not None and policy != "priority":
        raise UnsupportedOption(
            f"priority {shown(priority)} has no effect with policy {policy!r}; use eviction_policy='priority'"
        )
    if time_to_live is not None and priority is None:
        raise UnsupportedOption(f"time_to_live {shown(time_to_live)} needs a priority; give both")
    seconds = _checked_seconds(time_to_live)
    ranges = None
    own: float | None = None
    if isinstance(priority, list | tuple):
        ranges = _checked_ranges(priority, seconds)
    elif priority is not None:
        own = checked_priority(priority)
    validate_namespace(namespace)
    frozen = None if spans is None else validate_spans(spans)
    return RetentionOptions(namespace, frozen, own, ranges, seconds, checked_rank(policy, rank))


def checked_priority(priority: Any, name: str = "priority") -> float:
    """Return a priority as a float; raise ShapeError for anything but a number from 0 to 100."""
    number = as_finite(name, priority)
    if not 0 <= number <= 100:
        raise ShapeError(f"{name} is {number}; use 0 to 100")
    return number


def _checked_seconds(time_to_live: Any) -> float | None:
    if time_to_live is None:
        return None
    seconds = as_finite("time_to_live", time_to_live)
    if seconds < 0:
        raise ShapeError(f"time_to_live is {seconds}; use 0 seconds or more, or leave it out for no limit")
    return seconds


def _checked_ranges(given: Sequence[Any], seconds: float | None) -> tuple[Range, ...]:
    """Return the ranges of priorities without gaps: tokens between them have none."""
    ranges: list[Range] = []
    last = 0
    for each in given:
        if not (isinstance(each, tuple | list) and len(each) in (3, 4)):
            raise ShapeError(f"a range of priorities is {shown(each)}; give (start, end, priority[, seconds])")
        start = require_int("start of a priority", each[0], min=0, max=MAX_TOKENS)
        end = None if each[1] is None else require_int("end of a priority", each[1], min=start, max=MAX_TOKENS)
        if ranges and (ranges[-1][0] is None or start < last):
            raise ShapeError(f"priorities overlap at token {start}; give each range from the end of the one before")
        if start > last:
            ranges.append((start, None, None))
        limit = seconds if len(each) == 3 else _checked_seconds(each[3])
        ranges.append((end, checked_priority(each[2]), limit))
        last = start if end is None else end
    if ranges and ranges[-1][0] is not None:
        ranges.append((None, None, None))
    return tuple(ranges)


def as_finite(name: str, value: float) -> float:
    """Return a number as a float; raise ShapeError for non-numbers, NaN and infinities."""
    number = as_float(name, value)
    if not math.isfinite(number):
        raise ShapeError(f"{name} is {number}; give a finite number")
    return number


def checked_rank(policy: str, rank: float | None) -> float | None:
    """Return a rank as a float; raise UnsupportedOption if the policy does not use it."""
    if rank is not None and policy != "rank":
        raise UnsupportedOption(f"rank {shown(rank)} has no effect with policy {policy!r}; use eviction_policy='rank'")
    return None if rank is None else as_finite("rank", rank)


def reusable(length: int, max_tokens: int | None) -> int:
    """Return the number of tokens of a prompt that may be reused: never the last, whose output must be computed."""
    most = max(length - 1, 0)
    return most if max_tokens is None else min(most, require_int("max_tokens", max_tokens, min=0, max=None))
