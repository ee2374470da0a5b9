"""Interrupts of a scheduler over a hybrid cache: a step that is given up returns decodes to their checkpoints."""

import random

import pytest

from pagecore.cache import PagedKVCache
from pagecore.storage import Plane, StateSpec
from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.recovery import SCENARIOS, Engine

pytestmark = pytest.mark.slow

SERVING = PAGECORE / "serving"
STRIDE = 3 if is_full() else 43


def hybrid(spec, **options):
    """Make a cache with a state layer; its rows return to a checkpoint, or to 0 tokens, when a step is abandoned."""
    states = StateSpec((Plane("state", (1,), "int32", per="sequence"),), chunk=2, interval=4)
    return PagedKVCache([spec, states], num_states=9, **options)


def run_whole(call):
    call()
    return True


@pytest.mark.parametrize("cancelled", [None, 2])
@pytest.mark.parametrize("abandoned", [2, 5])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_abandoned_step_changes_no_output(name, abandoned, cancelled):
    engine = Engine(name, run_whole, abandoned=abandoned, cancelled=cancelled, make=hybrid)
    engine.check_end(engine.serve())


@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_interrupted_at_each_event_in_turn_happen_once(name):
    events = {}

    def attempt(call):
        events[call] = events.get(call, 0) + 1
        return raise_at(call, events[call], SERVING).finished

    engine = Engine(name, attempt, make=hybrid)
    engine.check_end(engine.serve())
    assert engine.faults > 1000


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_at_any_event_changes_no_output(name):
    counts = []

    def count(call):
        counts.append(lines_of(call, SERVING))
        return True

    Engine(name, count, make=hybrid).serve()
    points = [(number, point) for number, most in enumerate(counts) for point in range(1, most + 1)]
    points = points[random.Random(name).randrange(STRIDE) :: STRIDE]
    faults = 0
    for number, point in points:
        calls = iter(range(10**9))

        def attempt(call, number=number, point=point, calls=calls):
            return raise_at(call, point, SERVING).finished if next(calls) == number else run_whole(call)

        engine = Engine(name, attempt, make=hybrid)
        engine.check_end(engine.serve())
        faults += engine.faults
    assert faults > 0.9 * len(points) > 1800 / STRIDE
