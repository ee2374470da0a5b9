"""`commit(batch, accepted=...)` forgets the ids of rejected tokens and of all tokens after them."""

import numpy as np
import pytest

from pagecore import SwapSpace
from pagecore.errors import ShapeError, UnsupportedDtype
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.draft_walk import Walk
from tests.cache.prefixes import ALIKE
from tests.faults import is_full
from tests.together import together

PROMPT = ALIKE[:10]
DRAFTS = [50, 51, 52, 53]
LAYERS = {"full": SPEC, "window": [WINDOWED], "both": [SPEC, WINDOWED]}


def prompted(cache, tokens=PROMPT, **options):
    """Return a sequence whose every token is computed."""
    sequence = cache.add_sequence(tokens, **options)
    advance(cache, [sequence], sequence.num_tokens - sequence.num_computed_tokens)
    return sequence


def speculate(cache, sequences, drafts, accepted):
    """Run a step over appended drafts and accept some of them."""
    cache.append_tokens(sequences, drafts)
    counts = [each.num_tokens - each.num_computed_tokens for each in sequences]
    cache.commit(cache.prepare(sequences, counts), accepted=accepted)


@together("layers", LAYERS.values())
@together("accepted", range(5))
def test_rejected_ids_are_forgotten_and_the_next_id_follows_the_accepted_ones(layers, accepted):
    cache = make(layers, num_blocks=33)
    sequence = prompted(cache)
    speculate(cache, [sequence], [DRAFTS], [accepted])
    assert sequence.tokens.tolist() == PROMPT + DRAFTS[:accepted]
    assert sequence.num_tokens == sequence.num_computed_tokens == 10 + accepted
    cache.append_tokens([sequence], [77])
    assert sequence.tokens.tolist() == [*PROMPT, *DRAFTS[:accepted], 77]
    with cache.prepare([sequence], 1) as batch:
        assert np.asarray(batch.positions).tolist() == [10 + accepted]
        assert np.asarray(batch.token_ids).tolist() == [77]
        cache.commit(batch)
    cache.check_invariants()


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_text_with_rejected_ids_is_found_only_before_them(layers):
    cache = make(layers, num_blocks=33)
    sequence = prompted(cache)
    speculate(cache, [sequence], [DRAFTS], [2])
    speculate(cache, [sequence], [[60, 61, 62, 63, 64, 65, 66, 67]], [8])  # 20 tokens, 5 blocks
    right = [*PROMPT, 50, 51, 60, 61, 62, 63, 64, 65, 66, 67]
    wrong = [*PROMPT, *DRAFTS, 62, 63, 64, 65, 66, 67]
    assert sequence.tokens.tolist() == right
    assert cache.match_length([*right, 0]) == 20
    assert cache.match_length([*wrong, 0]) == 12  # positions 12 and 13 had rejected ids
    assert cache.add_sequence([*wrong, 0]).num_cached_tokens == 12
    assert cache.add_sequence([*right, 0]).num_cached_tokens == 20
    cache.check_invariants()


def test_a_block_that_ends_with_rejected_ids_is_not_found():
    cache = make()
    sequence = prompted(cache, ALIKE[:8])
    speculate(cache, [sequence], [DRAFTS], [3])  # the last id of the third block is rejected
    assert cache.match_length([*ALIKE[:8], *DRAFTS, 0]) == 8
    speculate(cache, [sequence], [[70]], [1])
    assert cache.match_length([*ALIKE[:8], *DRAFTS, 0]) == 8
    assert cache.match_length([*ALIKE[:8], 50, 51, 52, 70, 0]) == 12


def test_ids_after_rejected_ids_are_forgotten_too():
    cache = make()
    sequence = prompted(cache)
    cache.append_tokens([sequence], [[50, 51, 52, 53, 54, 55]])
    cache.commit(cache.prepare([sequence], 4), accepted=[1])  # 54 and 55 follow the rejected ones
    assert sequence.tokens.tolist() == [*PROMPT, 50]


def test_ids_after_a_step_without_rejected_ids_stay():
    cache = make()
    sequence = prompted(cache)
    cache.append_tokens([sequence], [[50, 51, 52, 53, 54, 55]])
    cache.commit(cache.prepare([sequence], 4), accepted=[4])
    assert sequence.tokens.tolist() == [*PROMPT, 50, 51, 52, 53, 54, 55]
    assert sequence.num_computed_tokens == 14


