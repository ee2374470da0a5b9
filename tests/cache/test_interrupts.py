"""An interrupt at any point of any operation: the operation is done or undone."""

import time

import numpy as np
import pytest

from pagecore import num_threads, set_num_threads
from tests.cache.operations import OPERATIONS
from tests.cache.verdicts import Cell, Tally, cells_of, judge, outcome, spread
from tests.faults import Interrupt, is_full, lines_of, raise_at, signal_at

pytestmark = pytest.mark.slow

POINTS = 8 if is_full() else 5


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: the arrays are small, and a thread pool makes short calls slow on a busy machine."""
    before = num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)


def test_every_operation_runs_in_every_configuration():
    """The tests below take two of an operation's worlds, unless PAGECORE_FAULTS=full; the call may fail in none."""
    for name in OPERATIONS:
        worlds = {cell.configuration: cell for cell in cells_of(name, few=1000)}
        for cell in worlds.values():
            cell.ready()[1]()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_interrupted_at_any_line_is_done_or_undone(name):
    tally = Tally()
    for turn, cell in enumerate(cells_of(name)):
        lines = []
        states = outcome(cell, lambda call, lines=lines: lines.append(lines_of(call)))
        for n in spread(lines[0], POINTS, turn):
            kind = KeyboardInterrupt if n % 2 else Interrupt
            tally.note(cell, *judge(cell, states, lambda call, n=n, kind=kind: raise_at(call, n, error=kind)))
    conclude(name, tally)


@pytest.mark.skipif(not is_full(), reason="needs PAGECORE_FAULTS=full")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_interrupted_at_any_bytecode_is_done_or_undone(name):
    tally = Tally()
    for cell in cells_of(name)[::20]:
        states = outcome(cell)
        total = lines_of(cell.ready()[1], opcodes=True)
        for n in range(1, total + 1):
            tally.note(cell, *judge(cell, states, lambda call, n=n: raise_at(call, n, opcodes=True)))
    conclude(name, tally)


@pytest.mark.serial
def test_a_signal_at_a_random_moment_leaves_an_operation_done_or_undone():
    tally, random = Tally(), np.random.default_rng(0)
    cells = [cell for name in OPERATIONS for cell in cells_of(name, few=1)]
    end = time.monotonic() + (600 if is_full() else 2)
    states, lengths = {}, {}
    while time.monotonic() < end:
        cell: Cell = cells[random.integers(len(cells))]
        if cell not in states:
            states[cell] = outcome(cell)
            lengths[cell] = duration(cell)
        delay = random.uniform(2e-6, max(4e-6, 1.5 * lengths[cell]))
        run, problem = judge(cell, states[cell], lambda call, delay=delay: signal_at(call, delay))
        if run.reached:
            tally.note(cell, run, problem)
    conclude("signals", tally)


def duration(cell):
    _, call = cell.ready()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def conclude(name, tally):
    print(f"\n{tally.report(name)}")
    assert tally.num_faults == 0, "\n".join([tally.report(name), *tally.examples[:12]])
