"""`prepare(draft_ids=)` writes ids to the batch that the sequences do not know."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedDtype
from tests.cache.caches import SPEC, make
from tests.cache.prefixes import ALIKE
from tests.cache.test_rejected_drafts import prompted
from tests.together import together

PROMPT = ALIKE[:10]


def test_the_batch_has_the_ids_and_the_sequence_does_not_learn_them():
    cache = make(SPEC, num_blocks=33)
    sequences = [prompted(cache), prompted(cache, ALIKE[20:29])]
    cache.append_tokens(sequences, [70, 80])
    with cache.prepare(sequences, [4, 3], draft_ids=[[71, 72, 73], np.array([81, 82])]) as batch:
        assert np.asarray(batch.token_ids).tolist() == [70, 71, 72, 73, 80, 81, 82]
        assert [each.tokens.tolist() for each in sequences] == [[*PROMPT, 70], [*ALIKE[20:29], 80]]
        cache.commit(batch, accepted=[3, 1])
    assert [each.num_tokens for each in sequences] == [11, 10]
    assert [each.num_computed_tokens for each in sequences] == [13, 10]
    cache.append_tokens(sequences, [[71, 72, 74], [85]])
    assert sequences[0].tokens.tolist() == [*PROMPT, 70, 71, 72, 74]
    cache.check_invariants()


def test_drafts_are_the_last_tokens_of_a_row_and_ids_between_are_unknown():
    cache = make(SPEC, num_blocks=33)
    first, second = prompted(cache), prompted(cache, ALIKE[20:29])
    batch = cache.make_batch(2, 16)
    with cache.prepare([first, second], [3, 2], batch, draft_ids=[[71, 72], None]):
        assert np.asarray(batch.token_ids).tolist()[:5] == [-1, 71, 72, -1, -1]
        cache.abandon(batch)
    # The next step with this batch has no drafts.
    with cache.prepare([first, second], [3, 2], batch):
        assert np.asarray(batch.token_ids).tolist()[:5] == [-1] * 5
        cache.abandon(batch)
    cache.check_invariants()


@together(
    ("draft_ids", "error", "message"),
    [
        ([[1, 2], [3]], ShapeError, "draft_ids has 2 entries; give one for each of the 1 sequences"),
        ([[1, 2, 3, 4]], ShapeError, "4 ids; of the 4 new tokens of that sequence 1 have known ids: give at most 3"),
        ([7], ShapeError, "draft_ids holds a number; give one list of ids for each sequence"),
        (7, ShapeError, "draft_ids is a int; give a list with one entry for each sequence"),
        ([[2**31]], ShapeError, "draft id"),
        ([[1.5]], UnsupportedDtype, "draft id"),
    ],
)
@together("reuses", [False, True])
def test_wrong_draft_ids_are_refused_and_change_nothing(draft_ids, error, message, reuses):
    cache = make(SPEC, num_blocks=33)
    sequence = prompted(cache)
    cache.append_tokens([sequence], [70])
    batch, before = cache.make_batch(2, 16) if reuses else None, cache.num_available
    for call in (cache.prepare, cache.try_prepare):
        with pytest.raises(error, match=message):
            call([sequence], 4, batch, draft_ids=draft_ids)
    assert cache.num_available == before
    with cache.prepare([sequence], 2, batch) as step:
        assert np.asarray(step.token_ids)[:2].tolist() == [70, -1]
        cache.commit(step)
    cache.check_invariants()
