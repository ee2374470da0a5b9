"""Interrupts and failed allocations at every point of the scheduler leave nothing half done and change no output."""

import random

import pytest

from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.recovery import SCENARIOS, DraftEngine, Engine, OverlapEngine
from tests.serving.shielded import Faults, ShieldedCache

pytestmark = pytest.mark.slow

SERVING = PAGECORE / "serving"
# Every STRIDE-th point of a run is tested.
STRIDE = 1 if is_full() else 19


def run_whole(call):
    call()
    return True


def points_of(name, count, make=Engine, **options):
    """Return a sample of the points of a scenario, as pairs of call number and point within the call."""
    counts = []

    def attempt(call):
        counts.append(count(call))
        return True

    make(name, attempt, **options).serve()
    points = [(number, point) for number, most in enumerate(counts) for point in range(1, most + 1)]
    return points[random.Random(name).randrange(STRIDE) :: STRIDE]


def at(number, fault):
    """Return an `attempt` that runs call `number` through `fault` and the other calls without a fault."""
    seen = -1

    def attempt(call):
        nonlocal seen
        seen += 1
        return fault(call) if seen == number else run_whole(call)

    return attempt


@pytest.mark.parametrize("cancelled", [None, 0, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_without_faults_serves_everything(name, cancelled):
    engine = Engine(name, run_whole, cancelled=cancelled)
    engine.check_end(engine.serve())
    assert engine.scheduler.num_preemptions or name == "prefix" or cancelled is not None


@pytest.mark.parametrize("make", [Engine, DraftEngine])
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_interrupted_at_each_event_in_turn_happen_once(name, make):
    """A call is interrupted at its first event, then called again and interrupted at its second, and so on."""
    events = {}

    def attempt(call):
        events[call] = events.get(call, 0) + 1
        return raise_at(call, events[call], SERVING).finished

    engine = make(name, attempt, cancelled=2)
    engine.check_end(engine.serve())
    assert engine.faults > 1000


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_at_any_event_changes_no_output(name):
    points = points_of(name, lambda call: lines_of(call, SERVING), cancelled=0)
    faults = 0
    for number, point in points:
        engine = Engine(name, at(number, lambda call, n=point: raise_at(call, n, SERVING).finished), cancelled=0)
        engine.check_end(engine.serve())
        faults += engine.faults
    assert faults > 0.9 * len(points) > 1800 / STRIDE


@pytest.mark.parametrize("cancelled", [None, 0, 2])
@pytest.mark.parametrize("name", SCENARIOS)
def test_overlap_without_faults_serves_everything(name, cancelled):
    engine = OverlapEngine(name, run_whole, cancelled=cancelled)
    engine.check_end(engine.serve())


@pytest.mark.parametrize("name", ["recompute", "samples", "prefix"])
def test_an_interrupt_at_any_event_changes_no_output_with_overlap(name):
    points = points_of(name, lambda call: lines_of(call, SERVING), OverlapEngine, cancelled=0)[:: 1 if is_full() else 4]
    faults = 0
    for number, point in points:
        fault = at(number, lambda call, n=point: raise_at(call, n, SERVING).finished)
        engine = OverlapEngine(name, fault, cancelled=0)
        engine.check_end(engine.serve())
        faults += engine.faults
    assert faults > 0.9 * len(points) > 30


@pytest.mark.parametrize("make", [Engine, DraftEngine])
@pytest.mark.parametrize("seed", range(200 if is_full() else 8))
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_with_a_failed_allocation_happen_once(name, seed, make):
    """Every allocation after a random number of cache calls fails in turn, until the call returns."""
    choice, faults, points = random.Random(seed), Faults(), {}

    def attempt(call):
        first, point = points.get(call) or (choice.randrange(7), 0)
        points[call] = first, point + 1
        return faults.attempt(call, first, point + 1)

    engine = make(name, attempt, cancelled=2, make=ShieldedCache)
    engine.cache.faults = faults
    engine.check_end(engine.serve())
    assert engine.faults
