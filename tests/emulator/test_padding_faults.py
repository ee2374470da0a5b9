"""Faults planted in the padding of head dims: each reads or writes past the dims of a call, and each is caught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.attention_cases import BF16, DeviceCase, compare, in_last_slot, poisoned
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import Shape, make_case

pytestmark = pytest.mark.slow

PADDING_FAULTS = {
    "keys of decode past their dims": Fault("keys_past_dims", "const KeyRange own_keys = state.keys;"),
    "values of decode past their dims": Fault("values_past_dims", "const KeyRange own_values = state.keys;"),
    "queries of decode past their dims": Fault(
        "decode_queries_past_dims", "if (row < item.query_count * heads.count) {"
    ),
    "output of decode past its dims": Fault("decode_output_past_dims"),
    "keys and values of prompts past their dims": Fault("prefill_keys_past_dims", "const KeyRange own_keys = keys;"),
    "queries of prompts past their dims": Fault(
        "prefill_queries_past_dims", "const int num_rows = item.num_rows(heads);"
    ),
    "output of prompts past its dims": Fault("prefill_output_past_dims"),
    "pitch of partial rows": Fault("pitch_of_partial_rows", "return (row * p.num_query_heads + head) * 8 * kDimTiles;"),
    "partial rows past their dims": Fault("partial_rows_past_dims", "const bool exists = true;"),
}


def run_padding_faults(*where: Path) -> None:
    """Head dim 80: decode, prompts, split prompts, and prompts that one worker folds."""
    runtime = EmulatedRuntime(*where)
    shape = Shape((2100, 33, 70), (20, 1, 40), heads=(4, 1), dims=(80, 80), **BF16)
    case = poisoned(in_last_slot(make_case(shape), 1))
    with use_runtime(runtime):
        there = DeviceCase(Kit(runtime), case)
        wide = there.cuda.empty((61, 4, 96), "bfloat16")
        for options in ({}, {"num_workers": 12}, {"num_workers": 1, "batch_invariant": True}):
            compare(case, there.run(out=wide[:, :, :80], plan=there.plan(**options)))
            assert (there.cuda.get(wide)[..., 80:].view(np.uint16) == 0xFFFF).all(), "written past the dims"
        runtime.finish()


def test_padded_dims_are_right_without_a_fault():
    run_padding_faults()


@pytest.mark.parametrize("name", cases(list(PADDING_FAULTS)[1::2], list(PADDING_FAULTS)))
def test_a_fault_planted_in_the_padding_is_caught(planting, name):
    table = PADDING_FAULTS.values()
    # EmulatorError is an AssertionError.
    with planting.planted(SOURCES, PADDING_FAULTS[name], table) as sources, pytest.raises(AssertionError):
        run_padding_faults(sources)
