"""SlotAllocator beyond its twin: exact slots, sizes, arrays of the caller."""

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    ShapeError,
    UnsupportedOption,
)
from pagecore.index import BlockPool, SlotAllocator
from tests.index.slots import make as make_allocator
from tests.index.slots import snapshot
from tests.together import together


@pytest.fixture
def allocator():
    return make_allocator()


def test_an_allocation_takes_whole_blocks_and_names_the_first_slots_of_them(allocator):
    assert allocator.num_available == 20
    assert allocator.allocate(9).tolist() == list(range(20, 29))
    assert allocator.num_available == 8
    assert allocator.allocate(0).tolist() == []


def test_sequences_grow_by_their_partial_block_then_whole_ones_then_a_new_partial_one(allocator):
    slots = allocator.extend([6, 3, 0], [7, 9, 2], [9, 14, -1])
    assert slots.tolist() == [10, 15, 20, 21, 22, 23, 24, 28, 29]
    assert slots.dtype == np.int64


def test_a_sequence_that_does_not_grow_gets_nothing(allocator):
    before = snapshot(allocator)
    assert allocator.extend([6, 0, 3], [6, 0, 3], [9, -1, 14]).tolist() == []
    assert allocator.extend([], [], []).tolist() == allocator.decode([], []).tolist() == []
    assert snapshot(allocator) == before


def test_an_int_applies_to_all_sequences(allocator):
    assert allocator.extend(0, [2, 1], -1).tolist() == [20, 21, 24]
    assert allocator.extend(0, 2, [-1, -1]).tolist() == [28, 29, 32, 33]
    assert allocator.decode(7, [9]).tolist() == allocator.decode([7], 9).tolist() == [10]


@pytest.mark.parametrize(
    ("slots", "freed"),
    [
        ([4, 5, 6, 7, 8, 9], 2),
        ([4], 1),
        ([4, 8], 2),
        ([8, 9, 4, 5], 2),
        ([12, 13, 14, 15, 4], 2),  # slots that were never allocated, of a held block
        (4, 1),
        ([], 0),
        (np.array([4, 5, 8], np.int32), 2),
        (np.array([4, 5, 8], np.uint8), 2),
        (np.array([[4, 0], [5, 0], [8, 0]])[:, 0], 2),
        (np.array([4, 5, 8], ">i8"), 2),
        (np.array([4, 5, 8], object), 2),
    ],
)
def test_whole_blocks_are_freed_by_their_slots(allocator, slots, freed):
    before = allocator.pool.num_free
    assert allocator.free(slots) == freed
    assert allocator.pool.num_free == before + freed
    allocator.check_invariants()


def test_a_shared_block_is_freed_by_each_holder(allocator):
    allocator.pool.share([1, 1])
    assert allocator.free([4, 4]) == 0
    assert allocator.free([4]) == 1
    with pytest.raises(DoubleFree):
        allocator.free([4])


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda v: np.array(v, np.int32),
        lambda v: np.array(v, np.int64),
        lambda v: np.array(v, np.uint64),
        lambda v: np.array(v, np.int16),
        lambda v: np.array(v, ">i4"),
        lambda v: np.repeat(np.array(v, np.int64), 2)[::2],
        lambda v: [np.int64(x) for x in v],
        lambda v: memoryview(np.array(v, np.int64)),
        lambda v: np.array(v, object),
        lambda v: np.frombuffer(b"." + np.array(v, np.int64).tobytes(), np.uint8)[1:].view(np.int64),  # not aligned
    ],
)
def test_lengths_and_slots_are_accepted_in_every_integer_container(allocator, make):
    assert allocator.extend(make([6, 3]), make([7, 5]), make([9, 14])).tolist() == [10, 15, 20]
    assert allocator.decode(make([8, 6]), make([10, 20])).tolist() == [11, 21]
    assert allocator.free(make([20, 21])) == 1


# Sizes.


