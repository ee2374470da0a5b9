"""Faults planted in the padding of head dims: each reads or writes past the dims of a call, and is caught."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda import use_runtime
from tests.cuda.attention_cases import BF16, DeviceCase, compare, in_last_slot, poisoned
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.probing import mutated
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import Shape, make_case

pytestmark = pytest.mark.slow

PADDING_FAULTS: dict[str, tuple[str, str, str]] = {
    "keys of decode past their dims": ("decode_ring.cuh", "only_if(chunk * 8 < p.head_dim)", "only_if(true)"),
    "values of decode past their dims": ("decode_ring.cuh", "only_if(chunk * 8 < p.value_dim)", "only_if(true)"),
    "queries of decode past their dims": ("decode_rows.cuh", " && chunk * 8 < p.head_dim", ""),
    "output of decode past its dims": ("decode.cu", "    if (d >= p.value_dim) continue;\n", ""),
    "keys and values of prompts past their dims": (
        "prefill_feed.cuh",
        "only_if(chunk * 8 < dim)",
        "only_if(true)",
    ),
    "queries of prompts past their dims": (
        "prefill_feed.cuh",
        "chunk * 8 < p.head_dim ? item.num_rows(heads) : 0",
        "item.num_rows(heads)",
    ),
    "output of prompts past its dims": ("prefill_output.cuh", "if (chunk * 8 >= p.value_dim) continue;", ""),
    "pitch of partial rows": ("prefill_output.cuh", "head) * p.value_dim;", "head) * 8 * kDimTiles;"),
    "partial rows past their dims": ("prefill_output.cuh", "store_if(8 * n < p.value_dim,", "store_if(true,"),
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
def test_a_fault_planted_in_the_padding_is_caught(tmp_path, name):
    file, before, after = PADDING_FAULTS[name]
    sources = mutated(tmp_path, file, before, after, SOURCES)
    with pytest.raises(AssertionError):  # an EmulatorError is one too
        run_padding_faults(sources, tmp_path)
