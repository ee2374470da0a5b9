"""What a new sequence is given, and must pass."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from pagecore.cache._sequence import Sequence
from pagecore.cache.keep import Keep
from pagecore.errors import InvalidSequence, ShapeError

if TYPE_CHECKING:
    from pagecore.cache.paged import PagedKVCache


def check_room(length: int, most: int) -> None:
    """Refuse more tokens than a row has room for."""
    if length > most:
        raise ShapeError(
            f"tokens has {length} ids; a sequence has room for {most}: raise max_tokens_per_sequence or the number of "
            "blocks"
        )


def unused_name(id: object, names: Container[object], numbers: Iterable[int]) -> object:
    """The caller's name for a sequence, or a number where it gave none; refused where another bears it."""
    if id is None:
        return next(number for number in numbers if number not in names)
    try:
        is_there = id in names
    except TypeError:
        raise InvalidSequence(f"id is {id!r}, which cannot be hashed; give a number, a string or a tuple") from None
    if is_there:
        raise InvalidSequence(f"a sequence {id!r} is in the cache; remove it first, or choose another id")
    return id


def new_sequence(cache: PagedKVCache, name: object, ids: Any, keep: Keep, most: int) -> Sequence:
    """A sequence in a row that begins with what the prefix cache has of it."""
    if cache._prefix is None or cache._tables.num_rows == cache.max_sequences:
        return Sequence(cache, name, cache._tables.add(), ids)
    row, hold = cache._prefix.find(ids, keep, most)
    sequence = Sequence(cache, name, row, ids, hold.num_tokens, hold.num_tokens)
    cache._prefix.attach(sequence, hold)
    return sequence
