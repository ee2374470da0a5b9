"""The tools of tests/faults.py reach every point of a call and disarm themselves."""

import contextlib
import sys
import threading
from pathlib import Path

import pytest

from tests import faults
from tests.faults import Interrupt, fail_allocation, lines_of, raise_at, runs, signal_at, with_failing_malloc

HERE = Path(__file__)
LOG = []


def third():
    LOG.append("a")
    LOG.append("b")
    LOG.append("c")


def test_an_interrupt_comes_at_every_call_line_and_return():
    outcomes = []
    for run in runs(lambda n: LOG.clear() or raise_at(third, n, HERE)):
        assert (run.finished, run.error[0]) == (False, Interrupt)
        outcomes.append("".join(LOG))
    assert outcomes == ["", "", "a", "ab", "abc"]
    assert lines_of(third, HERE) == 5
    assert raise_at(third, 6, HERE) == faults.Run(False, True)


def test_an_interrupt_between_bytecodes():
    assert lines_of(third, HERE, opcodes=True) > 3 * lines_of(third, HERE)
    outcomes = {len(LOG) for _ in runs(lambda n: LOG.clear() or raise_at(third, n, HERE, opcodes=True))}
    assert outcomes == {0, 1, 2, 3}


def test_an_interrupt_has_the_given_type_and_the_trace_function_is_restored():
    before = sys.gettrace()
    assert raise_at(third, 2, HERE, KeyboardInterrupt).error[0] is KeyboardInterrupt
    assert raise_at(third, 2, "/nowhere").reached is False
    assert sys.gettrace() is before


def test_an_interrupt_that_is_caught_counts_as_reached():
    def swallow():
        with contextlib.suppress(Interrupt):
            third()

    run = raise_at(swallow, 5, HERE)
    assert (run.reached, run.finished) == (True, True)


def test_an_interrupt_does_not_come_between_a_with_block_and_its_end():
    lock = threading.Lock()

    def locked():
        with lock:
            LOG.append("a")

    def returned():
        with lock:
            return len(LOG)

    for call in (locked, returned):
        for opcodes in (False, True):
            assert all(not lock.locked() for _ in runs(lambda n: raise_at(call, n, HERE, opcodes=opcodes)))  # noqa: B023


@pytest.mark.parametrize("count", [1, 20, 0])
def test_a_failed_allocation_comes_at_every_point(count):
    held = []

    def take():
        held.clear()
        held.extend(bytes(1000) for _ in range(3))

    outcomes = [(run.error[0], len(held)) for run in runs(lambda n: fail_allocation(take, n, count=count))]
    assert {error for error, _ in outcomes} == {MemoryError}
    assert {0, 1, 2} <= {count for _, count in outcomes}
    take()
    assert len(held) == 3


NATIVE = """
import numpy as np
from pagecore import BlockPool
from tests.faults import NativeAllocations, fail_allocation, runs
source = NativeAllocations()
pools = [BlockPool(9) for _ in range(1000)]
call = lambda: pools.pop().allocate(4)
call()
errors = {run.error[0].__name__ for run in runs(lambda n: fail_allocation(call, n, allocations=source)) if run.error}
source.arm(1)
try:
    BlockPool(10**6)
    print("no failure")
except MemoryError:
    source.disarm()
    print(*sorted(errors))
"""


@pytest.mark.slow
def test_a_failed_allocation_of_native_code(tmp_path):
    ran = with_failing_malloc(tmp_path, ["-c", NATIVE], timeout=60)
    assert (ran.returncode, ran.stdout.split()) == (0, ["MemoryError"]), ran.stderr


def test_a_signal_interrupts_a_call_and_its_timer_ends_with_it():
    def spin():
        while True:
            pass

    run = signal_at(spin, 1e-3)
    assert (run.reached, run.finished, run.error[0]) == (True, False, KeyboardInterrupt)
    assert signal_at(lambda: None, 5.0) == faults.Run(False, True, None, "after 5000000 us")
