"""How the prefix cache names what a sequence computes, how long it keeps it, and what a sequence holds of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import RadixTree, Receipt
from pagecore.storage.checks import as_float, at_least

Spans = Iterable[tuple[int, int, bytes | int]]
NONE = np.zeros(0, np.int32)
# It holds nothing, and refuses what every tree refuses.
EMPTY_TREE = RadixTree(1 << 20)


@dataclass(frozen=True, slots=True)
class Keep:
    """How the prefix cache names what a sequence computes, and how long it keeps it."""

    namespace: Hashable = None
    spans: tuple[tuple[int, int, bytes | int], ...] | None = None
    priority: float | None = None
    time_to_live: float | None = None
    rank: float | None = None


@dataclass(slots=True)
class Hold:
    """What a sequence holds of the prefix cache; an empty prefix, while it is swapped out."""

    receipt: Receipt
    keep: Keep

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that is held."""
        return self.receipt.num_tokens


def make_keep(
    policy: str,
    namespace: Hashable,
    spans: Spans | None,
    priority: float | None = None,
    time_to_live: float | None = None,
    rank: float | None = None,
) -> Keep:
    """What a user says about a sequence, as far as it can be checked without its tokens."""
    if priority is not None and policy != "priority":
        raise UnsupportedOption(f"priority {priority} means nothing to policy {policy!r}; use 'priority'")
    if time_to_live is not None and priority is None:
        raise UnsupportedOption(f"time_to_live {time_to_live} needs a priority to fall back from; give both")
    if priority is not None and not 0 <= (priority := as_finite("priority", priority)) <= 100:
        raise ShapeError(f"priority is {priority}; use 0 to 100")
    if time_to_live is not None and (time_to_live := as_finite("time_to_live", time_to_live)) < 0:
        raise ShapeError(f"time_to_live is {time_to_live}; use 0 seconds or more, or leave it out for ever")
    check_namespace(namespace)
    return Keep(namespace, _frozen(spans), priority, time_to_live, checked_rank(policy, rank))


def check_namespace(namespace: Hashable) -> None:
    """Refuse what cannot name a namespace."""
    if namespace is not None:
        EMPTY_TREE.match(NONE, namespace=namespace)


def as_finite(name: str, value: float) -> float:
    """A number as a float, refused where it is none or not finite."""
    number = as_float(name, value)
    if not math.isfinite(number):
        raise ShapeError(f"{name} is {number}; give a finite number")
    return number


def _frozen(spans: Spans | None) -> tuple[tuple[int, int, bytes | int], ...] | None:
    """Spans that do not change with what the caller gave."""
    if spans is None:
        return None
    try:
        listed = list(spans)
    except TypeError:
        raise ShapeError(f"spans is {spans!r}; give a list of (start, end, digest)") from None
    EMPTY_TREE.match(NONE, spans=listed)
    return tuple((operator.index(start), operator.index(end), _digest(digest)) for start, end, digest in listed)


def _digest(digest: Any) -> bytes | int:
    return bytes(digest) if isinstance(digest, bytes | bytearray | memoryview) else operator.index(digest)


def checked_rank(policy: str, rank: float | None) -> float | None:
    """A rank as a float, refused where the policy has no use for it."""
    if rank is not None and policy != "rank":
        raise UnsupportedOption(f"rank {rank} means nothing to policy {policy!r}; use 'rank'")
    return None if rank is None else as_finite("rank", rank)


def reusable(length: int, max_tokens: int | None) -> int:
    """How many tokens of a prompt may be reused: the last one must be computed, since its output is what is wanted."""
    most = max(length - 1, 0)
    return most if max_tokens is None else min(most, at_least("max_tokens", max_tokens, least=0))