@pytest.mark.parametrize("accepted", [1, np.int64(1), np.array(1), [1, 1], (1, 1), np.array([1, 1], np.int16)])
def test_one_accepted_count_applies_to_every_sequence(accepted):
    cache = make()
    first, second = prompted(cache), prompted(cache, [90, 91, 92])
    speculate(cache, [first, second], [DRAFTS, DRAFTS[:2]], accepted)
    assert first.tokens.tolist() == [*PROMPT, 50]
    assert second.tokens.tolist() == [90, 91, 92, 50]


def test_sequences_of_one_batch_have_rejected_ids_of_their_own():
    cache = make()
    sequences = [prompted(cache, [100 * k + i for i in range(5 + k)]) for k in range(3)]
    speculate(cache, sequences, [[1], [1, 2, 3], [1, 2]], [0, 3, 1])
    assert [each.tokens[5 + k :].tolist() for k, each in enumerate(sequences)] == [[], [1, 2, 3], [1]]
    assert [each.num_computed_tokens for each in sequences] == [5, 9, 8]


@pytest.mark.parametrize("when", ["after prepare", "after commit"])
def test_ids_that_come_late_lose_the_rejected_ones(when):
    cache = make()
    sequence = prompted(cache)
    batch = cache.prepare([sequence], 4)
    assert np.asarray(batch.token_ids).tolist() == [-1] * 4
    if when == "after prepare":
        cache.append_tokens([sequence], [DRAFTS])
    cache.commit(batch, accepted=[2])
    if when == "after commit":
        assert (sequence.num_tokens, sequence.num_computed_tokens) == (10, 12)
        cache.append_tokens([sequence], [DRAFTS[:2]])
    assert sequence.tokens.tolist() == [*PROMPT, 50, 51]
    cache.append_tokens([sequence], [77])
    cache.commit(cache.prepare([sequence], 1))
    assert cache.match_length([*PROMPT, 50, 51, 0]) == 12
    assert cache.match_length([*PROMPT, 50, 52, 0]) == 8
    cache.check_invariants()


def test_ids_of_an_earlier_step_that_are_late_are_not_rejected():
    cache = make()
    sequence = prompted(cache)
    cache.commit(cache.prepare([sequence], 3))  # ids at 10 to 12 come later
    cache.commit(cache.prepare([sequence], 4), accepted=[1])
    cache.append_tokens([sequence], [[1, 2, 3, 4]])
    assert sequence.num_tokens == sequence.num_computed_tokens == 14
    assert sequence.tokens.tolist() == [*PROMPT, 1, 2, 3, 4]


def test_a_refused_commit_forgets_no_rejected_ids():
    cache = make()
    sequence = prompted(cache)
    cache.append_tokens([sequence], [DRAFTS])
    batch = cache.prepare([sequence], 4)
    for accepted, refusal in (([5], ShapeError), (-1, ShapeError), ([1, 1], ShapeError), ([1.0], UnsupportedDtype)):
        with pytest.raises(refusal):
            cache.commit(batch, accepted=accepted)
        assert sequence.tokens.tolist() == PROMPT + DRAFTS
        assert batch.in_flight
    cache.commit(batch, accepted=0)
    assert sequence.tokens.tolist() == PROMPT


def test_an_abandoned_step_keeps_ids_that_were_never_rejected():
    cache = make()
    sequence = prompted(cache)
    cache.append_tokens([sequence], [DRAFTS])
    cache.abandon(cache.prepare([sequence], 4))
    assert sequence.tokens.tolist() == PROMPT + DRAFTS
    assert sequence.num_computed_tokens == 10


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_rejected_drafts_leave_their_blocks_to_the_next_step(layers):
    cache = make(layers, num_blocks=6, max_tokens_per_sequence=20)
    sequence = prompted(cache, ALIKE[:11], id="only")
    available = cache.num_available
    for _ in range(20):
        speculate(cache, [sequence], [DRAFTS], 0)
        assert sequence.capacity == 16
        assert cache.shortage([sequence], 5) == 0
    speculate(cache, [sequence], [DRAFTS], 4)
    assert cache.num_available <= available
    cache.remove(sequence)
    assert cache.num_available == 5
    cache.check_invariants()


