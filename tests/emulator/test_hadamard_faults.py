"""Faults planted in the kernel of Hadamard transforms."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_hadamard
from tests.cuda.kit import Kit
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime

pytestmark = pytest.mark.slow

FAULTS = {
    "steps between half of the lanes": Fault("hadamard_lanes", "  for (int step = 1; step < lanes / 2; step *= 2) {"),
    "differences of the wrong sign": Fault(
        "hadamard_sign", "      x[i] = (lane & step) != 0 ? x[i] - other : x[i] + other;"
    ),
    "blocks after the last one": Fault(
        "hadamard_end", "  const bool is_inside = block <= params.num_blocks;", "after the end|before the begin"
    ),
}


def run(*where: Path) -> None:
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        test_hadamard.test_rows_have_the_bits_of_the_host(Kit(runtime), "float32")
        runtime.finish()


def test_transforms_are_right_without_a_fault():
    run()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_planted_in_the_kernel_is_caught(planting, name):
    fault = FAULTS[name]
    with (
        planting.planted(SOURCES, fault, FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),  # EmulatorError is an AssertionError
    ):
        run(sources)
