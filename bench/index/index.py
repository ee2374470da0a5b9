"""BlockPool, BlockTables, SlotAllocator, RequestTable and prepare, against plain Python and NumPy.

The controls are in bench/index/controls.py. They return the same ids, which is asserted before timing.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bench.harness.runner import Bench, Job, Work
from bench.harness.targets import DECODE_US_MAX, EXTEND_US_MAX, POOL_NS_MAX
from bench.index import prepare
from bench.index.controls import DequePool, HeapPool, ListPool, NumpyPool, NumpySlots, NumpyTables
from bench.index.slots import SlotCalls, uneven
from pagecore.index import BlockPool, BlockTables, RequestTable, SlotAllocator

BLOCK = 16
Order = Literal["lifo", "fifo", "address"]
PLAIN_POOLS: dict[Order, Any] = {"lifo": ListPool, "fifo": DequePool, "address": HeapPool}


def run(bench: Bench, options: argparse.Namespace) -> None:
    """Run pools, tables, slots, request tables and the whole step."""
    for order in PLAIN_POOLS:
        for count in (1, 16, 256, 2048):
            _pool(bench, order, count, worn=True)
        _pool(bench, order, 256, worn=False)
    _tables(bench, "decode", bench.pick(256, 8), 1)
    _tables(bench, "prefill", bench.pick(32, 2), 1024)
    _slots_extend(bench)
    _slots_decode(bench)
    _request_table(bench)
    prepare.run(bench, options)


def _pool(bench: Bench, order: Order, count: int, worn: bool) -> None:
    """Allocate and free, in a new pool or in a worn one with a random half of its blocks allocated."""
    num_blocks = bench.pick(65_536, 8192)
    ours, theirs = BlockPool(num_blocks, order=order), [PLAIN_POOLS[order](num_blocks)]
    if order == "lifo":
        theirs.append(NumpyPool(num_blocks))
    if worn:
        ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))[: num_blocks // 2]
        for pool in (ours, *theirs):
            pool.allocate(num_blocks - 1)
            pool.free(ids.tolist() if isinstance(pool, tuple(PLAIN_POOLS.values())) else ids)

    def pair(pool: Any) -> Work:
        return lambda: pool.free(pool.allocate(count))

    def check() -> None:
        for _ in range(2):
            taken = [pool.allocate(count) for pool in (ours, *theirs)]
            for pool, blocks in zip((ours, *theirs), taken, strict=True):
                np.testing.assert_array_equal(blocks, taken[0])
                pool.free(blocks)

    bench.compare(
        f"BlockPool allocate + free {count:>4}, {order}{', half held' if worn else ''}",
        pair(ours),
        {pool.name: pair(pool) for pool in theirs},
        check=check,
        unit="ns",
        per=count,
        each="block",
        at_most=POOL_NS_MAX if count == 256 else None,
        sizes={"num_blocks": num_blocks, "count": count, "order": order, "half_held": worn},
    )


def _tables(bench: Bench, kind: str, num_rows: int, count: int) -> None:
    """Extend all rows by one token at 8k context, or new rows by a prompt."""
    decode = count == 1
    context = bench.pick(8192, 256) if decode else 0
    columns = (context + max(count, 1024)) // BLOCK + 1
    num_blocks = num_rows * columns + 1
    ours = BlockTables(
        BlockPool(num_blocks), block_sizes=BLOCK, max_sequences=num_rows, max_blocks_per_sequence=columns
    )
    rows = np.array([ours.add() for _ in range(num_rows)], np.int32)
    theirs = NumpyTables(NumpyPool(num_blocks), BLOCK, num_rows + 1, columns)
    other = np.empty(num_rows * max(count, context), np.int64)
    if decode:
        lengths = uneven(num_rows, context, BLOCK).astype(np.int32)
        ours.extend(rows, lengths)
        theirs.extend(rows, lengths, other)
    counts = np.full(num_rows, count, np.int32)
    slots = np.empty(num_rows * count, np.int64)
    nothing = np.zeros(num_rows, np.int32)

    def clear_ours() -> None:
        if not decode:
            ours.truncate(rows, nothing)

    def clear_theirs() -> None:
        if not decode:
            for row in rows[::-1]:
                theirs.remove(row)

    def check() -> None:
        np.testing.assert_array_equal(ours.extend(rows, counts, out=slots), theirs.extend(rows, counts, other))
        clear_ours()
        clear_theirs()

    bench.compare(
        f"BlockTables.extend, {kind} {num_rows} x {count}",
        Job(lambda: ours.extend(rows, counts, out=slots), after=clear_ours),
        {theirs.name: Job(lambda: theirs.extend(rows, counts, other), after=clear_theirs)},
        check=check,
        sizes={"rows": num_rows, "tokens_a_row": count, "context": context, "block_size": BLOCK},
    )


def _slot_allocators(counts: NDArray[np.int64], num_blocks: int) -> tuple[SlotCalls, SlotCalls]:
    ours, theirs = SlotAllocator(BlockPool(num_blocks), BLOCK), NumpySlots(NumpyPool(num_blocks), BLOCK)
    return SlotCalls(ours, counts), SlotCalls(theirs, counts)


def _slots_extend(bench: Bench) -> None:
    """Extend new sequences by 1,024 tokens, and free them."""
    num_rows, count = bench.pick(32, 2), 1024
    counts, num_blocks = np.full(num_rows, count), num_rows * (count // BLOCK + 8) + 1
    ours, theirs = _slot_allocators(counts, num_blocks)
    sizes = {"rows": num_rows, "tokens_a_row": count, "block_size": BLOCK}

    def check() -> None:
        """Compare slots, also of prefixes that end anywhere in a block."""
        fresh = _slot_allocators(counts, num_blocks)
        for side in (*fresh, ours, theirs):
            side.extend()
        np.testing.assert_array_equal(ours.slots, theirs.slots)
        for side in fresh:
            prefix = side.seq_lens
            last = side.slots.reshape(num_rows, count)[:, -1]
            for more in (1 + np.arange(num_rows) % BLOCK, 5 + np.arange(num_rows)):
                side.slots = side.allocator.extend(prefix, prefix + more, last)
                prefix, last = prefix + more, side.slots[np.cumsum(more) - 1]
        np.testing.assert_array_equal(fresh[0].slots, fresh[1].slots)
        ours.free()
        theirs.free()

    def check_free() -> None:
        for side in (ours, theirs):
            side.extend()
            side.free()
        assert ours.allocator.pool.num_free == theirs.allocator.pool.top

    bench.compare(
        f"SlotAllocator.extend {num_rows} x {count}",
        Job(ours.extend, after=ours.free),
        {theirs.allocator.name: Job(theirs.extend, after=theirs.free)},
        check=check,
        at_most=EXTEND_US_MAX,
        sizes=sizes,
    )
    bench.compare(
        f"SlotAllocator.free {num_rows} x {count}",
        Job(ours.free, before=ours.extend),
        {theirs.allocator.name: Job(theirs.free, before=theirs.extend)},
        check=check_free,
        sizes=sizes,
    )


def _slots_decode(bench: Bench) -> None:
    """Decode one token of each sequence; lengths are uneven, so that one sequence in sixteen needs a block."""
    num_rows, context = bench.pick(256, 8), 1024
    ours, theirs = _slot_allocators(uneven(num_rows, context, BLOCK), num_rows * (2 * context // BLOCK))
    for side in (ours, theirs):
        side.begin_decode()

    def check() -> None:
        for _ in range(BLOCK + 1):
            for side in (ours, theirs):
                side.decode()
                side.grow()
            np.testing.assert_array_equal(ours.slots, theirs.slots)

    bench.compare(
        f"SlotAllocator.decode {num_rows}",
        Job(ours.decode, after=ours.grow),
        {theirs.allocator.name: Job(theirs.decode, after=theirs.grow)},
        check=check,
        at_most=DECODE_US_MAX,
        sizes={"rows": num_rows, "context": context, "block_size": BLOCK},
    )


def _request_table(bench: Bench) -> None:
    """Write the slots of a decode step to their rows."""
    num_rows, context = bench.pick(256, 8), 8192
    table = RequestTable(num_rows, context)
    plain = np.zeros((num_rows, context), np.int32)
    rows = table.allocate(num_rows)
    starts = context - 1 - np.arange(num_rows)
    slots = np.random.default_rng(0).integers(1, 2**30, num_rows)

    def ours() -> None:
        table.write(rows, starts, slots)

    def theirs() -> None:
        plain[rows, starts] = slots

    def check() -> None:
        ours()
        theirs()
        np.testing.assert_array_equal(table.table, plain)

    bench.compare(
        f"RequestTable.write, a slot in {num_rows} rows",
        ours,
        {"NumPy indexing": theirs},
        check=check,
        sizes={"rows": num_rows, "max_context": context},
    )
