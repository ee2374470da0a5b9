"""Faults planted in the attention kernels of quantised caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.test_stored import check, low_scores_first, scaled_values
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import Shape
from tests.ops.format_cases import FormatCase, make_format_case

pytestmark = pytest.mark.slow

RACE = "races|in flight|uninitialised"
STORED_FAULTS = {
    "copies before the slots": Fault("ring_barrier_before_copies", "", RACE),
    "general widens a row that is being read": Fault("stored_barrier_before_widening", "", RACE),
    "decode does not wait for copies": Fault("ring_wait", "", RACE),
    "decode reads the copies of other lanes": Fault("ring_barrier_after_wait", "", RACE),
    "decode multiplies a tile that is being unpacked": Fault("decode_stored_barrier_after_unpacking", "", RACE),
    "keys past their dims": Fault("keys_past_dims", "const KeyRange own_keys = state.keys;"),
    "values past their dims": Fault("values_past_dims", "const KeyRange own_values = state.keys;"),
    "prompts read codes that have not arrived": Fault("prefill_stored_wait", "", RACE),
    "prompts multiply keys that are being unpacked": Fault("prefill_stored_barrier_after_keys", "", RACE),
    "prompts unpack values while keys are multiplied": Fault("prefill_stored_barrier_before_values", "", RACE),
    "prompts multiply values that are being unpacked": Fault("prefill_stored_barrier_after_values", "", RACE),
    "scales of prompts as words that they are not": Fault("parts_of_words"),
    "codes of prompts past their dims": Fault("prefill_codes_past_dims", "const bool exists = keys.has(token + row);"),
    "general copies units past the dims": Fault(
        "units_past_dims", "const bool valid = state.keys.has(state.token + row);"
    ),
    "queries past their dims": Fault("stored_queries_past_dims", "if (row < item.query_count * heads.count) {"),
}
UNIT_FAULTS = {
    "O keeps the unit before": Fault("unit_of_sums"),
    "a unit never becomes smaller": Fault("unit_after_a_larger_score", "largest_[r] = pc_max(largest_[r], largest);"),
}
ALL_FAULTS = (*STORED_FAULTS.values(), *UNIT_FAULTS.values())


def in_last_slot(case: FormatCase, sequence: int) -> None:
    """Exchange blocks so that the first block of a sequence, which must be full, is the last block of the caches."""
    table = case.plain.block_table
    last, used = len(case.key.codes) - 1, int(table[sequence, 0])
    for planes in (case.key, case.value):
        for array in (planes.codes, planes.scale, planes.numbers):
            array[[used, last]] = array[[last, used]]
    before = table.copy()
    table[before == used], table[before == last] = last, used


def run_stored(*where: Path) -> None:
    """Head dim 96, which the instances of 128 pad: decode and prompts, and prompts that the general kernel serves."""
    runtime = EmulatedRuntime(*where)
    shape = Shape((300, 70, 33), (3, 40, 1), heads=(4, 1), dims=(96, 96), query_dtype="bfloat16")
    prompts = Shape((150, 70, 33), (40, 70, 1), heads=(4, 1), dims=(96, 96), query_dtype="bfloat16")
    general = replace(prompts, query_dtype="float32")
    with use_runtime(runtime):
        for names, sizes in (
            (("int8_token",), shape),
            (("int8_token",), prompts),
            (("int8_token",), general),
            (("int8_token", None), shape),
            (("mxfp8",), prompts),
        ):
            case = make_format_case(*names, shape=sizes)
            if len(names) == 1:
                in_last_slot(case, 2)
            check(Kit(runtime), case)
        runtime.finish()


def run_units(*where: Path) -> None:
    """Scales of tokens that differ: halves of 96 dims, and rows whose largest score comes late."""
    runtime = EmulatedRuntime(*where)
    halves = Shape((150, 70, 33), (40, 70, 1), heads=(4, 1), dims=(96, 96), query_dtype="float16")
    with use_runtime(runtime):
        for queries in (4, 40):
            check(Kit(runtime), low_scores_first("int8_token", queries))
        check(Kit(runtime), scaled_values(make_format_case("int8_token", shape=halves, scale=3.0), -4, 10))
        runtime.finish()


def test_stored_caches_are_right_without_a_fault():
    run_stored()
    run_units()


@pytest.mark.parametrize("name", cases(list(STORED_FAULTS)[::2], list(STORED_FAULTS)))
def test_a_fault_planted_in_a_kernel_of_stored_caches_is_caught(planting, name):
    fault = STORED_FAULTS[name]
    with (
        planting.planted(SOURCES, fault, ALL_FAULTS) as sources,
        pytest.raises(AssertionError, match=fault.message),  # EmulatorError is an AssertionError
    ):
        run_stored(sources)


@pytest.mark.parametrize("name", cases(list(UNIT_FAULTS)[1:], list(UNIT_FAULTS)))
def test_a_fault_planted_in_the_units_of_weights_is_caught(planting, name):
    with planting.planted(SOURCES, UNIT_FAULTS[name], ALL_FAULTS) as sources, pytest.raises(AssertionError):
        run_units(sources)
