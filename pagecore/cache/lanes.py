"""Where the groups of a cache stand in its prefix tree: in which lane, and under which component."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._published import Rows
from pagecore.cache.keep import as_finite
from pagecore.errors import UnsupportedOption
from pagecore.index import BlockTables, RadixTree
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from pagecore.cache._sequence import Sequence
    from pagecore.cache.layers import Group

Ids = NDArray[np.int32]


class Lanes:
    """A tree beside the block tables whose rows it is offered.

    Groups without a window are the lanes of the full component; each group with a window is a component of its own.

    Attributes
    ----------
    tree, tables, pools, block_size
        What is brought together; the pools are those of the tables.
    rows : Rows
        The same for native calls.
    groups : list of int
        The group of each lane: those without a window come first, `num_full` of them.
    components : list of str
        The component of each group.
    now : float or None
        The time of this call; None where the policy needs none.
    num_seen : list of int
        For each window, how many earlier tokens the next one sees: the window less one, since a token sees itself.
    """

    def __init__(
        self, groups: Listed[Group], tables: BlockTables, block_size: int, policy: str, clock: Callable[[], float]
    ) -> None:
        windows = [(i, group.window) for i, group in enumerate(groups) if group.window is not None]
        full = [i for i, group in enumerate(groups) if group.window is None]
        self.num_seen = [min(window - 1, INT32_MAX) for _, window in windows]
        needed = [max(tokens, 1) for tokens in self.num_seen]
        self.tree = RadixTree(block_size, full=len(full), windows=needed, policy=policy)
        self.tables = tables
        self.pools = tables.pools
        self.block_size = block_size
        self.num_full = len(full)
        self.groups = [*full, *(i for i, _ in windows)]
        self.components = ["full"] * len(groups)
        for (group, _), name in zip(windows, self.tree.components[1:], strict=True):
            self.components[group] = name
        self.rows = Rows(self.tree, tables, self.groups)
        # Where every prefix has a worth of its own, a sequence that runs on must say its own again.
        self.has_worth = policy in ("priority", "rank")
        given: object = clock
        if not callable(given):
            raise UnsupportedOption(f"clock is {given!r}; give a function that returns seconds")
        # Only a priority that falls back needs the time.
        self._clock = clock if policy == "priority" else None
        self.now: float | None = None

    def tick(self) -> None:
        """Ask the clock, before anything changes: what it says holds for the whole of a call."""
        if self._clock is not None:
            self.now = as_finite("the clock's time", self._clock())

    def by_lane(self, blocks: Any) -> Listed[Ids]:
        """What the tree answers, lane by lane."""
        return (blocks,) if len(self.groups) == 1 else blocks

    def by_group(self, blocks: Any) -> list[Ids]:
        """The same in the order of the groups."""
        listed = self.by_lane(blocks)
        return [listed[self.groups.index(group)] for group in range(len(self.groups))]

    def own_block(self, sequence: Sequence, place: int, lane: int) -> int:
        """The block that a sequence has at a place of its row; 0 for none."""
        return int(self.tables.table(self.groups[lane])[sequence.row, place])

    def shared_block(self, sequence: Sequence, place: int, lane: int) -> int:
        """The same where it has one other holder, which may be the tree; 0 where it has none, or several."""
        block = self.own_block(sequence, place, lane)
        return block if block and self.pools[self.groups[lane]].ref_count(block) == 2 else 0

    def known_block(self, sequence: Sequence, place: int, lane: int) -> int:
        """The block that the tree has there on the path that the sequence holds; 0 past its end."""
        if sequence._hold.num_tokens <= place * self.block_size:
            return 0
        return self.tree.block_at(sequence._hold.receipt, place, lane)

    def exchange(self, sequence: Sequence, place: int, lane: int) -> int:
        """Let the tree have what the sequence has there, its own block or none; returns how many became free."""
        own, pool = self.own_block(sequence, place, lane), self.pools[self.groups[lane]]
        if own:
            pool.share([own])
        return pool.free([self.tree.replace(sequence._hold.receipt, place, own, lane)])
