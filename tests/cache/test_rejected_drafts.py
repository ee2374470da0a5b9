"""`commit(batch, accepted=...)` forgets the ids of rejected tokens and of all tokens after them."""

import numpy as np
import pytest

from pagecore import SwapSpace
from pagecore.errors import OutOfBlocks, ShapeError, UnsupportedDtype
from tests.cache.caches import SPEC, WINDOWED, advance, make
from tests.cache.prefixes import ALIKE

PROMPT = ALIKE[:10]
DRAFTS = [50, 51, 52, 53]
LAYERS = {"full": SPEC, "window": [WINDOWED], "both": [SPEC, WINDOWED]}


def prompted(cache, tokens=PROMPT, **options):
    """A sequence whose every token is computed."""
    sequence = cache.add_sequence(tokens, **options)
    advance(cache, [sequence], sequence.num_tokens - sequence.num_computed_tokens)
    return sequence


def speculate(cache, sequences, drafts, accepted):
    """A step over appended drafts of which some are accepted."""
    cache.append_tokens(sequences, drafts)
    counts = [each.num_tokens - each.num_computed_tokens for each in sequences]
    cache.commit(cache.prepare(sequences, counts), accepted=accepted)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("accepted", range(5))
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
def test_one_number_says_what_is_not_rejected_of_every_sequence(accepted):
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


def test_rejected_drafts_of_a_parent_are_not_those_of_its_fork():
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


def test_a_sequence_that_is_removed_in_flight_has_no_part_in_rejected_counts():
    cache = make()
    first, second, third = (prompted(cache, [100 * k + i for i in range(6)]) for k in range(3))
    sequences = [first, second, third]
    cache.append_tokens(sequences, [DRAFTS[:3]] * 3)
    batch = cache.prepare(sequences, 3)
    cache.remove(second)
    cache.commit(batch, accepted=[1, 2, 0])  # a count for each sequence of the step, those that have gone included
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


# -- a random walk against a plain-Python model -----------------------------------------------------------------------


class Twin:
    """Ids and lengths of a sequence, in lists."""

    def __init__(self, tokens, computed):
        self.tokens = list(tokens)
        self.computed = computed

    def commit(self, count, accepted):
        self.computed += accepted
        if accepted < count:
            self.tokens = self.tokens[: max(0, min(len(self.tokens), self.computed))]


def key_at(text, position):
    """A number for a token and everything before it; float32 holds it exactly."""
    number = 0
    for token in text[: position + 1]:
        number = (number * 31 + token + 1) % 1_000_003
    return float(number)


