"""Faults planted in the kernel that seals blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_seal
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import DTYPES
from tests.ops.sealed_cases import empty_sealed

pytestmark = pytest.mark.slow

SEAL_FAULTS = {
    "the range of one lane's chunks": Fault("affine_lanes", "    for (int mask = lanes; mask < lanes; mask *= 2) {"),
    "a quotient by a scale of 0": Fault("affine_divisor", "divisor = scale;"),
    "zeros in the range of a short group": Fault("affine_entries_of_other_groups"),
    "codes of the word before": Fault("affine_codes_of_the_word_before"),
    "threads past the last task": Fault("affine_tasks_past_the_last", "task.exists = true;"),
}


def run_seal(*where: Path) -> None:
    """Groups of 32 channels in four lanes, of one token, and float32 numbers with scales of float16."""
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        for bits, groups, size, dims in (((4, 4), (16, 32), 16, (16, 96)), ((2, 2), (1, 16), 16, (32, 48))):
            sealed = empty_sealed(7, (size, test_seal.HEADS, *dims), bits, groups, DTYPES["float16"])
            test_seal.check(Kit(runtime), test_seal.caches(("float32", "float32"), size, dims), sealed)
        runtime.finish()


def test_the_kernels_are_right_without_a_fault():
    run_seal()


@pytest.mark.parametrize("name", cases(list(SEAL_FAULTS)[::2], list(SEAL_FAULTS)))
def test_a_fault_planted_in_the_kernel_that_seals_is_caught(planting, name):
    fault = SEAL_FAULTS[name]
    with (
        planting.planted(SOURCES, fault, SEAL_FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run_seal(sources)
