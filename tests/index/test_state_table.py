"""StateTable: the slots of rows through steps, forks, swaps of two slots, and drafts."""

import gc

import numpy as np
import pytest

from pagecore.errors import OutOfBlocks
from pagecore.index import BlockTables, StateBuffers, StateTable, StepBuffers
from tests.index.state_rows import Made


def test_a_new_row_gets_a_zeroed_slot_and_keeps_it():
    made = Made()
    row = made.states.add()
    assert made.prepare([row], [10]) == ([1], [1])
    assert made.work == ([1], [])
    made.states.commit([row])
    assert made.prepare([row], [1]) == ([1], [1])
    assert made.work == ([], [])
    assert made.states.slot(row) == 1
    assert (made.states.length(row), made.tables.length(row)) == (10, 11)  # the step is in flight
    made.states.check_invariants(exclusive=True)


def test_padding_refers_to_the_null_slot():
    made = Made(drafts=2)
    rows = [made.states.add() for _ in range(3)]
    made.prepare(rows, [100, 2, 3])
    made.states.commit(rows)
    made.prepare(rows[:1], 1)
    for array in (made.slots.state_read, made.slots.state_write, made.slots.checkpoint_write, made.slots.draft_write):
        assert array[0].any() or array is made.slots.checkpoint_write
        assert not array[1:].any()
    made.slots.check_invariants()


def test_worked_example_d7_slots_are_allocated_in_order_and_run_out():
    made = Made(num_slots=4)
    rows = [made.states.add() for _ in range(4)]
    assert made.prepare(rows[:3], 1) == ([1, 2, 3], [1, 2, 3])
    with pytest.raises(OutOfBlocks, match="1 state slots are needed and 0 are free") as short:
        made.prepare(rows[3:], 1)
    assert (short.value.requested, short.value.available) == (1, 0)
    assert made.states.shortage(rows[3:], 1) == 1
    made.states.remove(rows[1])
    assert made.prepare(rows[3:], 1) == ([2], [2])
    assert made.work == ([2], [])


def test_a_fork_copies_the_state_and_the_last_holder_writes_in_place():
    made = Made()
    row = made.row_of(10)
    child = made.states.fork(row)
    assert (made.states.slot(child), made.states.length(child)) == (1, 10)
    assert made.prepare([child, row], 1) == ([2, 1], [2, 1])
    assert made.work == ([], [[1, 2]])
    made.states.commit([child, row])
    made.states.check_invariants(exclusive=True)


def test_beams_of_one_parent_need_one_slot_each():
    made = Made(num_slots=5)
    row = made.row_of(10)
    beams = [row] + [made.states.fork(row) for _ in range(3)]
    read, write = made.prepare(beams, 1)
    assert read == write
    assert sorted(write) == [1, 2, 3, 4]
    made.states.commit(beams)
    made.states.reorder(beams, [beams[1]] * 4)
    assert [made.states.slot(beam) for beam in beams] == [write[1]] * 4
    made.states.check_invariants(exclusive=True)


def test_in_place_abandon_returns_to_the_checkpoint():
    made = Made()
    row = made.row_of(100)
    made.prepare([row], [1])
    assert made.states.abandon([row]).tolist() == [64]
    assert (made.states.length(row), made.tables.length(row), made.states.slot(row)) == (64, 64, 2)
    assert made.prepare([row], [36])[0] == [1]
    assert made.work == ([], [[2, 1]])
    fresh = made.states.add()
    made.prepare([fresh], [5])
    assert made.states.abandon([fresh]).tolist() == [0]
    assert made.states.slot(fresh) == 0


def test_undo_restores_a_step_of_which_nothing_has_run():
    made = Made(drafts=2)
    row = made.row_of(100)
    child, fresh = made.states.fork(row), made.states.add()
    before = made.states.slots.ref_counts().tolist()
    steps = [row, child, fresh], [3, 70, 100]
    first = made.prepare(*steps), made.work
    assert made.states.undo([row, child, fresh]).tolist() == [100, 100, 0]
    assert made.states.slots.ref_counts().tolist() == before
    assert made.prepare(*steps), made.work == first
    made.states.check_invariants(exclusive=True)


def test_ping_pong_swaps_two_slots_and_abandons_exactly():
    made = Made(in_place=False)
    row = made.states.add()
    assert made.prepare([row], [10]) == ([1], [2])
    assert made.work == ([1], [])
    made.states.commit([row])
    assert made.prepare([row], [1]) == ([2], [1])
    assert made.states.abandon([row]).tolist() == [10]
    assert made.prepare([row], [1]) == ([2], [1])
    made.states.commit([row], accepted=[0])
    assert made.prepare([row], [1]) == ([2], [1])
    made.states.commit([row])
    assert (made.states.length(row), made.states.slot(row)) == (11, 1)
    assert made.states.slots.num_used == 2


