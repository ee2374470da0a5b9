"""The sequences of a cache by id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import CacheState


class Sequences(Mapping[object, Sequence]):
    """A read-only mapping from ids to the sequences of a cache; it changes with the cache.

    Iteration yields the ids in the order in which the sequences were added. It uses a copy, so sequences may be added
    and removed during iteration.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def __getitem__(self, id: object) -> Sequence:
        found = self._state.find(id)
        if found is None:
            raise KeyError(id)
        return found

    def get(self, id: object, default: Any = None) -> Any:
        """Return the sequence of an id, or `default`."""
        found = self._state.find(id)
        return default if found is None else found

    def __iter__(self) -> Iterator[object]:
        return iter([sequence.id for sequence in self._state.listed()])

    def __len__(self) -> int:
        return self._state.num_live

    def __repr__(self) -> str:
        return f"Sequences({list(self)!r})"
