"""State slots that a swap_in, and then a step, would lack."""

import numpy as np
import pytest

from pagecore import Plane, StateSpec, SwapSpace
from pagecore.errors import ShapeError
from tests.cache.hybrids import make
from tests.together import together

PLANE = Plane("temporal", (2, 4), "float32", per="sequence")
RULES = {
    "in place": {},
    "two slots": {"in_place": False},
    "drafts": {"draft_tokens": 2},
    "int8": {"checkpoint_format": "int8"},
}


def spec(**rules):
    return StateSpec((PLANE,), **{"chunk": 16, "interval": 16} | rules)


def least_slots(rules):
    return 1 + (1 if rules.get("in_place", True) else 2) + rules.get("draft_tokens", 0)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_sequence_comes_back_to_as_few_slots_as_it_ran_in(rules):
    cache = make(spec(**rules), num_states=max(3, least_slots(rules)), prefix_cache=False)
    space = SwapSpace(cache, num_blocks=20)
    sequence = cache.add_sequence(range(100))
    for count in (16, 20):  # the first step keeps a checkpoint
        cache.commit(cache.prepare([sequence], count))
    cache.swap_out([sequence], space)
    count = 1 + rules.get("draft_tokens", 0)
    assert cache.shortage([sequence], count) == 0
    cache.swap_in([sequence])
    cache.commit(cache.prepare([sequence], count))
    assert sequence.num_computed_tokens == 36 + count
    cache.check_invariants()


@pytest.mark.parametrize("in_place", [True, False])
def test_running_sequences_need_no_slots_besides_their_own(in_place):
    cache = make(spec(in_place=in_place), num_states=9 if in_place else 13, prefix_cache=False)
    space = SwapSpace(cache, num_blocks=20)
    sequences = [cache.add_sequence(range(first, first + 40)) for first in range(0, 600, 100)]
    for sequence in sequences:
        cache.commit(cache.prepare([sequence], 5))
    cache.swap_out(sequences[:1], space)
    counts = [1] * len(sequences)
    assert cache.shortage(sequences, counts) == 0
    cache.swap_in(sequences[:1])
    cache.commit(cache.prepare(sequences, counts))
    cache.check_invariants()


def random_sequences(random, cache):
    """Return sequences of up to two steps, and forks of some."""
    sequences = []
    for first in range(0, 300, 100):
        sequences.append(cache.add_sequence(range(first, first + 90)))
        for count in random.integers(1, 40, 2).tolist():
            if (batch := cache.try_prepare(sequences[-1:], count)) is not None:
                cache.commit(batch)
        if random.random() < 0.4:
            sequences.append(cache.fork(sequences[-1]))
    return sequences


@together("seed", range(25))
@together("rules", RULES.values())
def test_a_swap_in_and_a_step_succeed_without_shortage(rules, seed):
    random = np.random.default_rng(seed)
    caches = bool(random.random() < 0.5)
    cache = make(spec(**rules), num_states=int(random.integers(6, 14)), prefix_cache=caches, max_sequences=8)
    spaces = [SwapSpace(cache, num_blocks=200, num_states=30) for _ in range(2)]
    sequences = random_sequences(random, cache)
    gone = [one for one in sequences if random.random() < 0.6]
    for one in gone:
        cache.swap_out([one], spaces[random.integers(2)])
    counts = random.choice([0, 1, 1, 3, 20], len(sequences)).tolist()
    lacking, before = cache.shortage(sequences, counts), cache.stats()
    assert cache.stats() == before
    if lacking == 0:
        cache.swap_in(gone)
        cache.commit(cache.prepare(sequences, counts))
    cache.check_invariants()


@together("seed", range(40))
@together("rules", RULES.values())
def test_shortage_is_exactly_the_number_of_slots_that_swap_in_and_step_lack(rules, seed):
    """Forks share states in the cache and in the spaces, and others hold all free slots but some."""
    random = np.random.default_rng(seed)
    cache = make(spec(**rules), num_states=40, num_blocks=200, prefix_cache=bool(seed % 2), max_sequences=12)
    spaces = [SwapSpace(cache, num_blocks=200, num_states=30) for _ in range(2)]
    sequences = random_sequences(random, cache)
    sequences += [cache.fork(sequences[i]) for i in random.integers(0, len(sequences), 4)]
    out = [one for one in sequences if random.random() < 0.6]
    half = len(out) // 2
    cache.swap_out(out[:half], spaces[0])
    cache.swap_out(out[half:], spaces[1])
    counts = random.choice([0, 1, 1, 3, 20], len(sequences)).tolist()
    slots = cache._parts.state.states.slots
    taken = slots.allocate(slots.num_free)
    lacking = cache.shortage(sequences, counts)
    given = max(0, lacking - int(random.integers(2)))
    slots.free(taken[:given])
    before = cache.stats()
    assert cache.shortage(sequences, counts) == lacking - given
    assert cache.stats() == before
    suffices = cache.try_swap_in(out) and cache.try_prepare(sequences, counts) is not None
    assert suffices == (given == lacking)
    slots.free(taken[given:])
    cache.check_invariants()


def test_sequences_that_come_back_share_a_slot_until_all_but_one_have_copied_it():
    cache = make(spec(), num_states=4, prefix_cache=False)
    space = SwapSpace(cache, num_blocks=20)
    first = cache.add_sequence(range(40))
    cache.commit(cache.prepare([first], 5))
    children = [cache.fork(first) for _ in range(2)]
    cache.swap_out([first, *children], space)
    assert cache.shortage([first, *children], 1) == 0  # one slot comes back, and two are copies
    assert cache.shortage([first, *children], [1, 1, 0]) == 0
    other = cache.add_sequence(range(100, 140))
    cache.commit(cache.prepare([other], 5))
    assert cache.shortage([first, *children], 1) == 1
    assert cache.shortage([first, *children], [1, 1, 0]) == 1
    assert cache.shortage([first, *children], [1, 0, 0]) == 0
    assert cache.shortage([first, *children], 0) == 0


@pytest.mark.parametrize("count", [-1, 10**6])
def test_a_refused_count_leaves_no_slot_and_no_block_held(count):
    cache = make(spec(), num_states=9, prefix_cache=False)
    space = SwapSpace(cache, num_blocks=20)
    sequences = [cache.add_sequence(range(20)) for _ in range(2)]
    cache.commit(cache.prepare(sequences, 16))
    cache.swap_out(sequences[:1], space)
    available = cache.num_available
    with pytest.raises(ShapeError) as caught:
        cache.shortage(sequences, [1, count])
    assert cache.num_available == available
    cache.check_invariants()
    del caught
