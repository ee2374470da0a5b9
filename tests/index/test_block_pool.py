"""BlockPool beyond its twin: bad input, threads, memory, buffers."""

import pickle
import threading

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.index import BlockPool
from tests.together import together

ORDERS = ("lifo", "fifo", "address")


def snapshot(pool):
    return pool.ref_counts().tolist(), pool.num_free, pool.num_used, pool.num_retired


@pytest.fixture(params=ORDERS)
def pool(request):
    """Blocks 1 to 5 held, 5 by two, 6 retired, 7 to 9 free."""
    pool = BlockPool(10, order=request.param)
    pool.allocate(6)
    pool.share(5)
    pool.retire(6, step=1)
    return pool


@pytest.mark.parametrize("num_blocks", [1, 0, -1, 2**31, 2**70, -(2**70)])
def test_a_pool_of_an_impossible_size_is_refused(num_blocks):
    with pytest.raises(ShapeError):
        BlockPool(num_blocks)


@pytest.mark.parametrize("order", ["random", "", None, 3, ["lifo"]])
def test_an_unknown_order_is_refused_by_name(order):
    with pytest.raises(UnsupportedOption, match="lifo, fifo, address"):
        BlockPool(4, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_the_largest_pool_costs_nothing_until_it_is_used(order):
    pool = BlockPool(2**31 - 1, order=order)
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert pool.num_free == 2**31 - 5


@pytest.mark.parametrize("method", ["free", "share", "retire"])
@together(
    ("blocks", "error"),
    [
        (0, InvalidBlock),
        (10, InvalidBlock),
        (-1, InvalidBlock),
        (2**31, InvalidBlock),
        (2**80, InvalidBlock),
        ([2**80], InvalidBlock),
        (np.uint64(2**63), InvalidBlock),
        (np.array([1, 2**31]), InvalidBlock),
        (np.array([2, 1, -(2**31) - 1]), InvalidBlock),
        (np.array([1, 2**32 + 2]), InvalidBlock),
        ([1, 2, 0], InvalidBlock),
        ([5, 4, 10], InvalidBlock),
        (6, DoubleFree),
        (7, DoubleFree),
        ([1, 5, 5, 8], DoubleFree),
        ([[1, 2]], ShapeError),
        ([1, [2]], ShapeError),
        (1.0, UnsupportedDtype),
        ("1", UnsupportedDtype),
        (None, UnsupportedDtype),
        (True, UnsupportedDtype),
        ([True], UnsupportedDtype),
        ({1, 2}, UnsupportedDtype),
    ],
)
def test_bad_blocks_are_refused_and_nothing_changes(pool, method, blocks, error):
    arguments = (blocks, 4) if method == "retire" else (blocks,)
    before = snapshot(pool)
    with pytest.raises(error):
        getattr(pool, method)(*arguments)
    assert snapshot(pool) == before
    pool.check_invariants()


def test_a_refusal_names_what_was_wrong():
    pool = BlockPool(4)
    for refused, text in (
        (lambda: pool.share(1), "block 1 cannot be shared: it is free; share a block while it has references"),
        (lambda: pool.free(1), "block 1 cannot be freed: it is free, or the list drops more references than it has"),
    ):
        with pytest.raises(DoubleFree, match=text):
            refused()


@pytest.mark.parametrize("blocks", [[4, 4], [5, 5, 5], [1, 2, 1], [4, 7, 4]])
def test_a_list_with_more_references_than_a_block_has_changes_nothing(pool, blocks):
    before = snapshot(pool)
    for refused in (lambda: pool.free(blocks), lambda: pool.retire(blocks, 1), lambda: pool.retire(blocks, 9)):
        with pytest.raises(DoubleFree):
            refused()
        assert snapshot(pool) == before
        pool.check_invariants()
    assert pool.reclaim(9) == 1


@pytest.mark.parametrize(
    ("n", "error"),
    [(4, OutOfBlocks), (2**40, OutOfBlocks), (2**80, OutOfBlocks), (-1, ShapeError), (1.5, UnsupportedDtype)],
)
def test_an_allocation_that_fails_takes_nothing(pool, n, error):
    before = snapshot(pool)
    with pytest.raises(error) as refused:
        pool.allocate(n)
    assert snapshot(pool) == before
    if error is OutOfBlocks:
        assert (refused.value.requested, refused.value.available) == (n, 3)
        assert pool.try_allocate(n) is None


@pytest.mark.parametrize("block", [10, -1, 2**40, 2**80])
def test_ref_count_of_a_block_outside_the_pool_raises(pool, block):
    with pytest.raises(InvalidBlock):
        pool.ref_count(block)


def test_free_retired_and_null_blocks_have_no_references(pool):
    assert [pool.ref_count(block) for block in (0, 6, 7)] == [0, 0, 0]
    assert pool.ref_counts().tolist() == [0, 1, 1, 1, 1, 2, 0, 0, 0, 0]


@together(
    "make",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array(ids, ">i4"),
        lambda ids: np.repeat(np.array(ids, np.int32), 2)[::2],
        lambda ids: [np.int16(i) for i in ids],
        lambda ids: memoryview(np.array(ids, np.int32)),
        lambda ids: np.array(ids, object),
        lambda ids: np.array(ids[::-1], np.int32)[::-1],
        lambda ids: np.frombuffer(b"." + np.array(ids, np.int32).tobytes(), np.uint8)[1:].view(np.int32),  # not aligned
    ],
)
def test_ids_are_accepted_in_every_integer_container(make):
    pool = BlockPool(10)
    pool.allocate(5)
    pool.share(make([2, 3]))
    assert pool.free(make([1, 2, 3])) == 1
    assert pool.ref_counts().tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("nothing", [[], (), np.zeros(0), np.zeros(0, np.int64)])
