"""Checkpoints of StateTable: where a step keeps one, who shares it, and which a sequence begins with."""

import numpy as np
import pytest

from pagecore.errors import InvalidSequence, ShapeError
from tests.index.state_rows import Made
from tests.reference.state_table import checkpoint_length


@pytest.mark.parametrize(
    ("prefix", "new", "kept"),
    [(192, 88, 256), (0, 230, 192), (0, 63, 0), (192, 63, 0), (0, 64, 64), (100, 300, 356)],
)
def test_worked_example_d3_checkpoint_of_a_prefill(prefix, new, kept):
    block_size = 4 if prefix == 100 else 16
    assert Made(block_size=block_size).states.checkpoint_length(prefix, new) == kept


def test_worked_example_d3_a_checkpoint_lies_between_blocks_and_chunks():
    assert Made(block_size=128).states.checkpoint_length(0, 200) == 128  # lcm(64, 128)
    assert Made(block_size=128).states.checkpoint_length(64, 100) == 128  # one chunk after 64
    assert Made(block_size=16).states.checkpoint_length(100, 300) == 0  # 356 is inside of a block


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [(255, 256, 256), (511, 512, 512), (254, 255, 0), (256, 257, 0),
     (254, 258, 256), (250, 255, 0), (256, 260, 0), (510, 515, 512)],
)  # fmt: skip
def test_worked_example_d4_checkpoint_of_a_decode_step(before, after, kept):
    made = Made(drafts=0 if after == before + 1 else 4)
    assert made.states.checkpoint_length(before, after - before) == kept


@pytest.mark.parametrize(
    ("full", "state", "kept"),
    [(280, 192, 256), (250, 192, 0), (256, 192, 256), (230, 192, 0), (320, 320, 0), (130, 0, 128), (63, 0, 0)],
)
def test_worked_example_d5_checkpoint_at_a_branch_point(full, state, kept):
    """A prefill of 1,000 tokens keeps the checkpoint where the shared tokens end, otherwise its last one."""
    states = Made().states
    assert states.checkpoint_length(state, 1000, shared=full) == (kept or states.checkpoint_length(state, 1000))


def test_a_prefill_keeps_its_checkpoint_before_the_end_that_its_row_has():
    made = Made()
    rows = [made.states.add() for _ in range(3)]
    made.states.set_ends(rows[:2], [240, 48])
    made.prepare(rows, [256, 64, 256])
    assert made.slots.checkpoint_lengths[:3].tolist() == [192, 64, 256]
    with pytest.raises(InvalidSequence, match="in flight"):
        made.states.set_ends(rows[:1], [1])
    made.states.commit(rows)
    made.states.set_ends(rows[:2], [640, 640])
    with pytest.raises(ShapeError, match="end is -1; use 0 or more"):
        made.states.set_ends(rows[:2], [300, -1])
    with pytest.raises(ShapeError, match="end is -5"):
        made.states.checkpoint_length(0, 64, 0, -5)
    made.prepare(rows[:1], [384])
    assert made.slots.checkpoint_lengths[0] == 640  # nothing was set
    made.states.commit(rows[:1])
    assert [made.states.checkpoint(row)[1] for row in rows] == [640, 64, 256]
    made.states.check_invariants(exclusive=True)


@pytest.mark.parametrize("how", ["abandon", "undo", "truncate"])
def test_a_row_that_no_longer_shares_blocks_forgets_where_others_branch_off(how):
    made = Made()
    first = made.states.add()
    made.compute(first, 64)
    state, length = made.states.checkpoint(first)
    made.states.slots.share(state)  # a prefix cache
    made.compute(first, 224)
    row = made.states.add(prefix=made.tables.blocks(first), state=state, length=length)
    if how == "truncate":
        made.states.truncate([row], [64])
    else:
        made.prepare([row], [736])
        getattr(made.states, how)([row])
    assert made.tables.capacity(row) == 64
    made.prepare([row], [736])
    assert made.slots.checkpoint_lengths[0] == 768


def test_a_sequence_begins_with_the_deepest_state_of_a_longer_shared_prefix():
    made = Made()
    first = made.states.add()
    for count in (64, 200, 26):  # checkpoints at 64, 256
        made.compute(first, count)
        if count == 64:
            state, length = made.states.checkpoint(first)
            made.states.slots.share(state)  # a prefix cache
    blocks = made.tables.blocks(first)[:18]  # 288 tokens
    row = made.states.add(prefix=blocks, state=state, length=length)
    assert (made.states.length(row), made.tables.length(row), made.tables.capacity(row)) == (64, 64, 288)
    made.prepare([row], [736])
    slots = made.step.slot_mappings[0]
    assert (slots[:224] == -1).all()
    assert (slots[224:736] >= 0).all()
    assert made.slots.checkpoint_lengths[0] == 256  # the branch point
    assert made.work == ([], [[state, int(made.slots.state_read[0])]])
    made.states.commit([row])
    assert made.states.checkpoint(row)[1] == 256
    assert made.tables.pools[0].ref_counts()[blocks].tolist() == [2] * 18
    made.prepare([row], [200])
    assert made.slots.checkpoint_lengths[0] == 992
    made.states.slots.free(state)
    made.states.check_invariants(exclusive=True)


def test_a_shared_prefix_without_a_state_is_computed_from_the_start():
    made = Made()
    first = made.row_of(100)
    row = made.states.add(prefix=made.tables.blocks(first)[:5], length=0)
    assert (made.states.length(row), made.states.slot(row)) == (0, 0)
    made.prepare([row], [100])
    assert made.step.slot_mappings[0][:81].tolist() == [-1] * 80 + [8 * 16]
    assert made.work[0] == [3]


