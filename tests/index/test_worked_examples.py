"""Worked examples 1 to 7, exactly."""

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks, PagecoreError
from pagecore.index import BlockPool, BlockTables, RequestTable, SlotAllocator
from pagecore.ops import write_kv


def test_example_1_a_lifo_pool_of_four():
    pool = BlockPool(4)
    assert [pool.allocate(1).tolist() for _ in range(3)] == [[1], [2], [3]]
    with pytest.raises(OutOfBlocks) as short:
        pool.allocate(1)
    assert (short.value.requested, short.value.available) == (1, 0)

    assert pool.free(2) == 1
    assert pool.allocate(1).tolist() == [2]
    pool.share(2)
    assert pool.ref_count(2) == 2
    assert pool.free(2) == 0
    assert (pool.ref_count(2), pool.num_free) == (1, 0)
    assert pool.free(2) == 1
    assert (pool.ref_count(2), pool.num_free) == (0, 1)

    for refused in (pool.free, pool.share):
        with pytest.raises(DoubleFree):
            refused(2)
    for outside in (4, -1):
        with pytest.raises(InvalidBlock):
            pool.ref_count(outside)

    pool.free(1)
    pool.free(3)
    assert [pool.allocate(1).tolist() for _ in range(3)] == [[3], [1], [2]]


@pytest.mark.parametrize("num_blocks", [0, -1, 1])
def test_example_1_a_pool_of_only_the_null_block_is_refused(num_blocks):
    with pytest.raises(PagecoreError):
        BlockPool(num_blocks)


def test_example_2_tables_of_block_size_four():
    pool = BlockPool(17)
    tables = BlockTables(pool, block_sizes=4, max_sequences=4, max_blocks_per_sequence=8)
    row = tables.add()
    tables.extend(row, 7)
    assert len(tables.blocks(row)) == 2
    assert np.array_equal(tables.table()[row, :2], tables.blocks(row))
    assert pool.num_free == 14

    other = tables.add()
    tables.extend(other, 3)
    assert len(tables.blocks(other)) == 1
    tables.extend(other, 1)
    assert len(tables.blocks(other)) == 1
    tables.extend(other, 1)
    first, second = tables.blocks(other)
    assert 0 not in (first, second)
    assert first != second


def test_example_2_removing_a_sequence_frees_every_block():
    pool = BlockPool(17)
    tables = BlockTables(pool, block_sizes=4, max_sequences=4, max_blocks_per_sequence=8)
    row = tables.add()
    tables.extend(row, 5)
    assert pool.num_free == 14
    tables.remove(row)
    assert pool.num_free == 16


def test_example_3_a_fifo_pool_of_eleven():
    pool = BlockPool(11, order="fifo")
    assert pool.allocate(3).tolist() == [1, 2, 3]
    assert pool.allocate(4).tolist() == [4, 5, 6, 7]
    assert pool.free([1, 2, 3]) == 3
    assert pool.allocate(5).tolist() == [8, 9, 10, 1, 2]
    assert pool.num_free == 1
    assert pool.try_allocate(2) is None


@pytest.fixture
def extended():
    """Return the allocator of example 4 after the example."""
    pool = BlockPool(6, order="address")
    allocator = SlotAllocator(pool, 4)
    pool.allocate(5)
    pool.free([3, 5])
    slots = allocator.extend([6], [13], [5])
    assert slots.tolist() == [6, 7, 12, 13, 14, 15, 20]
    return allocator


def test_example_4_an_extension_fills_a_block_takes_a_whole_one_and_opens_another(extended):
    assert extended.pool.num_free == 0
    with pytest.raises(OutOfBlocks):
        extended.allocate(1)


def test_example_5_decode_continues_a_block_or_opens_one():
    pool = BlockPool(6, order="address")
    allocator = SlotAllocator(pool, 4)
    pool.allocate(2)
    assert allocator.decode([7], [5]).tolist() == [6]
    assert allocator.decode([9], [7]).tolist() == [12]


def test_example_6_slots_free_whole_blocks_and_no_tails(extended):
    assert extended.free([12, 13, 14, 15, 20]) == 2
    assert extended.pool.ref_counts().tolist() == [0, 1, 1, 0, 1, 0]
    with pytest.raises(InvalidBlock):
        extended.free([6, 7])
    assert extended.pool.ref_counts().tolist() == [0, 1, 1, 0, 1, 0]


def test_example_7_a_request_continues_after_cached_slots():
    pool = BlockPool(100, order="address")
    allocator = SlotAllocator(pool, 1)
    allocator.allocate(99)
    assert pool.num_free == 0
    allocator.free([5, 9])
    requests = RequestTable(4, 16)
    (row,) = requests.allocate(1)
    requests.write(row, 0, [42, 17, 88])
    slots = allocator.allocate(2)
    assert slots.tolist() == [5, 9]
    requests.write(row, 3, slots)
    assert requests.read(row).tolist() == [42, 17, 88, 5, 9]

    before = np.random.default_rng(7).normal(size=(2, 100, 1, 2, 8)).astype(np.float32)
    key_cache, value_cache = before.copy()
    key, value = np.random.default_rng(8).normal(size=(2, 2, 2, 8)).astype(np.float32)
    write_kv(key, value, key_cache, value_cache, slots)
    for cache, new, old in ((key_cache, key, before[0]), (value_cache, value, before[1])):
        assert np.array_equal(cache[[5, 9], 0], new)
        others = np.delete(np.arange(100), [5, 9])
        assert np.array_equal(cache[others], old[others])