class Walk:
    """A cache whose keys are numbers of the text before them, and twins of its sequences."""

    def __init__(self, layers, seed):
        self.random = np.random.default_rng(seed)
        self.cache = make(layers, num_blocks=40, max_sequences=5, max_tokens_per_sequence=60)
        self.twins = {}
        self.texts = [[]]

    def pick(self):
        sequences = list(self.twins)
        count = self.random.integers(1, len(sequences) + 1)
        return [sequences[i] for i in self.random.permutation(len(sequences))[:count]]

    def new_ids(self, count):
        return self.random.integers(0, 2, count).tolist()  # few ids, so that texts begin alike

    def add(self):
        if len(self.twins) == 5:
            return
        old = self.texts[self.random.integers(len(self.texts))]
        tokens = [*old[: self.random.integers(0, len(old) + 1)], *self.new_ids(self.random.integers(0, 6))][:40]
        sequence = self.cache.add_sequence(tokens)
        assert sequence.num_cached_tokens <= max(0, len(tokens) - 1)
        self.twins[sequence] = Twin(tokens, sequence.num_cached_tokens)

    def fork(self):
        if 0 < len(self.twins) < 5:
            (parent,) = self.pick()[:1]
            twin = self.twins[parent]
            self.twins[self.cache.fork(parent)] = Twin(twin.tokens, twin.computed)

    def remove(self, sequence=None):
        if sequence is None and self.twins:
            sequence = self.pick()[0]
        if sequence is not None:
            self.cache.remove(sequence)
            self.texts.append(self.twins.pop(sequence).tokens)

    def append(self):
        for sequence in self.pick() if self.twins else ():
            twin = self.twins[sequence]
            ids = self.new_ids(self.random.integers(0, 4))
            if len(twin.tokens) + len(ids) <= 50:
                self.cache.append_tokens([sequence], [ids])
                twin.tokens += ids

    def step(self):
        """A step of known and unknown ids, of which some are rejected; sometimes abandoned, or one sequence goes."""
        sequences = [each for each in (self.pick() if self.twins else ()) if self.twins[each].computed < 50]
        counts = [int(self.random.integers(0, 6)) for _ in sequences]
        try:
            batch = self.cache.prepare(sequences, counts)
        except OutOfBlocks:
            return self.remove()
        ids = self.step_ids(batch, sequences, counts)
        going = self.random.integers(8)
        if going == 0:
            return self.cache.abandon(batch)
        self.write(batch, sequences, counts, ids)
        if going == 1 and sequences:
            self.remove(sequences[0])
        accepted = [int(self.random.integers(0, count + 1)) for count in counts]
        starts = [self.twins[each].computed if each in self.twins else 0 for each in sequences]
        is_late = self.random.integers(2)
        if not is_late:
            self.learn(sequences, ids, starts, counts)
        if sum(accepted) == sum(counts) and self.random.integers(2):
            self.cache.commit(batch)
        elif len(set(accepted)) == 1:
            self.cache.commit(batch, accepted=accepted[0])
        else:
            self.cache.commit(batch, accepted=accepted)
        for sequence, count, kept in zip(sequences, counts, accepted, strict=True):
            if sequence in self.twins:
                self.twins[sequence].commit(count, kept)
        if is_late:
            self.learn(sequences, ids, starts, accepted)
        return None

    def step_ids(self, batch, sequences, counts):
        """The ids of each sequence in the step, those that are not known yet made up; checks batch.token_ids."""
        shown = np.split(np.asarray(batch.token_ids)[: batch.num_tokens], np.cumsum(counts)[:-1])
        ids = []
        for sequence, count, some in zip(sequences, counts, shown, strict=bool(sequences)):
            twin = self.twins[sequence]
            known = twin.tokens[twin.computed : twin.computed + count]
            assert some.tolist() == known + [-1] * (count - len(known))
            ids.append([*known, *self.new_ids(count - len(known))])
        return ids

    def learn(self, sequences, ids, starts, counts):
        """Append the first `counts` ids of the step, as far as they are not known."""
        for sequence, some, start, count in zip(sequences, ids, starts, counts, strict=True):
            if sequence in self.twins:
                twin = self.twins[sequence]
                late = some[max(0, len(twin.tokens) - start) : count]
                self.cache.append_tokens([sequence], [late])
                twin.tokens += late

    def write(self, batch, sequences, counts, ids):
        keys = []
        for sequence, count, some in zip(sequences, counts, ids, strict=True):
            twin = self.twins[sequence]
            text = [*twin.tokens[: twin.computed], *some]
            keys += [key_at(text, twin.computed + k) for k in range(count)]
        tokens = np.tile(np.array(keys, np.float32)[:, None, None], (1, 2, 8))
        for layer in range(self.cache.num_layers):
            self.cache.write(layer, tokens, tokens, batch)

    def check(self):
        self.cache.check_invariants()
        for sequence, twin in self.twins.items():
            assert sequence.tokens.tolist() == twin.tokens
            assert sequence.num_computed_tokens == twin.computed
            for layer in range(self.cache.num_layers):
                self.check_keys(layer, sequence, twin)

    def check_keys(self, layer, sequence, twin):
        """Every position that the next token sees holds the key of its own text."""
        table = self.cache.block_table(self.cache.group_of(layer)).numpy()[sequence.row]
        window = self.cache.spec(layer).window or 10**6
        keys = self.cache.key(layer).numpy()
        for position in range(max(0, twin.computed - window + 1), min(twin.computed, len(twin.tokens))):
            assert keys[table[position // 4], position % 4, 0, 0] == key_at(twin.tokens, position)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("seed", range(6))
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