@together("dtype", ["int64", "int32"])
@together("block_size", [1, 16, 63, 100, 1000])
def test_long_sequences_are_numbered_right_in_blocks_of_any_size(block_size, dtype):
    allocator = SlotAllocator(BlockPool(40_000), block_size, index_dtype=dtype)
    first = allocator.allocate(2_345)
    assert first.tolist() == list(range(block_size, block_size + 2_345))
    rest = allocator.extend([2_345, 0], [9_999, 777], [first[-1], -1])
    start = block_size + 2_345
    assert rest[:7_654].tolist() == list(range(start, start + 7_654))
    behind = block_size * (1 + -(-9_999 // block_size))
    assert rest[7_654:].tolist() == list(range(behind, behind + 777))
    assert allocator.free(np.r_[first, rest]) == -(-9_999 // block_size) + -(-777 // block_size)
    assert allocator.pool.num_used == 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 1000, 2**20, 2**30, 2**31 - 1])
def test_slots_far_beyond_32_bits_are_right(block_size):
    """Few blocks with high slots: all arithmetic is 64-bit."""
    allocator = SlotAllocator(BlockPool(2**31 - 1), block_size)
    for block in range(1, 9):
        first = block * block_size
        assert allocator.allocate(1).tolist() == [first]
        if block_size > 1:
            last = first + block_size - 2
            assert allocator.decode([block_size], [last]).tolist() == [last + 1]
            assert allocator.extend([1], [min(block_size, 5)], [first]).tolist() == list(
                range(first + 1, first + min(block_size, 5))
            )
    assert allocator.free(np.arange(8, 0, -1) * block_size) == 8
    assert allocator.num_available == (2**31 - 2) * block_size


def test_a_pool_with_slots_beyond_int32_is_refused():
    assert SlotAllocator(BlockPool(2**20), 2**11, index_dtype="int32").allocate(1).dtype == np.int32
    with pytest.raises(UnsupportedOption, match="int32"):
        SlotAllocator(BlockPool(2**20 + 1), 2**11, index_dtype="int32")


def test_the_highest_int32_slot_is_allocated_correctly():
    allocator = SlotAllocator(BlockPool(2), 2**30, index_dtype="int32")
    allocator.allocate(1)
    assert allocator.decode([2**30], [2**31 - 2]).tolist() == [2**31 - 1]
    wide = SlotAllocator(BlockPool(3), 2**30)
    with pytest.raises(ShapeError, match="int64"):
        wide.allocate(1, out=np.zeros(1, np.int32))
    assert wide.num_available == 2**31


@pytest.mark.parametrize("dtype", ["int32", np.int32, np.dtype("int32"), np.dtype("int64"), "int64", int])
def test_the_dtype_of_slots_is_the_caller_s(dtype):
    allocator = SlotAllocator(BlockPool(10), 4, index_dtype=dtype)
    expected = np.dtype(dtype)
    assert allocator.index_dtype == expected.name
    assert allocator.allocate(6).dtype == expected
    assert allocator.extend([6], [20], [9]).dtype == expected
    assert allocator.decode([21], [23]).dtype == expected


def test_the_attributes_of_an_allocator_are_read_only():
    pool = BlockPool(10)
    allocator = SlotAllocator(pool, np.int16(4))
    assert (allocator.pool, allocator.block_size, allocator.index_dtype) == (pool, 4, "int64")
    for name in ("pool", "block_size", "index_dtype", "num_available"):
        with pytest.raises(AttributeError):
            setattr(allocator, name, None)
    assert "room for 36 tokens" in repr(allocator)
    assert allocator.nbytes < 1000


def test_several_allocators_and_others_use_one_pool():
    pool = BlockPool(6)
    small, large = SlotAllocator(pool, 2), SlotAllocator(pool, 8)
    assert small.allocate(3).tolist() == [2, 3, 4]
    assert large.allocate(1).tolist() == [24]
    assert pool.allocate(1).tolist() == [4]
    assert (small.num_available, large.num_available) == (2, 8)


# The caller's memory.


def test_slots_may_be_written_over_the_arguments():
    allocator = SlotAllocator(BlockPool(100), 4)
    last = allocator.extend([0] * 9, range(1, 10), [-1] * 9)[np.cumsum(range(1, 10)) - 1]
    expected = SlotAllocator(BlockPool(100), 4)
    expected.extend([0] * 9, range(1, 10), [-1] * 9)
    slots = expected.decode(range(2, 11), last)
    assert allocator.decode(range(2, 11), last, out=last) is last
    assert last.tolist() == slots.tolist()


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_slots_go_to_the_front_of_the_caller_s_array(allocator, dtype):
    out = np.full(9, -7, dtype)
    slots = allocator.allocate(5, out)
    assert np.shares_memory(slots, out)
    assert out.tolist() == [20, 21, 22, 23, 24, -7, -7, -7, -7]
    assert allocator.extend([6], [7], [9], out=out[7:]).tolist() == [10]
    assert out.tolist() == [20, 21, 22, 23, 24, -7, -7, 10, -7]


def test_results_are_not_aliased(allocator):
    slots = allocator.allocate(3)
    slots[:] = 0
    assert allocator.allocate(1).tolist() == [24]
    assert slots.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_slots_go_into_a_tensor_of_the_caller_s(allocator, torch, dtype):
    out = torch.full((8,), -7, dtype=getattr(torch, dtype))
    slots = allocator.allocate(6, out=out)
    assert out.tolist() == [*slots.tolist(), -7, -7]
    assert np.shares_memory(slots, out.numpy())