def test_a_fork_that_does_not_work_in_place_reads_the_shared_slot():
    made = Made(in_place=False)
    row = made.row_of(10)
    child = made.states.fork(row)
    read, write = made.prepare([row, child], 1)
    assert read == [2, 2]
    assert write == [1, 3]
    assert made.work == ([], [])
    made.states.commit([row, child])
    made.states.check_invariants(exclusive=True)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_a_speculative_step_keeps_the_state_after_its_last_accepted_token(in_place, accepted):
    made = Made(drafts=3, in_place=in_place)
    row = made.row_of(10)
    _, write = made.prepare([row], [4])
    slots = made.slots.draft_write[0].tolist()
    assert len(set(slots)) == 4
    assert write == [slots[3]]
    assert made.states.slots.num_used == 4 + (not in_place)
    made.states.commit([row], accepted=[accepted])
    assert made.states.slot(row) == slots[accepted - 1]
    assert made.states.length(row) == made.tables.length(row) == 10 + accepted
    assert made.states.slots.num_used == 1 + (not in_place)
    made.states.check_invariants(exclusive=True)


def test_a_speculative_step_that_passes_the_grid_keeps_the_slot_of_that_token():
    made = Made(drafts=3, interval=64)
    row = made.row_of(62)
    made.prepare([row], [4])
    slots = made.slots.draft_write[0].tolist()
    assert (made.slots.checkpoint_lengths[0], made.slots.checkpoint_write[0]) == (64, slots[1])
    made.states.commit([row], accepted=[3])
    assert made.states.checkpoint(row) == (slots[1], 64)
    assert made.states.slot(row) == slots[2]
    other = made.row_of(62)
    made.prepare([other], [4])
    made.states.commit([other], accepted=[1])  # 63 tokens: the checkpoint is not reached
    assert made.states.checkpoint(other) is None


def test_blocks_and_slots_are_taken_together_or_not_at_all():
    made = Made(num_blocks=9, num_slots=5)
    rows = [made.states.add() for _ in range(5)]
    with pytest.raises(OutOfBlocks, match="blocks are needed"):
        made.prepare(rows[:2], [100, 100])
    with pytest.raises(OutOfBlocks, match="state slots are needed"):
        made.prepare(rows, 1)
    assert (made.tables.pools[0].num_used, made.states.slots.num_used) == (0, 0)
    assert made.tables.lengths(rows).tolist() == [0] * 5
    assert made.prepare(rows[:3], 1)[0] == [1, 2, 3]


def test_steps_of_different_rows_may_be_in_flight_together():
    made = Made(max_sequences=2)
    first, second = made.states.add(), made.states.add()
    made.prepare([first], [5])
    other = StateBuffers(2)
    made.states.prepare([second], [7], StepBuffers(2, 16), other)
    assert made.slots.state_read[0] == 1
    assert other.state_read[0] == 2
    made.states.commit([second, first])
    assert [made.states.length(row) for row in (first, second)] == [5, 7]


def test_rows_of_tables_without_groups_have_states_alone():
    tables = BlockTables([], block_sizes=[4], max_sequences=2, max_blocks_per_sequence=8)
    states = StateTable(tables, 9, chunk=4, interval=8)
    row = states.add()
    step, slots = StepBuffers(2, 16, 0), StateBuffers(2)
    states.prepare([row], [9], step, slots)
    states.commit([row])
    slot, length = states.checkpoint(row)
    other = states.add(None, slot, length)
    assert (length, states.length(other), states.slot(other)) == (8, 8, slot)
    states.check_invariants(exclusive=True)


def test_slots_return_to_the_pool_with_the_table():
    made = Made()
    made.row_of(100)
    pool = made.states.slots
    assert pool.num_used == 2
    del made
    gc.collect()
    assert pool.num_used == 0


def test_state_buffers_are_aligned_views_that_outlive_their_owner():
    buffers = StateBuffers(5, 2)
    arrays = [buffers.state_read, buffers.state_write, buffers.checkpoint_write, buffers.checkpoint_lengths]
    assert all(array.ctypes.data % 64 == 0 and array.dtype == np.int32 for array in [*arrays, buffers.draft_write])
    assert buffers.draft_write.shape == (5, 3)
    assert StateBuffers(5).draft_write is None
    del buffers
    gc.collect()
    assert not any(array.any() for array in arrays)
