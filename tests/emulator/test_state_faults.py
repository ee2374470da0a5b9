"""Faults planted in the kernels of checkpoints of states."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_state_codec
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime

pytestmark = pytest.mark.slow

RACE = "races|uninitialised"
STATE_FAULTS = {
    "no barrier before maxima are read": Fault("state_maxima", "", RACE),
    "no barrier before scales are read": Fault("state_scales", "", RACE),
    "the maximum of one group of a warp": Fault("state_groups", "  for (int mask = 32; mask < 32; mask *= 2) {"),
    "rows after the last one": Fault(
        "state_rows", "    if (key < params.num_keys) {", "after the end|before the begin|uninitialised"
    ),
    "the last keys of a row": Fault("state_keys", "  if (key + 1 >= params.num_keys) return;"),
    "the slot of the state for the codes": Fault(
        "state_slots",
        "  const pc_int64 own = params.pairs[pair][1], coded = params.pairs[pair][1];",
    ),
    "the rows of the last round for all": Fault("state_reload"),
}


def check(kit: Kit) -> None:
    """Convert matrices of all tilings, and slots of pools."""
    for shape in ((5, 3), (3, 130, 128), (700, 16), (40, 261)):
        test_state_codec.test_codes_and_states_have_the_bits_of_the_host(kit, shape, "float32")
    test_state_codec.test_a_pool_on_the_device_saves_and_restores_as_on_the_host(kit)


def run(*where: Path) -> None:
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        check(Kit(runtime))
        runtime.finish()


def test_checkpoints_are_right_without_a_fault():
    run()


@pytest.mark.parametrize("name", cases(list(STATE_FAULTS)[::3], list(STATE_FAULTS)))
def test_a_fault_planted_in_a_kernel_of_checkpoints_is_caught(planting, name):
    fault = STATE_FAULTS[name]
    with (
        planting.planted(SOURCES, fault, STATE_FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),  # EmulatorError is an AssertionError
    ):
        run(sources)
