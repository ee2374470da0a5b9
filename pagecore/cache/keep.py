"""How the prefix cache names what a sequence computes, how long it keeps it, and what a sequence holds of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import Receipt
from pagecore.storage.checks import as_float, at_least

Spans = Iterable[tuple[int, int, bytes | int]]


@dataclass(frozen=True, slots=True)
class Keep:
    """How the prefix cache names what a sequence computes, and how long it keeps it."""

    namespace: Hashable = None
    spans: tuple[tuple[int, int, bytes | int], ...] | None = None
    priority: float | None = None
    time_to_live: float | None = None
    rank: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether tokens and namespace say it all."""
        return self.spans is None and self.priority is None and self.rank is None


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
    if priority is not None and not 0 <= (priority := as_float("priority", priority)) <= 100:
        raise ShapeError(f"priority is {priority}; use 0 to 100")
    if time_to_live is not None and (time_to_live := as_float("time_to_live", time_to_live)) < 0:
        raise ShapeError(f"time_to_live is {time_to_live}; use 0 seconds or more")
    rank = checked_rank(policy, rank)
    try:
        listed = None if spans is None else tuple(spans)
    except TypeError:
        raise ShapeError(f"spans is {spans!r}; give a list of (start, end, digest)") from None
    return Keep(namespace, listed, priority, time_to_live, rank)


def checked_rank(policy: str, rank: float | None) -> float | None:
    """A rank as a float, refused where the policy has no use for it."""
    if rank is not None and policy != "rank":
        raise UnsupportedOption(f"rank {rank} means nothing to policy {policy!r}; use 'rank'")
    return None if rank is None else as_float("rank", rank)


def reusable(length: int, max_tokens: int | None) -> int:
    """How many tokens of a prompt may be reused: the last one must be computed, since its output is what is wanted."""
    most = max(length - 1, 0)
    return most if max_tokens is None else min(most, at_least("max_tokens", max_tokens, least=0))
