"""Bad input to StateTable: a typed error, with nothing changed in any row or pool."""

import numpy as np
import pytest

from pagecore.errors import (
    DoubleFree,
    InvalidBlock,
    InvalidSequence,
    OutOfRows,
    PagecoreError,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.index import BlockPool, BlockTables, StateBuffers, StateTable, StepBuffers
from tests.together import together


class Made:
    """Rows 0 (100 tokens, checkpoint at 64), 1 (its fork) and 2 (a step of 3 tokens in flight)."""

    def __init__(self, **options):
        self.pool = BlockPool(40)
        self.tables = BlockTables(self.pool, block_sizes=16, max_sequences=4, max_blocks_per_sequence=16)
        self.states = StateTable(self.tables, 12, **options)
        self.drafts = options.get("draft_tokens", 0)
        self.prepare([self.states.add()], [100])
        self.states.commit([0])
        self.states.fork(0)
        self.prepare([self.states.add()], [3])

    def prepare(self, rows, counts, step=None, slots=None, **options):
        step = StepBuffers(4, 256) if step is None else step
        slots = StateBuffers(4, self.drafts) if slots is None else slots
        self.states.prepare(rows, counts, step, slots, **options)

    def snapshot(self):
        rows = [
            (self.states.length(row), self.states.slot(row), self.states.checkpoint(row), self.tables.length(row))
            for row in range(self.tables.num_rows)
        ]
        pools = [(pool.ref_counts().tolist(), pool.num_free) for pool in (self.pool, self.states.slots)]
        return rows, pools, self.tables.table().tolist()


@pytest.fixture(params=[{}, {"in_place": False}, {"draft_tokens": 4}], ids=str)
def made(request):
    return Made(**request.param)


def refused(made, call, error):
    before = made.snapshot()
    with pytest.raises(error) as raised:
        call(made)
    assert isinstance(raised.value, PagecoreError)
    assert made.snapshot() == before
    made.states.check_invariants(exclusive=True)


@together(
    ("rows", "error"),
    [(3, InvalidSequence), (-1, InvalidSequence), (9, InvalidSequence), ([0, 0], InvalidSequence),
     (2**40, InvalidSequence), (1.5, UnsupportedDtype), (None, UnsupportedDtype), ([[0]], ShapeError)],
)  # fmt: skip
@pytest.mark.parametrize("name", ["remove", "truncate", "prepare", "commit", "abandon", "undo", "drop", "shortage"])
def test_bad_rows_are_refused(made, rows, error, name):
    calls = {
        "remove": lambda m: m.states.remove(rows),
        "truncate": lambda m: m.states.truncate(rows, 0),
        "prepare": lambda m: m.prepare(rows, 1),
        "commit": lambda m: m.states.commit(rows),
        "abandon": lambda m: m.states.abandon(rows),
        "undo": lambda m: m.states.undo(rows),
        "drop": lambda m: m.states.drop_checkpoints(rows),
        "shortage": lambda m: m.states.shortage(rows, 1),
    }
    refused(made, calls[name], error)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.prepare([0, 2], 1),
        lambda m: m.states.fork(2),
        lambda m: m.states.truncate([2], 0),
        lambda m: m.states.reorder([0, 2], [0, 0]),
        lambda m: m.states.reorder([0, 1], [0, 2]),
        lambda m: m.states.drop_checkpoints([2]),
        lambda m: m.states.commit([0]),
        lambda m: m.states.abandon([2, 0]),
        lambda m: m.states.undo([0]),
    ],
)
def test_calls_of_a_row_in_the_wrong_state_are_refused(made, call):
    refused(made, call, InvalidSequence)


@together(
    ("call", "error"),
    [
        (lambda m: m.prepare([0], [-1]), ShapeError),
        (lambda m: m.prepare([0], [2**31 - 1]), ShapeError),
        (lambda m: m.prepare([0, 1], [1]), ShapeError),
        (lambda m: m.prepare([0, 1], 1, slots=StateBuffers(1, m.drafts)), ShapeError),
        (lambda m: m.prepare([0], 1, slots=StateBuffers(4, m.drafts + 1)), ShapeError),
        (lambda m: m.prepare([0, 1], 1, step=StepBuffers(1, 256)), ShapeError),
        (lambda m: m.prepare([0], 30, step=StepBuffers(4, 29)), ShapeError),
        (lambda m: m.prepare([0], 1, step=StateBuffers(4)), UnsupportedDtype),
        (lambda m: m.prepare([0], 1, slots=StepBuffers(4, 4)), UnsupportedDtype),
        (lambda m: m.prepare([0], 1, keep_checkpoints=1), UnsupportedOption),
        (lambda m: m.states.commit([2], accepted=[4]), ShapeError),
        (lambda m: m.states.commit([2], accepted=[-1]), ShapeError),
        (lambda m: m.states.commit([2], accepted=[1, 1]), ShapeError),
        (lambda m: m.states.truncate([0], 65), ShapeError),
        (lambda m: m.states.truncate([0], 63), ShapeError),
        (lambda m: m.states.truncate([0], -1), ShapeError),
        (lambda m: m.states.truncate([0, 1], [100]), ShapeError),
        (lambda m: m.states.truncate([0], 64, keep_capacity=2), UnsupportedOption),
        (lambda m: m.states.reorder([0, 1], [1]), ShapeError),
        (lambda m: m.states.resume_length(0, -1), ShapeError),
        (lambda m: m.states.checkpoint_length(-1, 4), ShapeError),
        (lambda m: m.states.checkpoint_length(2**31 - 2, 4), ShapeError),
        (lambda m: m.states.add(state=1), ShapeError),
        (lambda m: m.states.add(prefix=m.tables.blocks(0)[:1]), ShapeError),
        (lambda m: m.states.add(prefix=m.tables.blocks(0)[:1], state=12), InvalidBlock),
        (lambda m: m.states.add(prefix=m.tables.blocks(0)[:1], state=-1), InvalidBlock),
        (lambda m: m.states.add(prefix=m.tables.blocks(0)[:1], state=11), DoubleFree),
        (lambda m: m.states.add(prefix=[39], state=1), DoubleFree),
        (lambda m: m.states.add(prefix=[99], state=1), InvalidBlock),
    ],
)
def test_bad_arguments_are_refused(made, call, error):
    refused(made, call, error)


