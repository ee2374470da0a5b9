"""Retention options: the identity of a sequence's blocks in the prefix cache, and their eviction value."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index._radix_query import validate_namespace, validate_spans
from pagecore.storage.checks import as_float, require_int, shown

__all__ = ["RetentionOptions", "as_finite", "checked_rank", "retention_options", "reusable", "validate_namespace"]

Spans = Iterable[tuple[int, int, bytes | int]]


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """Validated options of `PagedKVCache.add_sequence` that concern the prefix cache."""

    namespace: Hashable = None
    spans: tuple[tuple[int, int, bytes | int], ...] | None = None
    priority: float | None = None
    time_to_live: float | None = None
    rank: float | None = None


def retention_options(
    policy: str,
    namespace: Hashable,
    spans: Spans | None,
    priority: float | None = None,
    time_to_live: float | None = None,
    rank: float | None = None,
) -> RetentionOptions:
    """Return the validated options of a sequence; its tokens are not needed."""
    if priority is not None and policy != "priority":
        raise UnsupportedOption(
            f"priority {shown(priority)} has no effect with policy {policy!r}; use eviction_policy='priority'"
        )
    if time_to_live is not None and priority is None:
        raise UnsupportedOption(f"time_to_live {shown(time_to_live)} needs a priority; give both")
    if priority is not None and not 0 <= (priority := as_finite("priority", priority)) <= 100:
        raise ShapeError(f"priority is {priority}; use 0 to 100")
    if time_to_live is not None and (time_to_live := as_finite("time_to_live", time_to_live)) < 0:
        raise ShapeError(f"time_to_live is {time_to_live}; use 0 seconds or more, or leave it out for no limit")
    validate_namespace(namespace)
    frozen = None if spans is None else validate_spans(spans)
    return RetentionOptions(namespace, frozen, priority, time_to_live, checked_rank(policy, rank))


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
