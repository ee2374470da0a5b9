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

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache._published import Rows
from pagecore.errors import OutOfBlocks, PagecoreError, ShapeError, UnsupportedOption
from pagecore.index import BlockTables, RadixTree, Receipt
from pagecore.storage.checks import INT32_MAX, as_float, at_least

if TYPE_CHECKING:
    from pagecore.cache._sequence import Sequence
    from pagecore.cache._step import Step
    from pagecore.cache.layers import Group

Ids = NDArray[np.int32]
NONE = np.zeros(0, np.int32)
Spans = Iterable[tuple[int, int, bytes | int]]
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "rank")


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
    """What a sequence holds of the prefix cache: nothing, while it is swapped out."""

    receipt: Receipt
    keep: Keep

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that is held."""
        return self.receipt.num_tokens


class _Unused(NamedTuple):
    """A block that a path has for its sequence, and the sequence does not use."""

    sequence: Sequence
    lane: int
    place: int
    block: int


class PrefixCache:
    """The tree of a cache, and what is done about its answers."""

    def __init__(
        self,
        groups: Listed[Group],
        tables: BlockTables,
        block_size: int,
        sequences: Mapping[object, Sequence],
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        windows = [(i, group.spec.window) for i, group in enumerate(groups) if group.spec.window is not None]
        full = [i for i, group in enumerate(groups) if group.spec.window is None]
        # The next token sees one key less of the cache than its window is long: itself is the last.
        seen = [min(window - 1, INT32_MAX) for _, window in windows]
        self._sequences = sequences  # all of the cache
        self._cut: set[Sequence] = set()  # those whose receipt goes on past what is published
        self._doubled: set[Sequence] = set()  # those with blocks of their own for what the tree has from others
        self.tree = RadixTree(block_size, full=len(full), windows=[max(tokens, 1) for tokens in seen], policy=policy)
        self.num_evicted_blocks = 0
        self.num_hits = self.num_misses = 0
        self.num_query_tokens = self.num_hit_tokens = 0
        self._tables = tables
        self._pools = tables.pools
        self._block_size = block_size
        self._lanes = [*full, *(i for i, _ in windows)]  # the group of each lane
        self._num_full = len(full)
        self._seen = seen  # by the windows, in tokens
        self._rows = Rows(self.tree, tables, self._lanes)
        names = self.tree.components
        self._components = ["full"] * len(groups)
        for (group, _), name in zip(windows, names[1:], strict=True):
            self._components[group] = name
        # Only a priority that falls back needs the time.
        self._clock = clock if policy == "priority" else None

    # -- how much there is ---------------------------------------------------------------------------------------

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that the tree holds, of all groups."""
        tree = self.tree
        return sum(tree.evictable(name) + tree.protected(name) for name in self._components)

    def figures(self) -> dict[str, int]:
        """What `CacheStats` tells of the prefix cache."""
        return {
            "num_cached_blocks": self.num_cached_blocks,
            "num_evicted_blocks": self.num_evicted_blocks,
            "prefix_hits": self.num_hits,
            "prefix_misses": self.num_misses,
            "prefix_query_tokens": self.num_query_tokens,
            "prefix_hit_tokens": self.num_hit_tokens,
        }

    def cached(self, group: int) -> Ids:
        """Every block of a group that the tree holds, ascending."""
        return self.tree.held_blocks(self._lanes.index(group))

    def evictable(self) -> list[int]:
        """Blocks of each group that only the tree holds, and that can be had."""
        known = [self.tree.evictable(name) for name in self._components]
        return [count + more for count, more in zip(known, self._num_unused(), strict=True)]

    def _num_unused(self) -> list[int]:
        counts = [0] * len(self._lanes)
        if self._doubled or self._seen:
            for lane, _ in {(unused.lane, unused.block) for unused in self._unused()}:
                counts[self._lanes[lane]] += 1
        return counts

    def match_length(self, ids: Ids, keep: Keep, max_tokens: int | None) -> int:
        """Tokens that a sequence of these ids would reuse."""
        most = _most(len(ids), max_tokens)
        found = self.tree.match(ids, namespace=keep.namespace, spans=keep.spans, max_tokens=most)
        return found.num_tokens

    # -- sequences come and go -----------------------------------------------------------------------------------

    def find(self, ids: Ids, keep: Keep, max_tokens: int | None) -> Hold:
        """Hold the longest prefix that a sequence of these ids can reuse."""
        most = _most(len(ids), max_tokens)
        receipt = self.tree.match_and_lock(
            ids, namespace=keep.namespace, spans=keep.spans, max_tokens=most, time=self._now()
        )
        return Hold(receipt, keep)

    def blocks_of(self, hold: Hold) -> list[Ids]:
        """What a hold found, for each group."""
        return self._by_group(hold.receipt.match.blocks)

    def attach(self, sequence: Sequence, hold: Hold) -> None:
        """Give a new sequence its hold, and count what it found."""
        found = hold.num_tokens
        sequence._hold = hold
        sequence._published = found // self._block_size
        self.num_query_tokens += sequence.num_tokens
        self.num_hit_tokens += found
        self.num_hits += found > 0
        self.num_misses += found == 0

    def give_back(self, hold: Hold, rank: float | None = None) -> None:
        """Give up a hold, after the row that it stood for is gone."""
        self.tree.release(hold.receipt, time=self._now(), rank=rank)

    def remove(self, sequence: Sequence, rank: float | None = None) -> None:
        """A sequence is gone, and so is its row."""
        self.give_back(sequence._hold, rank)
        self._cut.discard(sequence)
        self._doubled.discard(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A sequence lost its row, and may come back."""
        self._hold_nothing(sequence)
        self._cut.discard(sequence)
        self._doubled.discard(sequence)
        sequence._published = 0

    def fork(self, children: Listed[Sequence], parents: Listed[Sequence]) -> None:
        """The rows of children have become those of parents, which had published what they could before that."""
        forked = [(Hold(p._hold.receipt.fork(), p._hold.keep), p._published) for p in parents]
        doubled = [parent in self._doubled for parent in parents]
        for child, (hold, published), is_doubled in zip(children, forked, doubled, strict=True):
            if child._hold is not None:  # it is not new
                self.give_back(child._hold)
            child._hold, child._published = hold, published
            self._note_cut(child)
            (self._doubled.add if is_doubled else self._doubled.discard)(child)

    def come_back(self, sequences: Listed[Sequence]) -> None:
        """Sequences have rows again, with blocks of their own that they may share with each other."""
        # All who share a block get a hold on it at once, unless one has ids that are yet to come.
        may_share = all(sequence.num_tokens >= sequence.num_computed_tokens for sequence in sequences)
        for sequence in sequences:
            self._publish(sequence, may_share)

    def cut(self, sequence: Sequence, length: int) -> None:
        """A row was cut to `length` tokens, the sequence will be: hold what it still shares, and no more."""
        sequence._published = min(sequence._published, length // self._block_size)
        self._shorten(sequence, -(-length // self._block_size))
        self._note_cut(sequence)

    def _shorten(self, sequence: Sequence, end: int) -> None:
        """Hold the first `end` blocks, and no more."""
        if sequence._hold.num_tokens <= end * self._block_size:
            return
        if end:
            self._offer(sequence, end)
        else:
            self._hold_nothing(sequence)

    def _note_cut(self, sequence: Sequence) -> None:
        if sequence._hold.num_tokens > sequence._published * self._block_size:
            self._cut.add(sequence)
        else:
            self._cut.discard(sequence)

    def _hold_nothing(self, sequence: Sequence) -> None:
        self.give_back(sequence._hold)
        sequence._hold.receipt = self.tree.match_and_lock(NONE, namespace=sequence._hold.keep.namespace)

    # -- keeping -------------------------------------------------------------------------------------------------

    def publish(self, sequences: Iterable[Sequence]) -> None:
        """Keep what is full, computed and known of each, and move its hold to the end of that."""
        for sequence in sequences:
            self._publish(sequence, False)

    def _publish(self, sequence: Sequence, may_share: bool) -> None:
        whole = min(sequence.num_tokens, sequence.num_computed_tokens) // self._block_size
        first, hold = sequence._published, sequence._hold
        if whole > first and not may_share:
            # Not past what another row has a part in: it would have blocks of the tree that it has no hold on.
            whole = first + self._rows.num_unshared(sequence, first, whole)
        if whole <= first:
            return
        if hold.keep.is_plain:
            if self._rows.extend(sequence, hold.receipt, whole):
                self._doubled.add(sequence)
        else:
            self._offer(sequence, whole)
        sequence._published = whole
        self._cut.discard(sequence)

    def _offer(self, sequence: Sequence, num_blocks: int) -> None:
        hold = sequence._hold
        keep, now = hold.keep, self._now()
        lanes = [self._tables.blocks(sequence.row, group)[:num_blocks] for group in self._lanes]
        inserted = self.tree.insert(
            sequence.tokens[: num_blocks * self._block_size],
            lanes[0] if len(lanes) == 1 else lanes,
            namespace=keep.namespace,
            spans=keep.spans,
            receipt=hold.receipt,
            time=now,
            priority=keep.priority,
            time_to_live=keep.time_to_live,
            rank=keep.rank,
        )
        for lane, blocks in enumerate(self._by_lane(inserted.taken)):
            self._pools[self._lanes[lane]].share(blocks)
        if any(map(len, self._by_lane(inserted.duplicates))):
            self._doubled.add(sequence)

    # -- giving up -----------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> bool:
        """`Step.prepare`, by eviction where blocks are short; False, with nothing changed, where that is not enough."""
        cut = [sequence for sequence in self._cut if step.brings_tokens(sequence)] if self._cut else []
        while not step.prepare(self._tables):
            missing = step.missing(self._tables)
            if any(self._lacking(missing, cut)):
                return False
            self._let_go(cut)
            if not self._free(missing) and not cut:
                return False
            cut = []
        self._let_go(cut)
        return True

    def lacking(self, missing: Listed[int], sequences: Listed[Sequence], counts: ArrayLike) -> list[int]:
        """Of the blocks of each group that a step lacks, those that eviction cannot free."""
        if not self._cut:
            return self._lacking(missing, [])
        given = np.broadcast_to(counts, len(sequences)).tolist()
        writers = {sequence for sequence, count in zip(sequences, given, strict=True) if count}
        return self._lacking(missing, writers & self._cut)

    def make_room(self, missing: Listed[int]) -> bool:
        """Free so many blocks of each group by eviction; False, with nothing changed, where there are fewer."""
        if any(self._lacking(missing, [])):
            return False
        self._free(missing)
        return True

    def _lacking(self, missing: Listed[int], cut: Iterable[Sequence]) -> list[int]:
        lacking = [count - self.tree.evictable(name) for count, name in zip(missing, self._components, strict=True)]
        if max(lacking) <= 0:
            return [0] * len(lacking)
        for group, more in enumerate(self._num_unused()):
            lacking[group] -= more
        for sequence in cut:
            # A block that it shares with the tree alone can be evicted, and is then not copied.
            for lane, group in enumerate(self._lanes):
                block = self._block(sequence, sequence._published, group)
                is_shared = block != 0 and self._pools[group].ref_count(block) == 2
                lacking[group] -= is_shared and self._known(sequence, sequence._published, lane) == block
        return [max(0, count) for count in lacking]

    def _let_go(self, sequences: Iterable[Sequence]) -> None:
        """They write into the block in which they were cut, and share it no more."""
        for sequence in sequences:
            self._shorten(sequence, sequence._published)
            self._cut.discard(sequence)
            self._hand_over(sequence, sequence._published)

    def _hand_over(self, sequence: Sequence, index: int) -> None:
        """Where the tree must go on with a block that a sequence writes into, give it another's copy of that."""
        for lane, group in enumerate(self._lanes):
            block, pool = self._block(sequence, index, group), self._pools[group]
            for other in self._doubled if block and pool.ref_count(block) == 2 else ():
                if self._block(other, index, group) not in (0, block) and self._known(other, index, lane) == block:
                    self._exchange(other, index, lane)
                    break

    def _block(self, sequence: Sequence, index: int, group: int) -> int:
        """The block that a sequence has at a place of its row."""
        return int(self._tables.table(group)[sequence.row, index])

    def _known(self, sequence: Sequence, index: int, lane: int) -> int:
        """The block that the path of a sequence has there; 0 past its end."""
        if sequence._hold.num_tokens <= index * self._block_size:
            return 0
        return self.tree.block_at(sequence._hold.receipt, index, lane)

    def _exchange(self, sequence: Sequence, index: int, lane: int) -> int:
        """Let the tree have what the sequence has there, its own block or none; returns how many became free."""
        group = self._lanes[lane]
        own, pool = self._block(sequence, index, group), self._pools[group]
        if own:
            pool.share([own])
        return pool.free([self.tree.replace(sequence._hold.receipt, index, own, lane)])

    def _free(self, missing: Listed[int]) -> int:
        """Free so many blocks of each group, as far as there are as many; returns how many became free."""
        left = list(missing)
        if any(count > self.tree.evictable(name) for count, name in zip(left, self._components, strict=True)):
            self._reclaim(left)
        wanted = max((left[group] for group in self._lanes[: self._num_full]), default=0)
        if wanted > 0:
            self._evict("full", wanted, left)
        for group in self._lanes[self._num_full :]:
            if left[group] > 0:
                self._evict(self._components[group], left[group], left)
        return sum(missing) - sum(left)

    def clear(self) -> int:
        """Give up all that nobody uses; returns how many blocks became free."""
        before = self.num_evicted_blocks
        for name in self.tree.components:
            self._evict(name, self.tree.evictable(name), [0] * len(self._pools))
        return self.num_evicted_blocks - before

    def _unused(self) -> Iterator[_Unused]:
        """Blocks that the tree alone has a reference to, on paths that sequences hold; some more than once."""
        for sequence in list(self._sequences.values() if self._seen else self._doubled):
            hold = sequence._hold
            for lane in range(len(self._lanes)):
                end = hold.num_tokens // self._block_size
                first, last = self._watched(sequence, lane, end)
                for index, block in self._rows.find_unused(hold.receipt, lane, first, last, end):
                    yield _Unused(sequence, lane, index, block)

    def _watched(self, sequence: Sequence, lane: int, end: int) -> tuple[int, int]:
        """From where to where a path of so many blocks can have some that its sequence does not use."""
        if lane < self._num_full:
            return 0, end if sequence in self._doubled else 0
        seen = self._seen[lane - self._num_full]
        first = max(0, end - -(-max(seen, 1) // self._block_size))
        if sequence in self._doubled:
            return first, end
        return first, min(end, max(0, sequence.num_computed_tokens - seen) // self._block_size)

    def _reclaim(self, left: list[int]) -> None:
        """Take from the tree what it alone has of paths that are in use; their sequences' own blocks come instead."""
        for unused in self._unused():
            group = self._lanes[unused.lane]
            if left[group] > 0:
                left[group] -= self._exchange(unused.sequence, unused.place, unused.lane)

    def _evict(self, component: str, amount: int, left: list[int]) -> None:
        """Evict, and note in `left` what became free of each group."""
        gone = self.tree.evict(component, amount, time=self._now())
        for lane, blocks in enumerate(self._by_lane(gone.blocks)):
            group = self._lanes[lane]
            freed = self._pools[group].free(blocks)
            left[group] -= freed
            self.num_evicted_blocks += freed

    # -- for tests and errors ------------------------------------------------------------------------------------

    def counted(self, refusal: OutOfBlocks) -> OutOfBlocks:
        """A refusal that knows of free blocks only, with those that could be evicted."""
        evictable = self.evictable()
        if not any(evictable):
            return refusal
        wanted, free = np.atleast_1d(refusal.requested).tolist(), np.atleast_1d(refusal.available).tolist()
        total = [count + more for count, more in zip(free, evictable, strict=True)]
        text = ", ".join(
            f"{count} blocks are needed and {all_} can be had" + (f" in group {group}" if len(total) > 1 else "")
            for group, (count, all_) in enumerate(zip(wanted, total, strict=True))
        )
        figures: Any = (tuple(wanted), tuple(total)) if len(total) > 1 else (wanted[0], total[0])
        return OutOfBlocks(f"{text}, cached ones included; remove a sequence or make the pool larger", *figures)

    def check_invariants(self) -> None:
        """Recount every block from the rows and the tree."""
        self.tree.check_invariants()
        for lane, group in enumerate(self._lanes):
            pool = self._pools[group]
            holders = np.bincount(self._tables.table(group).ravel(), minlength=pool.num_blocks)
            holders[0] = 0
            holders[self.tree.held_blocks(lane)] += 1
            if not np.array_equal(holders, pool.ref_counts()):
                raise PagecoreError(f"group {group} has blocks counted otherwise than rows and prefix cache hold them")
        for sequence in self._sequences.values():
            more = sequence._hold.num_tokens - sequence._published * self._block_size
            is_cut = sequence in self._cut
            if more < 0 or (more > 0) != is_cut or (sequence.is_swapped and sequence._hold.num_tokens):
                raise PagecoreError(f"{sequence!r} holds otherwise of the prefix cache than it has published")
        strangers = (self._cut | self._doubled) - set(self._sequences.values())
        if self.tree.num_receipts != len(self._sequences) or strangers:
            raise PagecoreError(f"{self.tree.num_receipts} receipts are out for {len(self._sequences)} sequences")

    # -- lanes and groups ----------------------------------------------------------------------------------------

    def _now(self) -> float | None:
        return None if self._clock is None else self._clock()

    def _by_lane(self, blocks: Any) -> Listed[Ids]:
        return (blocks,) if len(self._lanes) == 1 else blocks

    def _by_group(self, blocks: Any) -> list[Ids]:
        listed = self._by_lane(blocks)
        return [listed[self._lanes.index(group)] for group in range(len(self._lanes))]


def make_keep(
    policy: str,
    namespace: Hashable,
    spans: Spans | None,
    priority: float | None,
    time_to_live: float | None,
    rank: float | None,
) -> Keep:
    """What a user says about a sequence, as far as it can be checked without its tokens."""
    if priority is not None and policy != "priority":
        raise UnsupportedOption(f"priority {priority} means nothing to policy {policy!r}; use 'priority'")
    if rank is not None and policy != "rank":
        raise UnsupportedOption(f"rank {rank} means nothing to policy {policy!r}; use 'rank'")
    if time_to_live is not None and priority is None:
        raise UnsupportedOption(f"time_to_live {time_to_live} needs a priority to fall back from; give both")
    if priority is not None and not 0 <= (priority := as_float("priority", priority)) <= 100:
        raise ShapeError(f"priority is {priority}; use 0 to 100")
    if time_to_live is not None and (time_to_live := as_float("time_to_live", time_to_live)) < 0:
        raise ShapeError(f"time_to_live is {time_to_live}; use 0 seconds or more")
    rank = None if rank is None else as_float("rank", rank)
    return Keep(namespace, None if spans is None else tuple(spans), priority, time_to_live, rank)


def _most(length: int, max_tokens: int | None) -> int:
    """Tokens that may be reused: the last one must be computed, since its output is what is wanted."""
    most = max(length - 1, 0)
    return most if max_tokens is None else min(most, at_least("max_tokens", max_tokens, least=0))
