"""Deletions of entries in stores: those of a prefix, or all that a store lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from pagecore.errors import StoreError
from pagecore.tiers.manager.port import Flags
from pagecore.tiers.manager.tickets import StorePort
from pagecore.tiers.manager.writing.removal import Clearing, Removal
from pagecore.tiers.store import Keys, Medium

__all__ = ["Deletions", "check_cleared"]


class Deletions:
    """The deletions that the stores of one cache have not answered, under its lock."""

    def __init__(self, ports: Sequence[StorePort]) -> None:
        self._ports = ports
        self._open: set[tuple[StorePort, Removal | Clearing]] = set()

    @property
    def num_open(self) -> int:
        """Number of batches that the stores have not ended."""
        return len(self._open)

    @property
    def is_possible(self) -> bool:
        """True if a store deletes on request."""
        return any(port.can_remove for port in self._ports)

    def remove(self, removal: Removal) -> None:
        """Delete the entries of a prefix in every store that deletes on request."""
        for port in [port for port in self._ports if port.can_remove]:
            self._open.add((port, removal))
            port.remove(removal.all_keys(), partial(self._removed, port, removal))

    def ports_to_clear(self, media: frozenset[Medium]) -> list[StorePort]:
        """Return the stores of some media; raise UnsupportedOption if one cannot be cleared, StoreError if not now.

        Stores of medium "CPU" that cannot be cleared are left out: the medium has the host tier as well.
        """
        ports = [port for port in self._ports if port.medium in media and (port.medium != "CPU" or port.can_clear)]
        for port in ports:
            port.require_clear()
        return ports

    def clear(self, entries: Iterable[tuple[StorePort, Keys]]) -> Clearing:
        """Begin to delete entries; the caller waits until `open` of the result is empty."""
        clearing = Clearing()
        for port, keys in entries:
            port.note_listed(keys)
            if len(keys):
                self._open.add((port, clearing))
                clearing.open.add(port)
                port.remove(keys, partial(self._cleared, clearing, port, keys))
        return clearing

    def _removed(self, port: StorePort, removal: Removal, ok: Flags, _error: str | None) -> None:
        self._open.discard((port, removal))
        gone = removal.marked(ok)
        port.note(removal.tokens, removal.namespace, removal.spans, gone, removal.keys, forgets=True)

    def _cleared(self, clearing: Clearing, port: StorePort, keys: Keys, ok: Flags, error: str | None) -> None:
        self._open.discard((port, clearing))
        port.note_removed(keys[ok])
        clearing.end(port, ok, error)


def check_cleared(clearing: Clearing) -> None:
    """Raise StoreError for entries that the stores have kept."""
    if clearing.open:  # a store that raised while it was closed
        clearing.failures.append(f"{len(clearing.open)} stores were closed before they answered")
    if clearing.failures:
        raise StoreError(
            f"not all entries were deleted: {'; '.join(clearing.failures)}; everything else that was named is "
            "cleared: clear again later, or clear the store by its own tools"
        )
