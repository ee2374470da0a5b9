"""Prefixes of a host tier that was filled before its stores were attached."""

from __future__ import annotations

from dataclasses import replace

from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.manager.hits.origins import PrefixIndex

__all__ = ["InheritedPrefixes"]


class InheritedPrefixes:
    """The prefixes that were offered to stores since they were attached to a host that had prefixes already.

    No backup copies what the host has, so that the stores would receive the ends of these prefixes alone.

    Parameters
    ----------
    block_size : int
    num_blocks : int
        Blocks that it remembers; others are offered again.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self._offered = PrefixIndex(block_size, num_blocks)

    def whole(self, backup: Backup) -> Backup:
        """Return a backup with what precedes it and was never offered, and note that all of it is offered now."""
        tokens = backup.tokens[: backup.stop]
        start = min(backup.start, self._offered.match(tokens, backup))
        self._offered.add(tokens, backup)
        return backup if start == backup.start else replace(backup, start=start)
