"""Interrupts and failed allocations at every point of the scheduler leave nothing half done and change no output."""

import random

import pytest

from tests.faults import is_full
from tests.serving.interrupting import check_interrupts, in_turn, run_whole
from tests.serving.recovery import SCENARIOS, DraftEngine, Engine, OverlapEngine
from tests.serving.shielded import Faults, ShieldedCache

pytestmark = pytest.mark.slow

# Every STRIDE-th point of a run is tested, every EVERY-th event of a call that is interrupted again and again, and
# every SPACING-th allocation.
STRIDE, EVERY, SPACING = (1, 1, 1) if is_full() else (19, 11, 8)


@pytest.mark.parametrize("cancelled", [None, 0, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_without_faults_serves_everything(name, cancelled):
    engine = Engine(name, run_whole, cancelled=cancelled)
    engine.check_end(engine.serve())
    assert engine.scheduler.num_preemptions or name == "prefix" or cancelled is not None


@pytest.mark.parametrize("make", [Engine, DraftEngine])
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_interrupted_at_each_event_in_turn_happen_once(name, make):
    engine = make(name, in_turn(name, EVERY), cancelled=2)
    engine.check_end(engine.serve())
    assert engine.faults > 1000 / EVERY


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_at_any_event_changes_no_output(name):
    assert check_interrupts(name, STRIDE, cancelled=0) > 1800 / STRIDE


@pytest.mark.parametrize("cancelled", [None, 0, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_overlap_without_faults_serves_everything(name, cancelled):
    engine = OverlapEngine(name, run_whole, cancelled=cancelled)
    engine.check_end(engine.serve())


@pytest.mark.parametrize("name", ["recompute", "samples", "prefix"])
def test_an_interrupt_at_any_event_changes_no_output_with_overlap(name):
    assert check_interrupts(name, 1 if is_full() else 4 * STRIDE, OverlapEngine, cancelled=0) > 30


@pytest.mark.parametrize("make", [Engine, DraftEngine])
@pytest.mark.parametrize("seed", range(200 if is_full() else 8))
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_with_a_failed_allocation_happen_once(name, seed, make):
    """Every SPACING-th allocation after a random number of cache calls fails in turn, until the call returns."""
    choice, faults, points = random.Random(seed), Faults(), {}

    def attempt(call):
        first, point = points.get(call) or (choice.randrange(7), 1 + len(points) % SPACING)
        points[call] = first, point + SPACING
        return faults.attempt(call, first, point)

    engine = make(name, attempt, cancelled=2, make=ShieldedCache)
    engine.cache.faults = faults
    engine.check_end(engine.serve())
    assert engine.faults
