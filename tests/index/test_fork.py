"""os.fork() while other threads use the pools: in the child no call is half done."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from pagecore.index import BlockPool, BlockTables, RadixTree, SlotAllocator

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # of JAX, where another test has imported it
]

NUM_FORKS = 20
SECONDS_FOR_A_CHILD = 20


def in_child(work):
    """Run `work` in a forked child; return its exit status, or None if it hung."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + SECONDS_FOR_A_CHILD
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


class Busy:
    """Threads that run `work` repeatedly while the context is open."""

    def __init__(self, *works):
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(work,)) for work in works]

    def run(self, work):
        while not self.stop.is_set():
            work()

    def __enter__(self):
        for thread in self.threads:
            thread.start()

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def share_and_free(pool, ids):
    def work():
        pool.share(ids)
        pool.free(ids)

    return work


def test_a_child_finds_every_pool_free_and_whole():
    pool = BlockPool(40_000)
    ids = pool.allocate(30_000)
    tables = BlockTables([pool, pool], block_sizes=[2, 4], max_sequences=4, max_blocks_per_sequence=64)
    row = tables.add()
    allocator = SlotAllocator(pool, 4)

    def work():
        held = set(pool.ref_counts()[ids].tolist())
        assert held in ({1}, {2})  # all of the list or none
        pool.check_invariants()
        tables.extend(row, 9)
        allocator.free(allocator.allocate(9))
        assert pool.num_used + pool.num_free == 39_999
        BlockPool(4).allocate(1)

    with Busy(share_and_free(pool, ids), lambda: pool.num_free, lambda: BlockPool(4).num_free):
        assert [in_child(work) for _ in range(NUM_FORKS)] == [0] * NUM_FORKS
    pool.check_invariants()


def test_a_child_may_fork_again_and_the_parent_goes_on():
    pool = BlockPool(40_000)
    ids = pool.allocate(30_000)

    def grandchild():
        assert pool.ref_count(int(ids[0])) in (1, 2)

    def work():
        assert in_child(grandchild) == 0

    with Busy(share_and_free(pool, ids)):
        assert [in_child(work) for _ in range(5)] == [0] * 5
    assert pool.ref_count(int(ids[0])) == 1


def test_an_argument_may_fork_in_the_middle_of_a_call():
    tree, pool = RadixTree(1), BlockPool(9)
    status = []

    class Number:
        def __index__(self):
            def work():
                assert tree.insert([1], [1]).num_tokens == 1
                assert pool.allocate(2).size == 2

            status.append(in_child(work))
            return 2

    assert pool.allocate(Number()).tolist() == [1, 2]
    assert tree.match([1], max_tokens=Number()).num_tokens == 0
    assert status == [0, 0]


def test_pools_are_made_and_freed_while_a_process_forks():
    kept = []

    def make():
        pools = [BlockPool(64) for _ in range(8)]
        tables = BlockTables(pools, block_sizes=[1] * 8, max_sequences=1, max_blocks_per_sequence=4)
        tables.extend(tables.add(), 3)
        kept[:] = [np.array([pool.num_used for pool in pools]), tables]

    with Busy(make, make):
        assert [in_child(make) for _ in range(NUM_FORKS)] == [0] * NUM_FORKS
