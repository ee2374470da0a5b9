"""Random workloads of the scheduler over caches of random layers, with swap spaces and host tiers or without."""

import pytest

from tests.faults import is_full
from tests.serving.any_specs import AnyEngine


@pytest.mark.parametrize("seed", range(1000 if is_full() else 25))
def test_every_key_and_token_is_that_of_the_request(seed):
    engine = AnyEngine(seed)
    engine.serve(engine.draw.choice([4, 10, 25]))
