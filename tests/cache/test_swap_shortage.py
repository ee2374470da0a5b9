"""Blocks that a swap_in, and then a step, would lack."""

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    ShapeError,
    UnsupportedDtype,
)
from pagecore.cache import SwapSpace
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.together import together


def test_shortage_counts_the_blocks_of_swap_in_and_step():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 9], max_tokens_per_sequence=64)
    space = SwapSpace(cache, num_blocks=17)
    out, here = (cache.add_sequence(range(40)) for _ in range(2))
    advance(cache, [out, here], [11, 14])
    cache.swap_out([out], space)
    # The group of the window is the scarcest: 8 blocks, and the two that `here` still sees are taken.
    assert cache.num_available == 6
    before = cache.stats()
    assert cache.shortage([out], 0) == 0
    assert cache.shortage([out, here], [1, 2]) == 0  # two blocks come back; no more are needed
    assert cache.shortage([out, here], [9, 10]) == 0  # two blocks come back; two more each
    assert cache.shortage([out, here], [10, 11]) == 2  # three more each
    assert cache.shortage([here, out], [19, 30]) == 9
    assert cache.stats() == before
    cache.check_invariants()


def test_invalid_arguments_of_shortage_are_refused():
    cache = make()
    space = SwapSpace(cache, num_blocks=17)
    out, here = (cache.add_sequence(range(8)) for _ in range(2))
    advance(cache, [out, here], 8)
    cache.swap_out([out], space)
    for sequences, counts, error in (
        ([out, out], 1, InvalidSequence),
        ([out, here, here], 1, InvalidSequence),
        ([out, None], 1, InvalidSequence),
        ([out], -1, ShapeError),
        ([out], [1, 1], ShapeError),
        ([out], 57, ShapeError),
        ([out], 2**40, ShapeError),
        ([out, here], [1, 57], ShapeError),
        ([out], 1.5, UnsupportedDtype),
    ):
        with pytest.raises(error):
            cache.shortage(sequences, counts)
        cache.check_invariants()


@together("seed", range(40))
def test_shortage_is_exactly_the_number_of_blocks_that_swap_in_and_step_lack(seed):
    """Forks are truncated at random, so that blocks are shared in every way; then all are swapped in and write."""
    random = np.random.default_rng(seed)
    cache = make([SPEC, AttentionSpec(2, 8, dtype="float32", window=500)], num_blocks=40, max_sequences=12)
    spaces = [SwapSpace(cache, num_blocks=60) for _ in range(2)]
    sequences = [cache.add_sequence(range(60)) for _ in range(2)]
    advance(cache, sequences, random.integers(1, 14, 2))
    while len(sequences) < 7:
        child = cache.fork(sequences[random.integers(len(sequences))])
        cache.truncate(child, random.integers(child.num_computed_tokens // 2, child.num_computed_tokens + 1))
        cache.append_tokens([child], [list(range(60 - child.num_tokens))])
        sequences.append(child)
    out = random.permutation(sequences)[: random.integers(1, 7)].tolist()
    half = len(out) // 2
    cache.swap_out(out[:half], spaces[0])
    cache.swap_out(out[half:], spaces[1])
    counts = random.integers(0, 6, len(sequences))
    filler = cache.add_sequence(range(156))
    advance(cache, [filler], 4 * cache.num_available)
    lacking = cache.shortage(sequences, counts)
    given = max(0, lacking - int(random.integers(2)))
    cache.truncate(filler, filler.num_computed_tokens - 4 * given)
    before = cache.stats()
    assert cache.shortage(sequences, counts) == lacking - given
    assert cache.stats() == before
    suffices = cache.try_swap_in(out) and cache.try_prepare(sequences, counts) is not None
    assert suffices == (given == lacking)


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_blocks_that_others_hold_do_not_become_free_between_steps(prefix_cache, is_swapped):
    cache = make([SPEC, WINDOWED], num_blocks=[30, 5], prefix_cache=prefix_cache, max_tokens_per_sequence=64)
    parent = cache.add_sequence(range(12))
    for _ in range(3):
        advance(cache, [parent], 4)
    child = cache.fork(parent)
    if is_swapped:
        space = SwapSpace(cache, num_blocks=9)
        cache.swap_out([parent, child], space)
    assert cache.num_available == (4 if is_swapped else 2)
    # The window releases the two shared blocks, which the other sequence keeps: three new blocks at once.
    assert cache.shortage([parent, child], [0, 12], step_tokens=1) == 1
    if is_swapped:
        cache.swap_in([parent, child])
    for _ in range(8):
        advance(cache, [child], 1)
    assert cache.try_prepare([child], 1) is None


@together("seed", range(60))
def test_steps_succeed_if_no_block_is_short(seed):
    random = np.random.default_rng(seed)
    blocks = [60, int(random.integers(8, 16))]
    cache = make([SPEC, WINDOWED], num_blocks=blocks, max_sequences=8, max_tokens_per_sequence=100)
    space, sequences = SwapSpace(cache, num_blocks=60), []
    for length in random.integers(0, 12, 3):
        sequence = cache.add_sequence(random.integers(0, 2, length))
        sequences += [sequence, cache.fork(sequence)]
        for _ in range(length // 4):
            if cache.shortage([sequence], 4) == 0:
                advance(cache, [sequence], 4)
    chosen = [sequence for sequence in sequences if random.integers(0, 3)]
    out = [sequence for sequence in chosen if random.integers(0, 3) == 0]
    cache.swap_out(out, space)
    counts, most = random.integers(0, 30, len(chosen)).tolist(), int(random.integers(1, 8))
    if cache.shortage(chosen, counts, step_tokens=most):
        return
    cache.swap_in(out)
    while any(counts):
        advance(cache, chosen, [min(most, count) for count in counts])
        counts = [count - min(most, count) for count in counts]
