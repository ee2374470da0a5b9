"""What a cache keeps of the sequences it has computed, for others that begin alike.

The tree decides and the pools hold; this stands between the two, under the lock of the cache.

P1: the tree holds one reference to every block that it knows, each sequence one to every block of its row.
P2: a block that a row shares with the tree lies on the path that the sequence's receipt holds, so that whatever the
    tree calls evictable is held by nobody else, and giving it up frees it. Not the other way round: a receipt may hold
    blocks that no row uses, because their window has moved on, or because its sequence computed the same in blocks of
    its own. Those can be had too.
P3: the first `_published` blocks of a sequence are those that its receipt's path stands for, token by token. The path
    is longer where the sequence was cut inside a block, which it then shares with the tree until it writes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import numpy as np

from pagecore.cache.eviction import Eviction
from pagecore.cache.keep import Hold, Keep
from pagecore.cache.lanes import Ids, Lanes
from pagecore.cache.publishing import Publisher
from pagecore.errors import PagecoreError
from pagecore.index import BlockTables
from pagecore.storage.checks import INT32_MAX

if TYPE_CHECKING:
    from pagecore.cache._sequence import Sequence
    from pagecore.cache.layers import Group

# Published by a sequence that has nothing to offer: no number of full blocks is more.
NEVER = INT32_MAX


class PrefixCache:
    """The tree of a cache, and what is done about its answers.

    Attributes
    ----------
    eviction : Eviction
        What can be had of it.
    """

    def __init__(
        self,
        groups: Listed[Group],
        tables: BlockTables,
        block_size: int,
        sequences: Mapping[object, Sequence],
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        self._lanes = Lanes(groups, tables, block_size, policy, clock)
        self._publisher = Publisher(self._lanes)
        self._sequences = sequences
        self.tree = self._lanes.tree
        self.eviction = Eviction(self._lanes, self._publisher, sequences)
        self.num_hits = self.num_misses = 0
        self.num_query_tokens = self.num_hit_tokens = 0

    def tick(self) -> None:
        """`Lanes.tick`."""
        self._lanes.tick()

    def figures(self) -> dict[str, int]:
        """What `CacheStats` tells of the prefix cache."""
        tree = self.tree
        return {
            "num_cached_blocks": sum(tree.evictable(name) + tree.protected(name) for name in self._lanes.components),
            "num_evicted_blocks": self.eviction.num_evicted_blocks,
            "prefix_hits": self.num_hits,
            "prefix_misses": self.num_misses,
            "prefix_query_tokens": self.num_query_tokens,
            "prefix_hit_tokens": self.num_hit_tokens,
        }

    def cached(self, group: int) -> Ids:
        """Every block of a group that the tree holds, ascending."""
        return self.tree.held_blocks(self._lanes.groups.index(group))

    def match_length(self, ids: Ids, keep: Keep, most: int) -> int:
        """Tokens, at most so many, that a sequence of these ids would reuse."""
        found = self.tree.match(ids, namespace=keep.namespace, spans=keep.spans, max_tokens=most)
        return found.num_tokens

    def find(self, ids: Ids, keep: Keep, most: int) -> tuple[int, Hold]:
        """A row that begins with what a sequence of these ids can reuse, at most so many tokens, and the hold on it."""
        receipt = self.tree.match_and_lock(
            ids, namespace=keep.namespace, spans=keep.spans, max_tokens=most, time=self._lanes.now
        )
        try:
            return self._lanes.tables.add(prefix=self._lanes.by_group(receipt.match.blocks)), Hold(receipt, keep)
        except BaseException:
            receipt.release()
            raise

    def attach(self, sequence: Sequence, hold: Hold) -> None:
        """Give a new sequence its hold, and count what it found."""
        found = hold.num_tokens
        sequence._hold = hold
        sequence._published = found // self._lanes.block_size
        self.num_query_tokens += sequence.num_tokens
        self.num_hit_tokens += found
        self.num_hits += found > 0
        self.num_misses += found == 0

    def remove(self, sequence: Sequence, rank: float | None = None) -> None:
        """A sequence is gone, and so is its row."""
        self._publisher.give_back(sequence._hold, rank)
        self._publisher.forget(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence lost its row, and may come back."""
        self._publisher.hold_nothing(sequence)
        self._publisher.forget(sequence)
        sequence._published = NEVER if sequence._published == NEVER else 0

    def fork(self, children: Listed[Sequence], parents: Listed[Sequence]) -> None:
        """The rows of children have become those of parents, which had published what they could before that."""
        forked = [(Hold(p._hold.receipt.fork(), p._hold.keep), p._published) for p in parents]
        doubled = [parent in self._publisher.doubled for parent in parents]
        for child, (hold, published), is_doubled in zip(children, forked, doubled, strict=True):
            if child._hold is not None:  # it is not new
                self._publisher.give_back(child._hold)
            child._hold, child._published = hold, published
            self._publisher.note_cut(child)
            if is_doubled:
                self._publisher.doubled.add(child)
            else:
                self._publisher.doubled.discard(child)

    def come_back(self, sequences: Listed[Sequence], rounded: Iterable[Sequence]) -> None:
        """Sequences have rows again, with blocks of their own that they may share with each other.

        What was rounded meanwhile is not what its tokens say, and serves nobody else.
        """
        for sequence in rounded:
            sequence._published = NEVER
        # All who share a block get a hold on it at once, unless one has ids that are yet to come.
        may_share = all(sequence.num_tokens >= sequence.num_computed_tokens for sequence in sequences)
        for sequence in sequences:
            self._publisher.publish_one(sequence, may_share=may_share)

    def cut(self, sequence: Sequence, length: int) -> None:
        """A row was cut to `length` tokens, the sequence will be: hold what it still shares, and no more."""
        if sequence._published != NEVER or length == 0:
            sequence._published = min(sequence._published, length // self._lanes.block_size)
        self._publisher.shorten(sequence, -(-length // self._lanes.block_size))

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """`Publisher.publish`."""
        self._publisher.publish(sequences)

    def check_invariants(self) -> None:
        """Recount every block from the rows and the tree."""
        self.tree.check_invariants()
        for lane, group in enumerate(self._lanes.groups):
            pool = self._lanes.pools[group]
            holders = np.bincount(self._lanes.tables.table(group).ravel(), minlength=pool.num_blocks)
            holders[0] = 0
            holders[self.tree.held_blocks(lane)] += 1
            if not np.array_equal(holders, pool.ref_counts()):
                raise PagecoreError(f"group {group} has blocks counted otherwise than rows and prefix cache hold them")
        for sequence in self._sequences.values():
            published = 0 if sequence._published == NEVER else sequence._published
            more = sequence._hold.num_tokens - published * self._lanes.block_size
            is_cut = sequence in self._publisher.cut
            if more < 0 or (more > 0) != is_cut or (sequence.is_swapped and sequence._hold.num_tokens):
                raise PagecoreError(f"{sequence!r} holds otherwise of the prefix cache than it has published")
        strangers = (self._publisher.cut | self._publisher.doubled) - set(self._sequences.values())
        if self.tree.num_receipts != len(self._sequences) or strangers:
            raise PagecoreError(f"{self.tree.num_receipts} receipts are out for {len(self._sequences)} sequences")