def test_empty_lists_are_accepted(pool, nothing):
    before = snapshot(pool)
    pool.share(nothing)
    assert pool.free(nothing) == pool.retire(nothing, 3) == 0
    assert pool.allocate(0).shape == (0,)
    assert snapshot(pool) == before


def test_results_are_not_aliased():
    pool = BlockPool(10)
    blocks = pool.allocate(3)
    assert blocks.dtype == np.int32
    blocks[:] = 9
    assert pool.allocate(1).tolist() == [4]


def test_retired_blocks_come_back_by_step_and_then_in_the_order_they_were_retired():
    pool = BlockPool(10, order="fifo")
    pool.allocate(9)
    assert pool.retire([3, 1], step=7) == 2
    assert pool.retire([4], step=5) == 1
    assert pool.retire([2], step=7) == 1
    assert (pool.num_free, pool.num_retired, pool.reclaim(4)) == (0, 4, 0)
    assert pool.reclaim(7) == 4
    assert pool.allocate(4).tolist() == [4, 3, 1, 2]


def test_an_index_takes_at_most_16_bytes_a_block():
    num_blocks = 1 << 20
    for order in ORDERS:
        assert BlockPool(num_blocks, order=order).nbytes <= 16 * num_blocks


def test_a_pool_is_neither_copied_nor_made_without_a_size():
    with pytest.raises(TypeError):
        pickle.dumps(BlockPool(4))
    with pytest.raises(TypeError):
        BlockPool.__new__(BlockPool)


@pytest.mark.parametrize("order", ORDERS)
def test_threads_never_hold_the_same_block_twice(order):
    num_threads, rounds, batch = 4, 60, 1500  # batches large enough that the GIL is released
    pool = BlockPool(num_threads * batch + 1, order=order)
    owner = np.full(pool.num_blocks, -1)
    clashes = []

    def work(me):
        for turn in range(rounds):
            blocks = pool.allocate(batch)
            clashes.append(int((owner[blocks] != -1).sum()))
            owner[blocks] = me
            pool.share(blocks)
            clashes.append(int((owner[blocks] != me).sum()) + int(pool.free(blocks) != 0))
            owner[blocks] = -1
            if turn % 2:
                pool.free(blocks)
            else:
                pool.retire(blocks, step=turn)
                pool.reclaim(step=turn)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(clashes) == 2 * num_threads * rounds
    assert not any(clashes)
    pool.reclaim(rounds)
    assert pool.num_free == pool.num_blocks - 1
    pool.check_invariants()