def test_rejected_drafts_of_a_parent_stay_with_its_fork():
    cache = make()
    parent = prompted(cache)
    cache.append_tokens([parent], [DRAFTS])
    child = cache.fork(parent)  # knows the drafts, has computed none
    batch = cache.prepare([parent, child], 4)
    cache.commit(batch, accepted=[1, 3])
    assert parent.tokens.tolist() == [*PROMPT, 50]
    assert child.tokens.tolist() == [*PROMPT, 50, 51, 52]
    later = cache.fork(parent)
    speculate(cache, [parent, later], [[60], [61]], 1)
    assert [each.tokens[-1] for each in (parent, later)] == [60, 61]
    cache.remove(child)
    assert cache.match_length([*PROMPT, 50, 51, 0]) == 12
    cache.check_invariants()


def test_a_sequence_removed_in_flight_is_ignored_in_accepted_counts():
    cache = make()
    first, second, third = (prompted(cache, [100 * k + i for i in range(6)]) for k in range(3))
    sequences = [first, second, third]
    cache.append_tokens(sequences, [DRAFTS[:3]] * 3)
    batch = cache.prepare(sequences, 3)
    cache.remove(second)
    cache.commit(batch, accepted=[1, 2, 0])  # one count per sequence of the step, including removed ones
    assert first.tokens.tolist() == [0, 1, 2, 3, 4, 5, 50]
    assert third.tokens.tolist() == [200, 201, 202, 203, 204, 205]
    assert (first.num_computed_tokens, third.num_computed_tokens) == (7, 6)
    cache.check_invariants()


def test_a_window_is_released_by_accepted_tokens_and_not_by_rejected_ones():
    cache = make([WINDOWED], num_blocks=33, prefix_cache=False)
    sequence = prompted(cache, ALIKE[:9])
    before = cache.block_table().numpy()[sequence.row].copy()
    speculate(cache, [sequence], [list(range(50, 62))], 0)
    after = cache.block_table().numpy()[sequence.row]
    assert after[:3].tolist() == before[:3].tolist()  # the next token is at 9 and sees 4 to 9
    speculate(cache, [sequence], [list(range(50, 62))], 5)  # the next token is at 14 and sees 9 to 14
    assert (cache.block_table().numpy()[sequence.row, :4] == 0).tolist() == [True, True, False, False]


def test_rejected_ids_of_a_swapped_sequence_do_not_come_back():
    cache = make()
    space = SwapSpace(cache, num_blocks=9)
    sequence = prompted(cache)
    speculate(cache, [sequence], [DRAFTS], 2)
    cache.swap_out([sequence], space)
    cache.append_tokens([sequence], [77])
    cache.swap_in([sequence])
    assert sequence.tokens.tolist() == [*PROMPT, 50, 51, 77]
    advance(cache, [sequence], 1)
    assert cache.match_length([*PROMPT, 50, 51, 77]) == 12


def test_a_truncated_sequence_that_speculates_finds_no_rejected_ids():
    cache = make()
    sequence = prompted(cache, ALIKE[:16])
    cache.truncate([sequence], 9)
    speculate(cache, [sequence], [DRAFTS], 1)
    assert sequence.tokens.tolist() == [*ALIKE[:9], 50]
    speculate(cache, [sequence], [[60, 61, 62]], 2)
    assert sequence.tokens.tolist() == [*ALIKE[:9], 50, 60, 61]
    assert cache.match_length([*ALIKE[:9], 50, 60, 61, 0]) == 12
    assert cache.match_length(ALIKE[:17]) == 16  # the blocks from before the truncation
    cache.check_invariants()


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("seed", range(6 if is_full() else 4))
def test_random_steps_with_rejected_ids_equal_a_plain_model(layers, seed):
    walk = Walk(layers, seed)
    moves = [walk.add, walk.fork, walk.remove, walk.append, walk.append, walk.step, walk.step, walk.step, walk.step]
    for _ in range(250):
        moves[walk.random.integers(len(moves))]()
        walk.check()
    for sequence in list(walk.twins):
        walk.remove(sequence)
    walk.cache.check_invariants()
    assert walk.cache.num_available == 39
