"""Which blocks of a prefix cache can be freed, and freeing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pagecore.cache.lanes import Lanes
from pagecore.cache.limits import out_of_blocks
from pagecore.cache.publishing import Publisher
from pagecore.errors import OutOfBlocks

if TYPE_CHECKING:
    from pagecore.cache._sequence import Sequence
    from pagecore.cache._step import Step


class _Unused(NamedTuple):
    """A block that a path has for its sequence, and the sequence does not use."""

    sequence: Sequence
    lane: int
    place: int


class Eviction:
    """Counts what the tree alone has, and takes it from the tree when blocks are short.

    That is what no receipt holds, which the tree gives up by its policy; and what receipts hold and no row uses, since
    a window has moved on, or a sequence has computed the same in blocks of its own.
    """

    def __init__(self, lanes: Lanes, publisher: Publisher, sequences: Mapping[object, Sequence]) -> None:
        self._lanes = lanes
        self._tree = lanes.tree
        self._publisher = publisher
        self._sequences = sequences  # all of the cache
        self.num_evicted_blocks = 0

    # -- how many there are --------------------------------------------------------------------------------------

    def evictable(self) -> list[int]:
        """Blocks of each group that only the tree holds; all of them can be had."""
        return [count + more for count, more in zip(self._unheld(), self._num_unused(), strict=True)]

    def lacking(self, missing: Listed[int], sequences: Listed[Sequence], counts: ArrayLike) -> list[int]:
        """Of the blocks of each group that a step lacks, those that eviction cannot free."""
        cut = self._publisher.cut
        if not cut:
            return self._lacking(missing, [])
        given = np.broadcast_to(counts, len(sequences)).tolist()
        writers = {sequence for sequence, count in zip(sequences, given, strict=True) if count}
        return self._lacking(missing, writers & cut)

    def with_evictable(self, refusal: OutOfBlocks) -> OutOfBlocks:
        """A refusal that knows of free blocks only, with those that could be evicted."""
        evictable = self.evictable()
        if not any(evictable):
            return refusal
        wanted, free = np.atleast_1d(refusal.requested).tolist(), np.atleast_1d(refusal.available).tolist()
        total = [count + more for count, more in zip(free, evictable, strict=True)]
        return out_of_blocks(
            wanted, total, "can be had", ", cached ones included; remove a sequence or make the pool larger"
        )

    def _unheld(self) -> list[int]:
        """Blocks of each group that no receipt holds."""
        return [self._tree.evictable(component) for component in self._lanes.components]

    def _num_unused(self) -> list[int]:
        """Blocks of each group that receipts hold, and no row."""
        counts = [0] * len(self._lanes.groups)
        if self._publisher.doubled or self._lanes.num_seen:
            for unused in self._unused():
                counts[self._lanes.groups[unused.lane]] += 1
        return counts

    def _lacking(self, missing: Listed[int], cut: Iterable[Sequence]) -> list[int]:
        lacking = [count - more for count, more in zip(missing, self._unheld(), strict=True)]
        if max(lacking) <= 0:
            return [0] * len(lacking)
        for group, more in enumerate(self._num_unused()):
            lacking[group] -= more
        for sequence in cut:
            place = sequence._published
            for lane, group in enumerate(self._lanes.groups):
                # What it shares with the tree alone can be evicted, and is then not copied.
                block = self._lanes.shared_block(sequence, place, lane)
                lacking[group] -= block != 0 and self._lanes.known_block(sequence, place, lane) == block
        return [max(0, count) for count in lacking]

    def _unused(self) -> Iterator[_Unused]:
        """Blocks that the tree alone has a reference to, on paths that sequences hold; each once."""
        self._lanes.rows.search()
        for sequence in list(self._sequences.values() if self._lanes.num_seen else self._publisher.doubled):
            receipt = sequence._hold.receipt
            end = sequence._hold.num_tokens // self._lanes.block_size
            for lane in range(len(self._lanes.groups)):
                first, last = self._watched(sequence, lane, end)
                for place in self._lanes.rows.find_unused(receipt, lane, first, last, end):
                    yield _Unused(sequence, lane, place)

    def _watched(self, sequence: Sequence, lane: int, end: int) -> tuple[int, int]:
        """From where to where a path of so many blocks can have some that its sequence does not use."""
        lanes, is_doubled = self._lanes, sequence in self._publisher.doubled
        if lane < lanes.num_full:
            return 0, end if is_doubled else 0
        seen = lanes.num_seen[lane - lanes.num_full]
        first = max(0, end - -(-max(seen, 1) // lanes.block_size))
        if is_doubled:
            return first, end
        return first, min(end, max(0, sequence.num_computed_tokens - seen) // lanes.block_size)

    # -- taking them ---------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> bool:
        """`Step.prepare`, by eviction where blocks are short; False, with nothing changed, where that is not enough."""
        cut = [sequence for sequence in self._publisher.cut if step.brings_tokens(sequence)]
        while not step.prepare(self._lanes.tables):
            missing = step.missing(self._lanes.tables)
            if any(self._lacking(missing, cut)):
                return False
            self._let_go(cut)
            if not self._free(missing) and not cut:
                return False
            cut = []
        self._let_go(cut)
        return True

    def make_room(self, missing: Listed[int]) -> bool:
        """Free so many blocks of each group by eviction; False, with nothing changed, where there are fewer."""
        if any(self._lacking(missing, [])):
            return False
        self._free(missing)
        return True

    def clear(self) -> int:
        """Give up all that no row uses; returns how many blocks became free."""
        evictable = self.evictable()
        left = list(evictable)
        self._reclaim(left)
        for component in self._tree.components:
            self._evict(component, self._tree.evictable(component), left)
        return sum(evictable) - sum(left)

    def _free(self, missing: Listed[int]) -> int:
        """Free so many blocks of each group, as far as there are as many; returns how many became free."""
        lanes, left = self._lanes, list(missing)
        if any(count > more for count, more in zip(left, self._unheld(), strict=True)):
            self._reclaim(left)
        wanted = max((left[group] for group in lanes.groups[: lanes.num_full]), default=0)
        if wanted > 0:
            self._evict("full", wanted, left)
        for group in lanes.groups[lanes.num_full :]:
            if left[group] > 0:
                self._evict(lanes.components[group], left[group], left)
        return sum(missing) - sum(left)

    def _evict(self, component: str, amount: int, left: list[int]) -> None:
        """Evict, and take what became free of each group from `left`."""
        gone = self._tree.evict(component, amount, time=self._lanes.now)
        for lane, blocks in enumerate(self._lanes.by_lane(gone.blocks)):
            group = self._lanes.groups[lane]
            freed = self._lanes.pools[group].free(blocks)
            left[group] -= freed
            self.num_evicted_blocks += freed

    def _reclaim(self, left: list[int]) -> None:
        """Take from the tree what it alone has of paths that are in use; their sequences' own blocks come instead."""
        for unused in self._unused():
            if max(left) <= 0:
                return
            group = self._lanes.groups[unused.lane]
            if left[group] > 0:
                freed = self._lanes.exchange(unused.sequence, unused.place, unused.lane)
                left[group] -= freed
                self.num_evicted_blocks += freed

    def _let_go(self, sequences: Iterable[Sequence]) -> None:
        """They write into the block in which they were cut, and share it no more."""
        for sequence in sequences:
            self._publisher.shorten(sequence, sequence._published)
            for lane in range(len(self._lanes.groups)):
                self._hand_over(sequence, sequence._published, lane)

    def _hand_over(self, sequence: Sequence, place: int, lane: int) -> None:
        """Where the tree must go on with a block that a sequence writes into, give it another's copy of that."""
        block = self._lanes.shared_block(sequence, place, lane)
        for other in self._publisher.doubled if block else ():
            own = self._lanes.own_block(other, place, lane)
            if own not in (0, block) and self._lanes.known_block(other, place, lane) == block:
                self._lanes.exchange(other, place, lane)
                return