def test_checkpoint_lengths_equal_those_of_the_twin():
    random = np.random.default_rng(0)
    for _ in range(300):
        chunk, block, drafts = (int(n) for n in random.integers((1, 1, 0), (9, 9, 4)))
        interval = chunk * int(random.integers(1, 4))
        delay = int(random.choice([0, random.integers(1, 30)]))
        made = Made(block_size=block, drafts=drafts, chunk=chunk, interval=interval, delay=delay, max_sequences=1)
        before, count, shared, end = (int(n) for n in random.integers(0, 60, 4))
        expected = checkpoint_length(before, count, chunk, interval, block, drafts, shared, delay)
        assert made.states.checkpoint_length(before, count, shared) == expected
        expected = checkpoint_length(before, count, chunk, interval, block, drafts, shared, delay, end)
        assert made.states.checkpoint_length(before, count, shared, end) == expected


@pytest.mark.parametrize("sizes", [[1], [4, 8], [4, 8, 40]])
def test_checkpoints_with_a_delay_last_until_a_prefix_can_take_them(sizes):
    """Each is the newest of its row until `delay` more tokens are computed, or until a later one is taken at once."""
    random = np.random.default_rng(0)
    made = Made(block_size=4, chunk=4, interval=8, delay=13, num_blocks=513)
    row, kept, taken = made.states.add(), None, []
    while made.states.length(row) < 240:
        made.compute(row, min(int(random.choice(sizes)), 240 - made.states.length(row)))
        checkpoint = made.states.checkpoint(row)
        if checkpoint is not None:
            length = checkpoint[1]
            is_taken = made.states.length(row) - length >= 13
            assert is_taken or kept in (None, length, *taken)
            kept = length
            if is_taken and length not in taken:
                taken.append(length)
    assert len(taken) >= 240 // 64


def test_a_prefill_keeps_a_checkpoint_in_a_slot_of_its_own():
    made = Made()
    row = made.states.add()
    made.prepare([row], [100])
    assert (made.slots.checkpoint_lengths[0], made.slots.checkpoint_write[0]) == (64, 2)
    assert made.states.checkpoint(row) is None
    made.states.commit([row])
    assert made.states.checkpoint(row) == (2, 64)
    made.prepare([row], [3], keep_checkpoints=False)
    assert (made.slots.checkpoint_lengths[0], made.slots.checkpoint_write[0]) == (0, 0)


def test_a_checkpoint_at_the_end_of_a_step_is_copied_before_the_next():
    made = Made()
    row = made.states.add()
    made.prepare([row], [128])
    assert (made.slots.checkpoint_lengths[0], made.slots.checkpoint_write[0], made.slots.state_write[0]) == (128, 1, 1)
    made.states.commit([row])
    assert made.states.checkpoint(row) == (1, 128)
    assert made.prepare([row], [1]) == ([2], [2])
    assert made.work == ([], [[1, 2]])
    made.states.commit([row])
    made.states.check_invariants(exclusive=True)


def test_a_new_checkpoint_frees_the_one_before_unless_another_holder_has_it():
    made = Made()
    row = made.row_of(100)
    made.states.slots.share(2)  # a prefix cache
    made.compute(row, 92)  # 192 tokens
    made.compute(row, 100)
    slot, length = made.states.checkpoint(row)
    assert length == 256
    assert made.states.slots.ref_count(2) == 1
    made.states.slots.free(2)
    assert made.states.slots.ref_count(slot) == 1


def test_a_sequence_begins_with_a_cached_state_which_is_never_written():
    made = Made()
    first = made.row_of(100)
    slot, length = made.states.checkpoint(first)
    blocks = made.tables.blocks(first)[: length // 16]
    row = made.states.add(prefix=blocks, state=slot)
    assert (made.states.length(row), made.states.checkpoint(row)) == (64, (2, 64))
    assert made.prepare([row], [1]) == ([3], [3])
    assert made.work == ([], [[2, 3]])
    made.states.commit([row])
    made.states.remove([first, row])
    assert made.states.slots.num_used == 0


def test_ping_pong_gives_a_checkpoint_away_and_takes_a_new_slot():
    made = Made(in_place=False)
    row = made.row_of(64)  # reads 1, writes 2, which is the checkpoint as well
    assert made.states.checkpoint(row) == (2, 64)
    assert made.prepare([row], [1]) == ([2], [1])  # a cached state is read without a copy
    assert made.work == ([], [])
    made.states.commit([row])
    assert made.prepare([row], [1]) == ([1], [3])
    made.states.commit([row])
    made.states.remove(row)
    assert made.states.slots.num_used == 0


def test_rows_are_truncated_to_their_checkpoint_or_to_nothing():
    made = Made()
    row = made.row_of(100)
    assert [made.states.resume_length(row, n) for n in (0, 63, 64, 99, 100, 10**12)] == [0, 0, 64, 64, 100, 100]
    made.states.truncate(row, 64)
    assert (made.states.length(row), made.tables.length(row), made.states.slot(row)) == (64, 64, 2)
    made.states.truncate(row, 0)
    assert (made.states.slot(row), made.states.checkpoint(row), made.states.slots.num_used) == (0, None, 0)


def test_dropped_checkpoints_free_their_slots():
    made = Made()
    row, other = made.row_of(100), made.row_of(128)
    assert made.states.drop_checkpoints([row, other]) == 1  # the other one is the running state
    assert made.states.checkpoint(row) is made.states.checkpoint(other) is None
    assert made.prepare([row, other], 1)[0] == [1, 3]
    assert made.work == ([], [])
