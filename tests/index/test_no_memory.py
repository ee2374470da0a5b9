"""Memory exhaustion at each allocation of each call: the call raises MemoryError and changes nothing."""

from contextlib import suppress

import pytest

from pagecore.index import (
    BlockPool,
    BlockTables,
    RadixTree,
    RequestTable,
    SlotAllocator,
    StateBuffers,
    StateTable,
    StepBuffers,
)
from tests.faults import undisturbed
from tests.index.failing_calls import (
    COUNTS,
    OPTIONS,
    SLOT_CALLS,
    STATE_CALLS,
    TABLE_CALLS,
    TREE_CALLS,
    SlotState,
    StatesState,
    TableState,
    TreeState,
)
from tests.together import together

pytestmark = pytest.mark.slow

testcapi = pytest.importorskip("_testcapi", reason="needs CPython's own test module, which makes allocations fail")

# The call is over when this many consecutive failures have no effect.
MAX_WITHOUT_EFFECT = 12


def fails(call, allocation):
    """Run the call with one failing allocation; return True if it raises."""
    with undisturbed():
        try:
            testcapi.set_nomemory(allocation, allocation + 1)
            call()
        except MemoryError:
            return True
        finally:
            testcapi.remove_mem_hooks()
    return False


def check_every_allocation(make, call, may_be_done=False):
    before = make().signature()
    done = make()
    call(done)
    after = done.signature()
    num_without, allocation = 0, 0
    while num_without < MAX_WITHOUT_EFFECT:
        state = make()
        has_failed = fails(lambda state=state: call(state), allocation)
        signature = state.signature()
        assert signature == after if not has_failed else signature == before or (may_be_done and signature == after), (
            f"allocation {allocation}: the call {'raised' if has_failed else 'went on'}"
        )
        num_without = 0 if has_failed else num_without + 1
        allocation += 1


@together("options", OPTIONS)
@together("name", TREE_CALLS)
def test_a_call_of_a_tree_is_all_or_nothing(name, options):
    check_every_allocation(lambda: TreeState(**OPTIONS[options]), TREE_CALLS[name])


@pytest.mark.parametrize("name", TABLE_CALLS)
def test_a_call_of_tables_is_all_or_nothing(name):
    check_every_allocation(TableState, TABLE_CALLS[name])


@pytest.mark.parametrize("name", STATE_CALLS)
def test_a_call_of_states_is_all_or_nothing(name):
    check_every_allocation(StatesState, STATE_CALLS[name])


@pytest.mark.parametrize("name", SLOT_CALLS)
def test_a_call_of_slots_is_all_or_nothing(name):
    check_every_allocation(SlotState, SLOT_CALLS[name])


@pytest.mark.parametrize("name", COUNTS)
def test_a_call_that_returns_a_count_is_all_or_nothing(name):
    check_every_allocation(SlotState, COUNTS[name], may_be_done=True)


def test_a_namespace_that_memory_is_short_for_finds_no_blocks_of_another():
    num_without, allocation = 0, 0
    while num_without < MAX_WITHOUT_EFFECT:
        tree = RadixTree(1)
        tree.start_journal()
        if fails(lambda tree=tree: tree.insert([1, 2], [5, 6], namespace="one"), allocation):
            tree.insert([1, 2], [7, 8], namespace="another")  # gets the number
            assert tree.match([1, 2], namespace="one").num_tokens == 0, f"allocation {allocation}"
            num_without = -1
        tree.check_invariants()
        num_without, allocation = num_without + 1, allocation + 1


def test_a_constructor_that_fails_changes_no_other_object():
    pool = BlockPool(9)
    makes = [
        lambda: BlockPool(100),
        lambda: BlockTables([pool, pool], block_sizes=[1, 2], max_sequences=2, max_blocks_per_sequence=4),
        lambda: SlotAllocator(pool, 4),
        lambda: RequestTable(4, 4),
        lambda: StepBuffers(4, 4, 2),
        lambda: StateTable(BlockTables(pool, max_sequences=2, max_blocks_per_sequence=4), 5, draft_tokens=2),
        lambda: StateBuffers(4, 2),
        lambda: RadixTree(4, windows=[3], states=True),
    ]
    for make in makes:
        for allocation in range(60):
            with suppress(MemoryError):
                fails(make, allocation)
    pool.check_invariants()
    assert pool.num_used == 0
