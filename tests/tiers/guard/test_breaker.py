"""Breaker and staging memory against plain models."""

from itertools import pairwise

import numpy as np
import pytest

from pagecore.tiers.guard.breaker import Admission, Breaker
from pagecore.tiers.guard.staging import StagingMemory


def test_pauses_double_up_to_the_longest_and_a_success_sets_them_back():
    breaker = Breaker(failures=1, first_pause=1.0, longest_pause=60.0)
    breaker.record(breaker.admit(0.0), 0.0, success=False)
    now, pauses = 0.0, []
    for _ in range(8):
        pauses.append(breaker.seconds_left(now))
        now += pauses[-1]
        assert breaker.state(now - 1e-6) == "open"
        assert breaker.state(now) == "half-open"
        breaker.record(breaker.admit(now), now, success=False)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    now += 60
    breaker.record(breaker.admit(now), now, success=True)
    breaker.record(breaker.admit(now), now, success=False)
    assert breaker.seconds_left(now) == 1.0


def test_only_consecutive_failures_open_it():
    breaker = Breaker()
    for success in [False, False, True, False, False]:
        breaker.record(breaker.admit(0.0), 0.0, success=success)
    assert breaker.state(0.0) == "closed"
    breaker.record(breaker.admit(0.0), 0.0, success=False)
    assert breaker.state(0.0) == "open"


def test_a_half_open_breaker_admits_one_probe_at_a_time():
    breaker = Breaker(failures=1)
    breaker.record(breaker.admit(0.0), 0.0, success=False)
    assert breaker.admit(0.5) is Admission.REFUSED
    probe = breaker.admit(1.0)
    assert probe is Admission.PROBE
    assert breaker.admit(1.0) is Admission.REFUSED
    breaker.withdraw(probe)
    assert breaker.admit(1.0) is Admission.PROBE


def test_outcomes_of_batches_from_before_it_opened_do_not_count():
    breaker = Breaker(failures=1)
    early = [breaker.admit(0.0) for _ in range(3)]
    breaker.record(early[0], 0.0, success=False)
    breaker.record(early[1], 0.0, success=True)
    breaker.record(early[2], 0.5, success=False)
    assert breaker.state(0.9) == "open"
    assert breaker.seconds_left(0.0) == pytest.approx(0.1)  # time never runs back


@pytest.mark.parametrize("seed", range(20))
def test_staging_memory_gives_disjoint_pages_and_takes_all_back(seed):
    rng = np.random.default_rng(seed)
    memory = StagingMemory(50 * 4096 + 1)
    held, lost = [], []
    for _ in range(200):
        action = rng.integers(0, 10)
        if action < 5:
            sizes = rng.integers(1, 30_000, rng.integers(1, 4)).tolist()
            regions = memory.take(sizes)
            pages = sum(-(-size // 4096) for size in sizes)
            taken = sum(region.nbytes for region in held + lost) // 4096
            if regions is None:
                assert pages > 51 - taken or len(held) + len(lost) > 0  # full or in pieces
            else:
                assert [region.nbytes for region in regions] == [-(-size // 4096) * 4096 for size in sizes]
                held += regions
        elif held and action < 8:
            memory.give(held.pop(rng.integers(len(held))))
        elif held and action == 8:
            lost.append(held.pop(rng.integers(len(held))))
            memory.lose(lost[-1])
        elif lost:
            if rng.integers(2):
                memory.give(lost.pop())
            else:
                memory.recover()
                lost.clear()
        spans = sorted((region.address, region.nbytes) for region in held + lost)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert memory.used_bytes == sum(region.nbytes for region in held)
        assert memory.lost_bytes == sum(region.nbytes for region in lost)
        memory.check_invariants()
    for region in held:
        memory.give(region)
    memory.recover()
    assert memory.take([51 * 4096]) is not None
    memory.close()
