"""Objects of the index made by other code: constructed, copied, pickled, initialised again."""

import copy
import pickle

import numpy as np
import pytest

import pagecore.index._integers as integers
import pagecore.index._native_view as native_view
import pagecore.index.radix._radix as radix
import pagecore.index.states._states as states
import pagecore.index.tables._tables as tables
from pagecore.index import (
    BlockPool,
    BlockTables,
    RadixTree,
    Receipt,
    RequestTable,
    SlotAllocator,
    StateBuffers,
    StateTable,
    StepBuffers,
)
from tests.together import together

SEALED = [
    Receipt,
    radix.Receipt,
    radix.Prefix,
    radix.Insertion,
    native_view.NativeMemory,
    tables.StepMemory,
    states.StateMemory,
    radix.Interned,
]


@pytest.mark.parametrize("kind", SEALED)
def test_handles_cannot_be_made_by_hand(kind):
    own = type("Own", (kind,), {})
    for make in (kind, own, lambda: kind.__new__(kind), lambda: own.__new__(own), lambda: object.__new__(kind)):
        with pytest.raises(TypeError):
            make()


@pytest.mark.parametrize("kind", [radix.Match, radix.Inserted, radix.Evicted, integers.Integers, integers.Slots])
def test_results_made_by_hand_are_empty(kind):
    made = kind()
    for name in dir(made):
        value = None if name.startswith("__") else getattr(made, name)
        assert value is None or np.size(value) == 0 or value == 0
    assert repr(made)


def objects():
    pool = BlockPool(9)
    tree = RadixTree(1)
    return {
        "pool": pool,
        "tables": BlockTables(pool, max_sequences=1, max_blocks_per_sequence=2),
        "allocator": SlotAllocator(pool, 4),
        "group": SlotAllocator(pool, 4).free_group(),
        "buffers": StepBuffers(1, 2),
        "states": StateTable(BlockTables(pool, max_sequences=1, max_blocks_per_sequence=2), 2),
        "state buffers": StateBuffers(1, 2),
        "requests": RequestTable(2, 2),
        "tree": tree,
        "receipt": tree.match_and_lock([1]),
        "view": RequestTable(2, 2).table.base,
    }


@together("name", objects())
def test_objects_with_native_memory_are_neither_copied_nor_pickled(name):
    made = objects()[name]
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            call(made)


@pytest.mark.parametrize(
    "name", ["pool", "tables", "allocator", "group", "buffers", "requests", "states", "state buffers"]
)
def test_nothing_is_made_without_its_sizes(name):
    kind = type(objects()[name])
    for make in (kind, lambda: kind.__new__(kind), type("Own", (kind,), {})):
        with pytest.raises(TypeError):
            make()


def test_initialising_again_changes_nothing():
    made = objects()
    pool, tables, tree = made["pool"], made["tables"], made["tree"]
    pool.allocate(3)
    tables.add()
    pool.__init__(99)
    tables.__init__(BlockPool(99), max_sequences=5, max_blocks_per_sequence=7)
    tree.__init__(64, full=3)
    assert (pool.num_blocks, pool.num_used) == (9, 3)
    assert (tables.max_sequences, tables.num_rows, tables.pools) == (1, 1, (pool,))
    assert (tree.block_size, tree.num_receipts) == (1, 1)
    for each in (pool, tables, tree):
        each.check_invariants()


def test_a_subclass_has_what_its_base_was_made_with():
    class Pool(BlockPool):
        def __init__(self, *arguments, **options):
            assert self.num_free == 8  # before its own part

    class Tree(RadixTree):
        pass

    pool = Pool(9, order="fifo")
    assert pool.allocate(2).tolist() == [1, 2]
    tables = BlockTables(pool, max_sequences=1, max_blocks_per_sequence=2)
    assert tables.pools == (pool,)
    tree = Tree(2)
    with tree.match_and_lock([1, 2]) as receipt:
        assert receipt.tree is tree


def test_results_survive_pickling():
    tree = RadixTree(1, windows=[2], states=True, state_interval=1)
    inserted = tree.insert([1, 2], ([1, 2], [3, 4]), states=[(2, 7)])
    match = tree.match([1, 2])
    evicted = tree.evict("full", 2)
    again, match_again, evicted_again = (pickle.loads(pickle.dumps(each)) for each in (inserted, match, evicted))
    assert [lane.tolist() for lane in again.taken] == [[1, 2], [3, 4]]
    assert (again.taken_states.tolist(), again.duplicate_states.tolist()) == ([7], [])
    assert (match_again.num_tokens, match_again.state) == (2, 7)
    assert [lane.tolist() for lane in evicted_again.blocks] == [[2, 1], [4, 3]]
    assert inserted.taken is inserted.taken


class Posing:
    """Object with a false `__class__`."""

    def __init__(self, kind):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind


def test_an_object_with_a_false_class_is_refused():
    with pytest.raises(Exception, match="Posing"):
        BlockTables(Posing(BlockPool), max_sequences=1, max_blocks_per_sequence=1)
    with pytest.raises(Exception, match="Posing"):
        SlotAllocator(Posing(BlockPool), 1)
    tree = RadixTree(1)
    for call in (tree.release, lambda one: tree.release_all([one]), lambda one: tree.insert([1], [1], receipt=one)):
        with pytest.raises((TypeError, ValueError), match="Posing"):
            call(Posing(Receipt))
    tree.check_invariants()
