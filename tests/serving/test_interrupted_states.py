"""Interrupts of a scheduler over a hybrid cache: a step that is given up returns decodes to their checkpoints."""

import pytest

from pagecore.cache import PagedKVCache
from pagecore.storage import Plane, StateSpec
from tests.faults import is_full
from tests.serving.interrupting import check_interrupts, in_turn, run_whole
from tests.serving.recovery import SCENARIOS, Engine

pytestmark = pytest.mark.slow

STRIDE = 3 if is_full() else 43
EVERY = 1 if is_full() else 11


def hybrid(spec, **options):
    """Make a cache with a state layer; its rows return to a checkpoint, or to 0 tokens, when a step is abandoned."""
    states = StateSpec((Plane("state", (1,), "int32", per="sequence"),), chunk=2, interval=4)
    return PagedKVCache([spec, states], num_states=9, **options)


@pytest.mark.parametrize("cancelled", [None, 2])
@pytest.mark.parametrize("abandoned", [2, 5])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_abandoned_step_changes_no_output(name, abandoned, cancelled):
    engine = Engine(name, run_whole, abandoned=abandoned, cancelled=cancelled, make=hybrid)
    engine.check_end(engine.serve())


@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_interrupted_at_each_event_in_turn_happen_once(name):
    engine = Engine(name, in_turn(name, EVERY), make=hybrid)
    engine.check_end(engine.serve())
    assert engine.faults > 1000 / EVERY


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_interrupt_at_any_event_changes_no_output(name):
    assert check_interrupts(name, STRIDE, make=lambda *given: Engine(*given, make=hybrid)) > 1800 / STRIDE
