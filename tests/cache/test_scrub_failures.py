"""Steps, swaps and copies with scrub=True that fail or are interrupted leave no value of another namespace."""

import pytest

from pagecore import SwapSpace
from pagecore.cache.memory.store import Store
from pagecore.errors import NotEnoughMemory
from tests.cache.caches import SPEC, WINDOWED, make
from tests.cache.marked import MARKERS, compute, dirty, numbers_in_flight, numbers_of
from tests.faults import lines_of, raise_at


def test_blocks_that_a_failed_swap_in_half_filled_are_zeroed_for_every_namespace(monkeypatch):
    cache = make(scrub=True, num_blocks=9)
    space = SwapSpace(cache, num_blocks=9)
    second = cache.add_sequence(range(9), namespace="b")
    compute(cache, [second], 9, MARKERS["b"])
    cache.swap_out(second, space)
    cache.clear_prefix_cache()
    first = cache.add_sequence(range(32), namespace="a")
    compute(cache, [first], 32, MARKERS["a"])
    cache.remove(first)

    def half_moved(sources, targets, pairs, **options):
        for target in targets[:1]:
            target.numpy()[pairs[:, 1]] = MARKERS["b"]
        raise NotEnoughMemory("the copy stopped half-way")

    cache.clear_prefix_cache()
    with monkeypatch.context() as broken:
        broken.setattr("pagecore.cache.swap._swap.transfer_blocks", half_moved)
        with pytest.raises(NotEnoughMemory, match="half-way"):
            cache.swap_in(second)
    assert second.is_swapped
    again = cache.add_sequence(range(32), namespace="a")
    assert numbers_in_flight(cache, again, 32) <= {0.0, MARKERS["a"]}
    assert cache.stats().num_scrubbed_blocks == 6, "3 of them were b's before a filled them"


def test_a_step_whose_blocks_cannot_be_zeroed_is_undone(monkeypatch):
    cache = dirty([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(13), namespace="b")
    before = cache.stats()
    with monkeypatch.context() as broken:

        def refuse(*given):
            raise NotEnoughMemory("nothing was zeroed")

        broken.setattr(Store, "zero", refuse)
        with pytest.raises(NotEnoughMemory, match="nothing was zeroed"):
            cache.prepare([sequence], 13)
    assert (cache.stats(), sequence.num_computed_tokens) == (before, 0)
    cache.check_invariants()
    assert numbers_in_flight(cache, sequence, 13) == {0.0}


def test_the_target_of_a_copy_that_failed_is_zeroed_for_its_last_tenant_too(monkeypatch):
    cache = dirty(tokens=32)
    parent = cache.add_sequence(range(6), namespace="b")
    compute(cache, [parent], 6, MARKERS["b"])
    child = cache.fork(parent)

    def half_copied(store, group, pairs, *stream):
        store.pools[group].key(0).numpy()[pairs[:, 1]] = MARKERS["b"]
        raise NotEnoughMemory("the copy stopped half-way")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "copy", half_copied)
        with pytest.raises(NotEnoughMemory, match="half-way"):
            cache.prepare([child], 1)
    cache.remove(child)
    cache.remove(parent)
    cache.clear_prefix_cache()
    again = cache.add_sequence(range(32), namespace="a")
    assert numbers_in_flight(cache, again, 32) == {0.0, MARKERS["a"]}


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_leaves_no_value_of_another_namespace():
    def ready():
        cache = dirty([SPEC, WINDOWED], tokens=28)
        parent = cache.add_sequence(range(6), namespace="b")
        compute(cache, [parent], 6, MARKERS["b"])
        child = cache.fork(parent)
        return cache, parent, child, lambda: cache.prepare([parent, child], [5, 9])

    total = lines_of(ready()[-1])
    for n in range(1, total + 1):
        cache, parent, child, call = ready()
        run = raise_at(call, n, error=KeyboardInterrupt)
        assert run.reached
        cache.check_invariants()
        assert numbers_of(cache, parent) | numbers_of(cache, child) <= {0.0, MARKERS["b"]}
        with child, parent:
            assert numbers_in_flight(cache, parent, 5) <= {0.0, MARKERS["b"]}
            assert numbers_in_flight(cache, child, 9) <= {0.0, MARKERS["b"]}
        cache.clear_prefix_cache()
        last = cache.add_sequence(range(28), namespace="a")
        assert numbers_in_flight(cache, last, 28) <= {0.0, MARKERS["a"]}
