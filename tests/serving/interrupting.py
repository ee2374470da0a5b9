"""Interrupts of an engine: at the events of each call in turn, or at a few events of a run."""

import itertools
import random
from collections import Counter

from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.recovery import SCENARIOS, Engine

SERVING = PAGECORE / "serving"
# Interrupts in one run, far apart; with PAGECORE_FAULTS=full each has a run of its own.
POINTS_AT_ONCE = 1 if is_full() else 4
# Calls of each kind that `in_turn` interrupts at every second event.
FIRST_CALLS = 2


def run_whole(call):
    call()
    return True


def in_turn(name, every):
    """Return an `attempt` that interrupts a call, then again at a later event, and so on.

    The first calls of each kind are interrupted at every second event, in the next scenario at the others, because
    these calls are alike in all scenarios; later calls at every `every`-th event.
    """
    events, kinds, number = {}, Counter(), list(SCENARIOS).index(name)

    def attempt(call):
        if call not in events:
            is_first = kinds[call.__code__] < FIRST_CALLS
            turn = number + kinds[call.__code__] if is_first else len(events)
            kinds[call.__code__] += 1
            step = min(every, 2) if is_first else every
            events[call] = itertools.count(1 + turn % step, step)
        return raise_at(call, next(events[call]), SERVING).finished

    return attempt


def check_interrupts(name, every, make=Engine, **options):
    """Interrupt runs at every `every`-th event of a run, and assert that each run serves everything."""
    points = points_of(name, every, make, **options)
    num_runs = -(-len(points) // POINTS_AT_ONCE)
    faults = 0
    for first in range(num_runs):
        engine = make(name, at(dict(points[first::num_runs])), **options)
        engine.check_end(engine.serve())
        faults += engine.faults
    # An interrupted call may leave later calls less to do: a point past their last event interrupts nothing.
    assert faults > 0.8 * len(points)
    return faults


def points_of(name, every, make, **options):
    """Return every `every`-th point of a scenario, as pairs of call number and event within the call."""
    counts = []

    def count(call):
        counts.append(lines_of(call, SERVING))
        return True

    make(name, count, **options).serve()
    points = [(number, point) for number, most in enumerate(counts) for point in range(1, most + 1)]
    return points[random.Random(name).randrange(every) :: every]


def at(points):
    """Return an `attempt` that interrupts calls once, at `points`: the event by the number of the call."""
    numbers = {}

    def attempt(call):
        point = points.pop(numbers.setdefault(call, len(numbers)), None)
        return run_whole(call) if point is None else raise_at(call, point, SERVING).finished

    return attempt
