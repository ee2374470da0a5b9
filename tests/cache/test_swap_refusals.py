"""Invalid and failing swaps are refused and change nothing."""

import itertools

import pytest

from pagecore import (
    InvalidSequence,
    OutOfBlocks,
    OutOfRows,
)
from pagecore.cache import SwapSpace
from pagecore.cache.swap import _swap
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal
from tests.cache.swaps import content, fill


def test_a_full_space_refuses_and_nothing_is_changed():
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=[9, 2])
    sequences = [cache.add_sequence(range(20)) for _ in range(2)]
    fill(cache, sequences, [4, 5])
    before = (cache.stats(), [content(cache, sequence) for sequence in sequences])
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 1 are free in group 1 of the swap space") as short:
        cache.swap_out(sequences, space)
    assert (short.value.requested, short.value.available) == ((3, 3), (8, 1))
    assert cache.try_swap_out(sequences, space) is False
    assert (cache.stats(), [content(cache, sequence) for sequence in sequences]) == before
    assert (space.num_used_blocks, space.num_sequences) == (0, 0)
    cache.check_invariants()
    assert cache.try_swap_out(sequences[:1], space) is True


def test_a_full_cache_refuses_and_nothing_is_changed():
    cache = make(num_blocks=6)
    space = SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(12)) for _ in range(2)]
    cache.commit(cache.prepare(sequences[:1], 12))
    cache.swap_out(sequences[:1], space)
    advance(cache, sequences[1:], 12)
    before = (cache.stats(), space.num_used_blocks)
    with pytest.raises(
        OutOfBlocks, match="3 blocks are needed and 2 are available, including cached ones; remove"
    ) as short:
        cache.swap_in(sequences[:1])
    assert (short.value.requested, short.value.available) == (3, 2)
    assert cache.try_swap_in(sequences[:1]) is False
    assert (cache.stats(), space.num_used_blocks) == before
    cache.check_invariants()
    cache.remove(sequences[1])
    assert cache.try_swap_in(sequences[:1]) is True


def test_swap_in_without_a_free_row_is_refused():
    cache = make(max_sequences=2)
    space = SwapSpace(cache, num_blocks=9)
    first, second = (cache.add_sequence(range(5)) for _ in range(2))
    advance(cache, [first, second], 5)
    cache.swap_out([first], space)
    third = cache.add_sequence([1])
    with pytest.raises(OutOfRows, match="1 rows are needed and 0 of 2 are free"):
        cache.swap_in([first])
    assert cache.try_swap_in([first]) is False
    assert first.is_swapped
    assert cache.num_sequences == 3
    cache.check_invariants()
    cache.remove(third)
    cache.swap_in([first])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_copy_that_fails_changes_nothing(monkeypatch, failing):
    cache = make([SPEC, WINDOWED])
    space = SwapSpace(cache, num_blocks=9)
    sequences = [cache.add_sequence(range(8)) for _ in range(2)]
    fill(cache, sequences, 8)
    transfer, calls = _swap.transfer_blocks, itertools.count(1)

    def fail(*arguments, **options):
        if next(calls) == failing:
            raise MemoryError("planted")
        transfer(*arguments, **options)

    def attempt(call):
        nonlocal calls
        calls = itertools.count(1)
        before = (cache.stats(), space.num_used_blocks)
        with monkeypatch.context() as patched:
            patched.setattr(_swap, "transfer_blocks", fail)
            with pytest.raises(MemoryError, match="planted"):
                call()
        assert (cache.stats(), space.num_used_blocks) == before
        cache.check_invariants()

    attempt(lambda: cache.swap_out(sequences, space))
    before = [content(cache, sequence) for sequence in sequences]
    cache.swap_out(sequences, space)
    attempt(lambda: cache.swap_in(sequences))
    cache.swap_in(sequences)
    assert [content(cache, sequence) for sequence in sequences] == before


def test_operations_on_a_swapped_sequence_are_refused_by_name():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    out, here = (cache.add_sequence(range(8), id=name) for name in ("out", "here"))
    advance(cache, [out, here], 6)
    cache.swap_out([out], space)
    batch = cache.make_batch()
    before = cache.stats()
    for call in (
        lambda: cache.prepare([out], 1),
        lambda: cache.prepare([here, out], 1, out=batch),
        lambda: cache.try_prepare([out], 1),
        lambda: cache.fork(out),
        lambda: cache.truncate(out, 2),
        lambda: cache.reorder([out], [here]),
        lambda: cache.reorder([here], [out]),
        lambda: cache.swap_out([out], space),
        lambda: cache.swap_out([here, out], space),
    ):
        with pytest.raises(InvalidSequence, match="sequence 'out' is swapped out; swap it in first"):
            call()
        assert cache.stats() == before
        assert not batch.in_flight
        cache.check_invariants()
    with pytest.raises(InvalidSequence, match="sequence 'here' is not swapped out"):
        cache.swap_in([out, here])
    assert out.is_swapped


def test_a_sequence_in_flight_is_not_swapped_but_others_are():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    parent = cache.add_sequence(range(10))
    fill(cache, [parent], 6)
    child = cache.fork(parent)
    before = content(cache, child)
    batch = cache.prepare([parent], 3)
    with pytest.raises(InvalidSequence, match="in flight; commit or abandon"):
        cache.swap_out([child, parent], space)
    assert not child.is_swapped
    cache.swap_out([child], space)
    cache.write(0, normal(3, 2, 8), normal(3, 2, 8), batch)
    cache.commit(batch)
    cache.swap_out([parent], space)
    cache.swap_in([child, parent])
    assert content(cache, child) == before
    cache.check_invariants()


@pytest.mark.parametrize("junk", [None, 5, [None], ["x"], [[1]], 2.5])
def test_objects_that_are_not_sequences_are_refused(junk):
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    for call in (cache.swap_out, cache.try_swap_out):
        with pytest.raises(InvalidSequence):
            call(junk, space)
    for call in (cache.swap_in, cache.try_swap_in):
        with pytest.raises(InvalidSequence):
            call(junk)


def test_foreign_removed_and_repeated_sequences_are_refused():
    cache, other = make(), make()
    space, foreign_space = SwapSpace(cache, num_blocks=9), SwapSpace(other, num_blocks=9)
    mine, foreign, gone = cache.add_sequence([1]), other.add_sequence([1]), cache.add_sequence([1])
    cache.remove(gone)
    for sequences in ([mine, foreign], [mine, gone], [mine, mine]):
        with pytest.raises(InvalidSequence):
            cache.swap_out(sequences, space)
    for wrong in (foreign_space, None, cache, "space"):
        with pytest.raises(InvalidSequence, match="swap space of this cache"):
            cache.swap_out([mine], wrong)
    cache.swap_out([mine], space)
    for sequences in ([mine, mine], [foreign]):
        with pytest.raises(InvalidSequence):
            cache.swap_in(sequences)
    with pytest.raises(InvalidSequence):
        other.swap_in([mine])
    assert mine.is_swapped
