"""Methods of a host tier that keep what the device evicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listed
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.errors import PagecoreError, UnsupportedOption
from pagecore.tiers.host.methods.parts import TierParts
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.host.operations import _operations


class SpillMethods(TierParts):
    """`HostTier.spill`, and the ends of paths that wait for their beginnings; see `operations._spill`."""

    policy: str
    _ended: deque[Backup]
    _counts: dict[str, int]

    @property
    def is_exclusive(self) -> bool:
        """True if the host first evicts what the device has as well, and promotions spill what the device evicts."""
        return self._index.is_exclusive

    @is_exclusive.setter
    def is_exclusive(self, value: bool) -> None:
        if value and self.policy != "lru":
            raise UnsupportedOption(f"the policy is {self.policy!r}; a tier that is exclusive needs 'lru'")
        if not value:
            self.publish_spilled()
        self._index.is_exclusive = value

    def spill(self, missing: Listed[int]) -> int:
        """Evict blocks of the device in the order of its policy, each after it was copied to the host.

        `Tiers` calls it before the cache would evict them. In an exclusive tier the end of a path is published when its
        beginning has left the device, too, or when a prompt asks for it.

        Parameters
        ----------
        missing : list of int
            Blocks of each group of tokens to evict, and then state slots in a cache with states.

        Returns
        -------
        int
            Evicted blocks and states.

        Raises
        ------
        ShapeError
            `missing` has another length than there are groups and states, or an entry that is not an integer of at
            least 0.
        """
        self._require_open()
        counts = self._counts_of_lanes("missing", missing)
        if not self._transfers.is_ready():
            return 0
        return _operations.save_victims(
            self._parts.state, self._index, counts, self._copy_spilled, self._note_published
        )

    def publish_spilled(self) -> None:
        """Publish the end of a path that waits for its beginning, which is copied as well."""
        _operations.publish_waiting(self._parts.state, self._index, self._copy_spilled, self._note_published)

    def _publish_for(self, ids: NDArray[np.int32], options: RetentionOptions) -> None:
        """Publish the end of a path that waits, if a prompt asks for it; it is dropped if its copy fails."""
        if self._index.tail is None:
            return
        with suppress(PagecoreError):  # counted by _copy_spilled
            _operations.publish_for(
                self._parts.state, self._index, ids, options, self._copy_spilled, self._note_published
            )

    def _copy_spilled(self, one: _operations.Backup | _operations.SpilledPart) -> bool:
        try:
            is_running = self._transfers.spill(one)
        except Exception:
            self._counts["failed"] += 1
            raise
        self._counts["backups"] += self._count_backup(one.pairs) > 0
        return is_running

    def _count_backup(self, pairs: Listed[NDArray[np.int32]]) -> int:
        """Count what was copied; return the blocks, or the states if every layer of the cache keeps a state."""
        copied = list(map(len, pairs))
        count = sum(copied[: self.num_groups or 1])
        self._counts["backed_up"] += count
        self._counts["backed_up_bytes"] += self._bytes_of(copied)
        return count

    def _note_published(self, backup: _operations.Backup) -> None:
        ended = Backup.of(backup)
        if ended is not None:
            self._ended.append(ended)
