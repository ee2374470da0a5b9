"""Free groups: frees that are collected and executed together."""

import gc

import pytest

from pagecore.errors import (
    DoubleFree,
    InvalidSequence,
)
from pagecore.index import BlockPool, SlotAllocator
from tests.index.slots import make as make_allocator


@pytest.fixture
def allocator():
    return make_allocator()


def test_a_group_frees_at_its_end(allocator):
    with allocator.free_group() as group:
        assert allocator.free([4, 5, 6, 7, 8, 9]) == 0
        assert allocator.free([12]) == 0
        assert (allocator.pool.num_free, allocator.num_available) == (5, 20)
        allocator.check_invariants()
    assert group.num_freed == 3
    assert allocator.pool.num_free == 8
    assert allocator.free([]) == 0


def test_frees_of_a_group_are_checked_at_once_against_each_other(allocator):
    allocator.pool.share(3)
    with allocator.free_group() as group:
        allocator.free([4, 5])
        with pytest.raises(DoubleFree):
            allocator.free([8, 4])
        allocator.free([12])
        allocator.free([12, 8])
        with pytest.raises(DoubleFree):
            allocator.free(12)
    assert group.num_freed == 3
    assert allocator.pool.ref_counts().tolist() == [0] * 10


def test_a_group_ends_if_its_body_raises(allocator):
    def body(group):
        with group:
            allocator.free([4])
            raise KeyError

    group = allocator.free_group()
    with pytest.raises(KeyError):
        body(group)
    assert group.num_freed == 1
    assert allocator.pool.ref_count(1) == 0
    assert allocator.free([8]) == 1


def test_the_outermost_group_frees(allocator):
    with allocator.free_group() as outer:
        with allocator.free_group() as inner:
            allocator.free([4])
        assert (inner.num_freed, allocator.pool.num_free) == (0, 5)
        allocator.free([8])
    assert (outer.num_freed, allocator.pool.num_free) == (2, 7)


def test_blocks_that_a_group_has_collected_are_neither_continued_nor_allocated(allocator):
    with allocator.free_group():
        allocator.free([8, 9])
        with pytest.raises(DoubleFree):
            allocator.decode([7], [9])
        assert allocator.try_allocate(21) is None
        assert allocator.allocate(20).tolist() == list(range(20, 40))


def test_slots_are_allocated_while_a_group_is_open(allocator):
    with allocator.free_group():
        allocator.free([4])
        assert allocator.decode([7, 4], [9, 14]).tolist() == [10, 15]
        allocator.free(allocator.allocate(4))
    allocator.check_invariants()
    assert allocator.pool.ref_counts().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0]


def test_the_end_of_a_group_reports_blocks_that_another_holder_freed(allocator):
    group = allocator.free_group().__enter__()
    allocator.free([4, 8, 12])
    allocator.pool.free(2)
    with pytest.raises(DoubleFree, match="block 2 "):
        group.__exit__(None, None, None)
    assert allocator.pool.ref_counts().tolist() == [0] * 10  # the others were freed
    allocator.check_invariants()
    assert allocator.free(allocator.allocate(8)) == 2


def test_a_group_is_opened_once_at_a_time_and_can_be_used_again(allocator):
    group = allocator.free_group()
    assert group.allocator is allocator
    with pytest.raises(InvalidSequence):
        group.__exit__(None, None, None)
    for slot in (4, 8):
        with group:
            allocator.free(slot)
            with pytest.raises(InvalidSequence):
                group.__enter__()
        assert group.num_freed == 1
    assert allocator.free(12) == 1


def test_an_allocator_that_is_freed_frees_the_blocks_of_an_open_group():
    pool = BlockPool(10)
    allocator = SlotAllocator(pool, 4)
    allocator.free_group().__enter__()
    allocator.free(allocator.allocate(8))
    allocator.allocate(1)
    assert pool.num_free == 6
    del allocator
    gc.collect()
    assert pool.num_free == 8
    pool.check_invariants()
