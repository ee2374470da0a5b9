"""Faults planted in the scales and outputs of float8 in attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.attention_cases import BF16, DeviceCase
from tests.cuda.kit import Kit
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import Shape, make_case
from tests.ops.float8_cases import assert_rounded_once, dequantised, with_float8_query

pytestmark = pytest.mark.slow

FLOAT8_FAULTS = {
    "scores without the scale of queries": Fault("query_scale", "const float query_scale = 1.0f;"),
    "codes of prompts past their dims": Fault("prefill_output_past_dims"),
}


def run_float8(*where: Path) -> None:
    """Head dim 80, which instances pad to 96: decode and prompts."""
    runtime = EmulatedRuntime(*where)
    case = with_float8_query(make_case(Shape((70, 33), (20, 1), heads=(4, 2), dims=(80, 80), **BF16)))
    scales = np.array([0.5, 2.0], np.float32)
    with use_runtime(runtime):
        there = DeviceCase(Kit(runtime), case)
        wide = there.cuda.empty((21, 4, 96), "float8_e4m3fn")
        out, _ = there.run(out=wide[:, :, :80], query_scale=there.cuda.put(scales), output_scale=0.02)
        assert_rounded_once(out, dequantised(case, scales).expect()[0], 0.02, 2e-2)
        assert (there.cuda.get(wide)[..., 80:].view(np.uint8) == 0xFF).all(), "written past the dims"
        runtime.finish()


def test_float8_is_right_without_a_fault():
    run_float8()


@pytest.mark.parametrize("name", FLOAT8_FAULTS)
def test_a_planted_fault_is_caught(planting, name):
    table = FLOAT8_FAULTS.values()
    # EmulatorError is an AssertionError.
    with planting.planted(SOURCES, FLOAT8_FAULTS[name], table) as sources, pytest.raises(AssertionError):
        run_float8(sources)
