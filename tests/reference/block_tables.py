"""BlockTables in plain Python; a call that fails half way restores a saved copy of the state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagecore.errors import InvalidBlock, InvalidSequence, OutOfBlocks, OutOfRows, ShapeError
from tests.reference.block_pool import BlockPool


@dataclass
class Row:
    length: int
    blocks: list[list[int]]  # of each group
    shared_to: list[int]  # of each group: tokens before it are not written


@dataclass
class Copy:
    source: int
    target: int
    is_dropped: bool = False


class BlockTables:
    """Twin of `pagecore.index.BlockTables`, always with groups; lists in, lists out."""

    def __init__(self, pools: list[BlockPool], block_sizes: list[int], max_sequences: int, max_blocks: int):
        self.pools = pools
        self.block_sizes = block_sizes
        self.max_sequences = max_sequences
        self.max_length = min(2**31 - 1, *(size * max_blocks for size in block_sizes))
        self.rows: dict[int, Row] = {}
        self.copies: list[list[Copy]] = [[] for _ in pools]

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        distinct = {id(pool): pool for pool in self.pools}.values()
        saved = copy.deepcopy((self.rows, self.copies, [vars(pool) for pool in distinct]))
        try:
            yield
        except Exception:
            self.rows, self.copies, states = saved
            for pool, state in zip(distinct, states, strict=True):
                vars(pool).update(state)
            raise

    # Parts.

    def row(self, row: int) -> Row:
        if row not in self.rows:
            raise InvalidSequence(str(row))
        return self.rows[row]

    def distinct(self, rows: list[int]) -> list[Row]:
        if len(set(rows)) < len(rows):
            raise InvalidSequence("twice")
        return [self.row(row) for row in rows]

    def new_row(self, row: Row) -> int:
        free = [number for number in range(self.max_sequences) if number not in self.rows]
        if not free:
            raise OutOfRows("all")
        self.rows[free[0]] = row
        return free[0]

    def drop(self, group: int, row: Row, start: int, stop: int | None = None) -> int:
        """Replace blocks [start, stop) by holes, last first; return the number that became free."""
        blocks = row.blocks[group]
        freed = 0
        for at in reversed(range(start, len(blocks) if stop is None else stop)):
            block, blocks[at] = blocks[at], 0
            if block and self.pools[group].free([block]):
                self.forget(group, block)
                freed += 1
        return freed

    def forget(self, group: int, target: int) -> None:
        for pending in self.copies[group]:
            pending.is_dropped |= pending.target == target

    def shrink(self, group: int, row: Row, count: int) -> None:
        self.drop(group, row, min(count, len(row.blocks[group])))
        del row.blocks[group][count:]

    # Rows.

    def add(self, prefix: list[list[int]] | None = None, length: int | None = None) -> int:
        blocks = prefix or [[] for _ in self.pools]
        shared_to = [len(part) * size for part, size in zip(blocks, self.block_sizes, strict=True)]
        if (length is None and len(set(shared_to)) > 1) or max(shared_to) > self.max_length:
            raise ShapeError(str(shared_to))
        computed = max(shared_to) if length is None else length
        if not 0 <= computed <= min(shared_to):
            raise ShapeError(str(length))
        with self.all_or_nothing():
            row = self.new_row(Row(computed, [list(part) for part in blocks], shared_to))
            for pool, part, size, end in zip(self.pools, blocks, self.block_sizes, shared_to, strict=True):
                first_shared = len(part) if computed == end else computed // size
                for i, block in enumerate(part):  # in order: the first invalid entry decides the error
                    if block:
                        pool.share([block])
                    elif i >= first_shared:
                        raise InvalidBlock("a hole")
        return row

    def fork(self, parent: int) -> int:
        row = self.new_row(copy.deepcopy(self.row(parent)))
        self.share(self.rows[row])
        return row

    def share(self, row: Row) -> None:
        for pool, blocks in zip(self.pools, row.blocks, strict=True):
            pool.share([block for block in blocks if block])

    def remove(self, rows: list[int]) -> None:
        removed = self.distinct(rows)
        for group in range(len(self.pools)):
            for row in removed:
                self.shrink(group, row, 0)
        for number in rows:
            del self.rows[number]

    def reorder(self, rows: list[int], parents: list[int]) -> None:
        self.distinct(rows)
        before = {parent: copy.deepcopy(self.row(parent)) for parent in parents}
        moved = [pair for pair in zip(rows, parents, strict=True) if pair[0] != pair[1]]
        for _, parent in moved:
            self.share(before[parent])
        for group in range(len(self.pools)):
            for row, _ in moved:
                self.shrink(group, self.rows[row], 0)
        for row, parent in moved:
            self.rows[row] = copy.deepcopy(before[parent])

    # Tokens.

    def check_step(self, rows: list[int], counts: list[int]) -> None:
        for row, count in zip(self.distinct(rows), counts, strict=True):
            if count < 0 or row.length + count > self.max_length:
                raise ShapeError(str(count))

    def simulate(
        self, rows: list[int], counts: list[int], first_blocks: list[int] | None = None
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Extend, inventing blocks for an empty pool; return slots, and blocks needed and available by group."""
        firsts = [0] * len(self.pools) if first_blocks is None else first_blocks
        if len(firsts) != len(self.pools) or min(firsts) < 0:
            raise ShapeError(str(firsts))
        slots: list[list[int]] = []
        needed: list[int] = []
        available: list[int] = []
        for group, size in enumerate(self.block_sizes):
            available.append(self.pools[group].num_free)
            needed.append(0)
            for number, count in zip(rows, counts, strict=True):
                needed[-1] += self.touch(group, self.rows[number], count, firsts[group])
            slots.append([
                self.rows[number].blocks[group][position // size] * size + position % size
                if position // size >= firsts[group] and position >= self.rows[number].shared_to[group] else -1
                for number, count in zip(rows, counts, strict=True)
                for position in range(self.rows[number].length, self.rows[number].length + count)
            ])  # fmt: skip
        for number, count in zip(rows, counts, strict=True):
            self.rows[number].length += count
        return slots, needed, available

    def touch(self, group: int, row: Row, count: int, first: int) -> int:
        """Make the blocks of the next `count` tokens, from block `first` on, the row's own; return the blocks taken."""
        pool, size, blocks = self.pools[group], self.block_sizes[group], row.blocks[group]
        needed = 0

        def take() -> int:
            nonlocal needed
            needed += 1
            return pool.take() if pool.num_free else -1

        for at in sorted({position // size for position in range(row.length, row.length + count)}):
            if (at + 1) * size <= row.shared_to[group] and row.length < row.shared_to[group]:
                continue
            if at < first:
                blocks += [0] * (at == len(blocks))
            elif at == len(blocks):
                blocks.append(take())
            elif blocks[at] == 0:
                blocks[at] = take()
            elif pool.holders[blocks[at]] > 1:
                source, blocks[at] = blocks[at], take()
                pool.free([source])
                if at * size < row.length:
                    self.forget(group, blocks[at])
                    self.copies[group].append(Copy(source, blocks[at]))
        return needed

    def extend(self, rows: list[int], counts: list[int], first_blocks: list[int] | None = None) -> list[list[int]]:
        self.check_step(rows, counts)
        with self.all_or_nothing():
            slots, needed, available = self.simulate(rows, counts, first_blocks)
            if any(need > have for need, have in zip(needed, available, strict=True)):
                raise OutOfBlocks("short", tuple(needed), tuple(available))
        return slots

    def shortage(self, rows: list[int], counts: list[int], first_blocks: list[int] | None = None) -> list[int]:
        self.check_step(rows, counts)
        _, needed, available = copy.deepcopy(self).simulate(rows, counts, first_blocks)
        return [max(need - have, 0) for need, have in zip(needed, available, strict=True)]

    def truncate(self, rows: list[int], lengths: list[int], keep_capacity: bool = False) -> None:
        cut = self.distinct(rows)
        for row, length in zip(cut, lengths, strict=True):
            if not 0 <= length <= row.length:
                raise ShapeError(str(length))
        for group, size in enumerate(self.block_sizes):
            for row, length in zip(cut, lengths, strict=True):
                if not keep_capacity:
                    self.shrink(group, row, -(-length // size))
        for row, length in zip(cut, lengths, strict=True):
            if length < row.length or not keep_capacity:
                row.shared_to = [min(end, length) for end in row.shared_to]
            row.length = length

    def release_before(self, rows: list[int], group: int, positions: list[int], first: int = 0) -> int:
        if first < 0:
            raise ShapeError(str(first))
        released = self.distinct(rows)
        for row, position in zip(released, positions, strict=True):
            if not 0 <= position <= row.length:
                raise ShapeError(str(position))
        size = self.block_sizes[group]
        return sum(
            self.drop(group, row, -(-first // size), position // size)
            for row, position in zip(released, positions, strict=True)
        )

    def take_copies(self, group: int) -> list[tuple[int, int]]:
        pending, self.copies[group] = self.copies[group], []
        kept: list[Copy] = []
        for pair in reversed(pending):
            is_dropped = pair.is_dropped or self.pools[group].holders[pair.target] == 0
            if not is_dropped or any(later.source == pair.target for later in kept):
                kept.append(pair)
        return [(pair.source, pair.target) for pair in reversed(kept)]

    def capacity(self, row: int) -> int:
        return min(len(blocks) * size for blocks, size in zip(self.row(row).blocks, self.block_sizes, strict=True))