def test_a_step_accepted_in_part_needs_draft_slots():
    refused(Made(), lambda m: m.states.commit([2], accepted=[2]), UnsupportedOption)
    refused(Made(), lambda m: m.states.commit([2], accepted=[0]), UnsupportedOption)
    refused(Made(in_place=False), lambda m: m.states.commit([2], accepted=[2]), UnsupportedOption)
    refused(Made(draft_tokens=4), lambda m: m.states.commit([2], accepted=[0]), UnsupportedOption)
    refused(Made(draft_tokens=1), lambda m: m.states.commit([2], accepted=[1]), UnsupportedOption)
    with pytest.raises(UnsupportedOption, match=r"2 of 3 tokens of row 2 .* make the table with more draft_tokens"):
        Made().states.commit([2], accepted=[2])


def test_a_full_table_refuses_more_rows(made):
    made.states.add()
    refused(made, lambda m: m.states.add(), OutOfRows)
    refused(made, lambda m: m.states.fork(0), OutOfRows)


def test_a_row_that_was_changed_through_the_block_tables_is_refused(made):
    made.tables.extend([0], [2])
    refused(made, lambda m: m.prepare([0], 1), InvalidSequence)
    made.tables.remove([1])
    with pytest.raises(InvalidSequence, match="row 1 is used in the block tables or in the state table"):
        made.states.check_invariants()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_slots": 1}, ShapeError, "at least 2"),
        ({"num_slots": 4, "chunk": 0}, ShapeError, "chunk is 0"),
        ({"num_slots": 4, "chunk": 64, "interval": 100}, ShapeError, "not a multiple of the chunk of 64"),
        ({"num_slots": 4, "interval": 0}, ShapeError, "interval is 0"),
        ({"num_slots": 4, "draft_tokens": -1}, ShapeError, "draft_tokens is -1"),
        ({"num_slots": 4, "draft_tokens": 1024}, ShapeError, "at most 1023"),
        ({"num_slots": 4, "in_place": 1}, UnsupportedOption, "in_place"),
        ({"num_slots": 4, "chunk": "64"}, UnsupportedDtype, "chunk"),
    ],
)
def test_bad_options_are_refused(options, error, match):
    tables = BlockTables(BlockPool(4), max_sequences=2, max_blocks_per_sequence=2)
    with pytest.raises(error, match=match):
        StateTable(tables, **options)


def test_tables_with_rows_or_other_objects_are_refused():
    tables = BlockTables(BlockPool(4), max_sequences=2, max_blocks_per_sequence=2)
    tables.add()
    with pytest.raises(UnsupportedOption, match="1 rows"):
        StateTable(tables, 4)
    with pytest.raises(UnsupportedOption, match="tables is None"):
        StateTable(None, 4)
    for size, drafts in ((-1, 0), (2**31, 0), (4, -1), (4, 1024)):
        with pytest.raises(ShapeError):
            StateBuffers(size, drafts)


def one_too_few():
    """Return one value for two rows, and in the memory after it a second one that would be accepted."""
    return np.zeros(2, np.int32)[:1]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.states.truncate([0, 1], one_too_few()),
        lambda m: m.prepare([0, 1], one_too_few()),
        lambda m: m.states.shortage([0, 1], one_too_few()),
        lambda m: m.states.commit([1, 2], accepted=one_too_few()),
        lambda m: m.tables.truncate([0, 1], one_too_few()),
        lambda m: m.tables.release_before([0, 1], 0, one_too_few()),
        lambda m: m.tables.prepare([0, 1], one_too_few(), StepBuffers(4, 256)),
        lambda m: m.tables.extend([0, 1], one_too_few()),
    ],
)
def test_memory_after_too_few_values_is_not_read(call):
    made = Made(draft_tokens=4)
    refused(made, call, ShapeError)
    with pytest.raises(ShapeError, match=r"1 .* are given for 2 rows; give one for each"):
        call(made)
