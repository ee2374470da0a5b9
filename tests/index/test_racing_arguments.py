"""Arguments that another thread overwrites during a call: each value is read once."""

import os
import tempfile
import threading

import numpy as np
import pytest

from pagecore.errors import PagecoreError
from pagecore.index import BlockPool, BlockTables, RadixTree, RequestTable, SlotAllocator
from tests.thinning import in_turn

COUNT = 4096
NUM_CALLS = 1000
NUM_WRITES = 500  # of one system call


class Racing:
    """Context in which a thread without the GIL overwrites an array with invalid values and the originals."""

    def __init__(self, array, nonsense):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.file.write((nonsense.astype(array.dtype).tobytes() + array.tobytes()) * (NUM_WRITES // 2))
        self.file.flush()
        self.targets = [memoryview(array)] * NUM_WRITES
        self.begun, self.stop = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.stop.is_set():
            self.begun.set()
            os.preadv(self.file.fileno(), self.targets, 0)

    def __enter__(self):
        self.thread.start()
        self.begun.wait()

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.file.close()


def nonsense(array):
    """Return values of which only the last is out of range, so that earlier work must be undone."""
    return np.append(array[:-1] // 2 + 1, 2**31 - 5)


@pytest.mark.parametrize(
    ("method", "dtype", "order"),
    in_turn(["share", "free", "retire"], [np.int32, np.int64], over=[["lifo", "fifo", "address"]]),
)
def test_ids_of_a_pool_are_read_once(method, order, dtype):
    pool = BlockPool(COUNT + 1, order=order)
    whole = pool.allocate(COUNT)
    ids = whole.astype(dtype)
    step = [1] if method == "retire" else []
    with Racing(ids, nonsense(ids)):
        for _ in range(NUM_CALLS):
            pool.share(whole)
            pool.share(whole)
            try:
                getattr(pool, method)(ids, *step)
            except PagecoreError:
                assert (pool.ref_counts()[1:] == 3).all()
            pool.check_invariants()
            pool = BlockPool(COUNT + 1, order=order)
            pool.allocate(COUNT)


def keep(tree, tokens, lanes):
    """Insert and extend; each may be refused."""
    with tree.match_and_lock([]) as receipt:
        for call in (tree.insert, tree.extend):
            try:
                call(tokens, lanes, receipt=receipt)
            except PagecoreError:
                continue
            tree.check_invariants()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ids_and_tokens_of_a_tree_are_read_once(dtype):
    ids = np.arange(1, COUNT + 1).astype(dtype)
    tokens = np.arange(COUNT).astype(dtype)
    with Racing(ids, ids[::-1] + 10**6), Racing(tokens, tokens[::-1] % 7):
        for i in range(NUM_CALLS // 2):
            tree = RadixTree(1, windows=[COUNT])
            keep(tree, tokens, [ids, ids])
            if i % 20 == 0:
                tree.evict("full", COUNT)
                tree.check_invariants()


def test_rows_and_slots_are_read_once():
    pool = BlockPool(4 * COUNT + 1)
    tables = BlockTables(pool, block_sizes=1, max_sequences=COUNT, max_blocks_per_sequence=4)
    allocator = SlotAllocator(pool, 1)
    requests = RequestTable(COUNT, 4)
    rows = np.array([tables.add() for _ in range(COUNT)], np.int32)
    requests.allocate(COUNT)
    slots = allocator.allocate(COUNT)
    with Racing(rows, nonsense(rows)), Racing(slots, nonsense(slots)):
        for _ in range(NUM_CALLS // 5):
            for call in (
                lambda: tables.extend(rows, 1),
                lambda: tables.truncate(rows, 0),
                lambda: requests.write(rows, 0, slots),
                lambda: allocator.free(slots),
            ):
                try:
                    done = call()
                except PagecoreError:
                    continue
                if isinstance(done, int):
                    allocator.allocate(COUNT, np.empty(COUNT, np.int64))
    tables.check_invariants()
    allocator.check_invariants()
    requests.check_invariants()
