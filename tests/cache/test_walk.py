"""Random walks of paged caches of any layers, policies and ranks: slots, states and revoked content."""

import pytest

from tests.cache.walk import Walk
from tests.faults import is_full

pytestmark = pytest.mark.slow


def test_slots_hold_the_numbers_of_their_sequences_and_none_that_were_revoked():
    walks = [Walk(seed) for seed in range(200 if is_full() else 12)]
    for walk in walks:
        walk.run(120)
    assert sum(walk.num_reused for walk in walks) > 20 * len(walks)
    assert sum(walk.num_revoked for walk in walks) > len(walks)
