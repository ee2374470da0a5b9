"""WindowSlotAllocator beyond its twin: the worked example, its map, refusals, threads, forks."""

import multiprocessing
import threading

import numpy as np
import pytest

from pagecore.errors import DoubleFree, InvalidBlock, OutOfBlocks, ShapeError, UnsupportedOption
from pagecore.index import BlockPool, SlotAllocator, WindowSlotAllocator
from pagecore.index.slots._slots import SlotMethods


def make(full=9, window=5, block_size=4, **options):
    return WindowSlotAllocator(BlockPool(full), BlockPool(window), block_size, **options)


def state(allocator):
    allocator.check_invariants()
    pools = [pool.ref_counts().tolist() for pool in (allocator.full, allocator.window)]
    return pools, allocator.full_to_window.tolist(), allocator.num_available


def test_worked_example_c8():
    allocator = make()
    slots = allocator.allocate(10)
    assert slots.tolist() == list(range(4, 14))
    assert allocator.full_to_window.tolist() == [0] * 4 + list(range(4, 16)) + [0] * 20 + [-1]
    # The window has passed token 6: of whole blocks, the first.
    assert allocator.release_window(slots[:4]) == 1
    assert (allocator.full.num_free, allocator.window.num_free) == (5, 2)
    assert allocator.full_to_window[4:8].tolist() == [0] * 4
    before = state(allocator)
    with pytest.raises(OutOfBlocks, match="in the window pool") as refused:
        allocator.extend([10], [22], [slots[-1]])
    assert (refused.value.requested, refused.value.available) == ((3, 3), (5, 2))
    assert state(allocator) == before
    assert allocator.free(slots) == 3
    assert allocator.full_to_window.tolist() == [0] * 36 + [-1]
    assert (allocator.full.num_free, allocator.window.num_free) == (8, 4)


def test_the_full_pool_can_be_the_scarcer_one():
    allocator = make(full=3, window=9)
    assert allocator.num_available == 8
    with pytest.raises(OutOfBlocks, match="in the full pool"):
        allocator.allocate(9)
    assert allocator.try_allocate(9) is None
    assert allocator.window.num_free == 8


def test_padding_leads_to_padding():
    allocator = make()
    slots = np.concatenate([allocator.allocate(3), [-1, -1]])
    assert allocator.full_to_window[slots].tolist() == [4, 5, 6, -1, -1]


def test_the_map_is_a_read_only_view_that_changes_with_the_allocator():
    allocator = make()
    view = allocator.full_to_window
    assert (view.dtype, view.shape, view.flags.writeable) == (np.int32, (37,), False)
    allocator.allocate(1)
    assert view[4:8].tolist() == [4, 5, 6, 7]
    del allocator
    assert view[-1] == -1


def test_window_blocks_of_a_shared_prefix_stay_until_every_sequence_released_them():
    allocator = make()
    first = allocator.allocate(8)
    allocator.share(first)
    assert allocator.release_window(first[:4]) == 0
    assert allocator.full_to_window[4] == 4
    assert allocator.release_window(first[:4]) == 1
    assert allocator.full_to_window[4] == 0
    assert allocator.free(first) == 0
    assert allocator.full_to_window[8] == 8  # of the other sequence
    assert allocator.free(first) == 2
    assert (allocator.full.num_free, allocator.window.num_free) == (8, 4)


def test_a_sequence_that_released_its_window_blocks_does_not_free_those_of_another():
    allocator = make()
    slots = allocator.allocate(4)
    allocator.share(slots)
    allocator.release_window(slots)
    allocator.free(slots)
    assert allocator.full_to_window[slots].tolist() == [4, 5, 6, 7]
    allocator.free(slots)
    assert allocator.window.num_free == 4


def test_a_block_whose_window_block_was_released_cannot_be_continued():
    allocator = make()
    slots = allocator.allocate(6)
    allocator.release_window(slots)
    before = state(allocator)
    with pytest.raises(InvalidBlock, match="the window block of block 2 was released; release only"):
        allocator.decode([7], [slots[-1]])
    assert state(allocator) == before


def test_released_and_shared_blocks_must_be_held():
    allocator = make()
    slots = allocator.allocate(4)
    with allocator.free_group():
        allocator.free(slots)
        for call in (allocator.release_window, allocator.share):
            with pytest.raises(DoubleFree, match="free or about to be freed"):
                call(slots)
    for call in (allocator.release_window, allocator.share):
        with pytest.raises(DoubleFree):
            call(slots)
        with pytest.raises(InvalidBlock):
            call([5, 6])
    assert state(allocator)[2] == 16


def test_a_window_block_left_by_another_holder_is_freed_when_its_full_block_is_taken_again():
    allocator = make()
    slots = allocator.allocate(4)
    allocator.full.free(1)  # not by the allocator
    assert allocator.window.num_free == 3
    assert allocator.allocate(4).tolist() == slots.tolist()
    assert allocator.window.num_free == 3
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((BlockPool(9), 5, 4), UnsupportedOption, "expected a BlockPool as window, got int"),
        ((None, BlockPool(9), 4), UnsupportedOption, "expected a BlockPool as full"),
        ((BlockPool(9), BlockPool(9), 0), ShapeError, "block_size is 0"),
        ((BlockPool(9), BlockPool(2**20), 2**12), ShapeError, "names up to 2147483648"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        WindowSlotAllocator(*arguments)


def test_one_pool_cannot_serve_both_sides():
    pool = BlockPool(9)
    with pytest.raises(UnsupportedOption, match="the window pool is the full pool"):
        WindowSlotAllocator(pool, pool, 4)
    with pytest.raises(UnsupportedOption, match="index_dtype is int8"):
        make(index_dtype="int8")


def test_a_base_made_by_hand_has_no_pool():
    with pytest.raises(TypeError, match="a SlotMethods has no pool"):
        SlotMethods().allocate(1)
    with pytest.raises(TypeError):
        WindowSlotAllocator()


def test_allocators_that_share_pools_in_either_role_do_not_deadlock():
    first, second = BlockPool(400), BlockPool(400)
    allocators = [WindowSlotAllocator(first, second, 4), WindowSlotAllocator(second, first, 4), SlotAllocator(first, 4)]
    failures = []

    def work(allocator):
        try:
            for i in range(300):
                slots = allocator.try_allocate(i % 40)
                if slots is not None:
                    if isinstance(allocator, WindowSlotAllocator):
                        allocator.release_window(slots[: i % 8 // 4 * 4])
                    allocator.free(slots)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(each,)) for each in allocators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert first.num_free == second.num_free == 399


@pytest.mark.serial
def test_a_forked_child_can_use_the_allocator():
    allocator = make()
    slots = allocator.allocate(6)
    child = multiprocessing.get_context("fork").Process(target=lambda: allocator.free(slots))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert allocator.window.num_free == 2
