"""Faults planted in merges of partial results: the tests of merges on a device must catch them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_merge_parts as merges
from tests.cuda.kit import Kit
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime

FAULTS = {
    "a token has the parts of the next one": Fault("end_of_parts", "end = params.num_parts;"),
    "the weights of a token without keys": Fault("no_part_with_keys"),
    "numbers of weight 0": Fault("part_of_weight_0"),
    "the last part is taken for the largest": Fault("top_of_parts", "sum.top = weight;"),
    "a mask is not read": Fault("masked_token"),
}


def run(*where: Path) -> None:
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        kit = Kit(runtime)
        outs, lses = merges.parts("float16", (13, 4, 40))
        merges.check(kit, outs, lses, merges.CU_PARTS)
        merges.check(kit, outs, lses * np.float32(60), merges.CU_PARTS)
        merges.test_parts_without_keys_are_ignored_and_nan_remains(kit, np.inf)
        merges.test_a_mask_leaves_rows_of_the_first_part_as_they_are(kit, True)


def test_the_kernels_are_right_without_a_fault():
    run()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(planting, fault):
    with planting.planted(SOURCES, fault, FAULTS.values()) as sources, pytest.raises(AssertionError):
        run(sources)
