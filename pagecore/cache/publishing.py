"""What sequences have computed becomes what the prefix tree knows, and they hold what they have published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagecore.cache.keep import NONE, Hold
from pagecore.cache.lanes import Lanes

if TYPE_CHECKING:
    from pagecore.cache._sequence import Sequence


class Publisher:
    """Offers the rows of sequences to the tree.

    Attributes
    ----------
    cut : set of Sequence
        Those whose receipt goes on past what is published: they were cut inside a block.
    doubled : set of Sequence
        Those with blocks of their own for what the tree has from others.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self.cut: set[Sequence] = set()
        self.doubled: set[Sequence] = set()

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Keep what is full, computed and known of each, and move its hold to the end of that."""
        for sequence in sequences:
            self.publish_one(sequence, may_share=False)

    def publish_one(self, sequence: Sequence, *, may_share: bool) -> None:
        """The same for one; what other rows have a part in is kept only if they are offered it too."""
        whole = self._lanes.rows.num_whole(sequence)
        first, hold = sequence._published, sequence._hold
        if whole > first and not may_share:
            # Not past what another row has a part in: it would have blocks of the tree that it has no hold on.
            whole = first + self._lanes.rows.num_unshared(sequence, first, whole)
        if whole <= first:
            return
        if hold.keep.spans is None and not self._lanes.has_worth:
            if self._lanes.rows.extend(sequence, hold.receipt, whole):
                self.doubled.add(sequence)
        else:
            self._offer(sequence, whole)
        sequence._published = whole
        self.cut.discard(sequence)

    def _offer(self, sequence: Sequence, num_blocks: int) -> None:
        hold = sequence._hold
        keep, now = hold.keep, self._lanes.now
        lanes = [self._lanes.tables.blocks(sequence.row, group)[:num_blocks] for group in self._lanes.groups]
        inserted = self._lanes.tree.insert(
            sequence.tokens[: num_blocks * self._lanes.block_size],
            lanes[0] if len(lanes) == 1 else lanes,
            namespace=keep.namespace,
            spans=keep.spans,
            receipt=hold.receipt,
            time=now,
            priority=keep.priority,
            time_to_live=keep.time_to_live,
            rank=keep.rank,
        )
        for lane, blocks in enumerate(self._lanes.by_lane(inserted.taken)):
            self._lanes.pools[self._lanes.groups[lane]].share(blocks)
        if any(map(len, self._lanes.by_lane(inserted.duplicates))):
            self.doubled.add(sequence)

    def shorten(self, sequence: Sequence, end: int) -> None:
        """Hold the first `end` blocks, and no more."""
        if sequence._hold.num_tokens > end * self._lanes.block_size:
            if end:
                self._offer(sequence, end)
            else:
                self.hold_nothing(sequence)
        self.note_cut(sequence)

    def note_cut(self, sequence: Sequence) -> None:
        """Remember whether a sequence shares a block with the tree in which it was cut."""
        if sequence._hold.num_tokens > sequence._published * self._lanes.block_size:
            self.cut.add(sequence)
        else:
            self.cut.discard(sequence)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has no row any more."""
        self.cut.discard(sequence)
        self.doubled.discard(sequence)

    def hold_nothing(self, sequence: Sequence) -> None:
        """Give up what a sequence holds, for a hold on nothing."""
        self.give_back(sequence._hold)
        sequence._hold.receipt = self._lanes.tree.match_and_lock(NONE, namespace=sequence._hold.keep.namespace)

    def give_back(self, hold: Hold, rank: float | None = None) -> None:
        """Give up a hold, after the row that it stood for is gone."""
        self._lanes.tree.release(hold.receipt, time=self._lanes.now, rank=rank)
