"""Faults planted in the kernels of sealed blocks: what seals them, and attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagecore import SealedBlocks
from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import sealed_calls, test_quantize, test_seal, test_sealed, test_sealed_inputs
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import DTYPES, Shape
from tests.ops.sealed_cases import SealedCase, empty_sealed, keep_sealed, make_sealed_case

pytestmark = pytest.mark.slow

WRONG, RACE, OUTSIDE = "is off by|not finite", "races", "after the end|before the allocation"
UNFINISHED = "races|uninitialised"
SEAL_FAULTS = {
    "the range of one lane's chunks": Fault("affine_lanes", "    for (int mask = lanes; mask < lanes; mask *= 2) {"),
    "a quotient by a scale of 0": Fault("affine_divisor", "divisor = scale;"),
    "zeros in the range of a short group": Fault("affine_entries_of_other_groups"),
    "codes of the word before": Fault("affine_codes_of_the_word_before"),
    "threads past the last task": Fault("affine_tasks_past_the_last", "task.exists = true;"),
}
RESTORE_FAULTS = {
    "threads past the last task": Fault("restored_tasks_past_the_last", "", OUTSIDE),
    "groups that do not end": Fault("restored_groups", "", "not equal"),
}
SEALED_FAULTS = {
    "blocks outside of the planes": Fault(
        "sealed_blocks_outside",
        "return {static_cast<int>(block.low), offset, is_sealed};",
        OUTSIDE,
    ),
    "a part of a block": Fault("sealed_lengths", "length_ = exists ? clamp(given, 0, most) : 0;", WRONG),
    "numbers past the dims": Fault(
        "sealed_numbers_past_dims", "const bool exists = state.keys.has(state.token + row);", f"{WRONG}|{OUTSIDE}"
    ),
    "products of keys with 8 bits": Fault("sealed_low_terms", "", "lse is off by"),
    "scales of tokens of other items": Fault("sealed_scales_of_other_items", "const bool exists = true;", None),
    "stages of the caches as sealed": Fault("sealed_flags", "flags().store(stage, 1);"),
    "values past the dims": Fault("sealed_values_past_dims", "const bool has_words = true;", OUTSIDE),
    "scales past the dims": Fault(
        "sealed_scales_past_dims", "const bool begins_group = 8 * n >= end;", "uninitialised"
    ),
    "infinite values past the dims": Fault("sealed_not_finite_past_dims", "", "uninitialised"),
    "scales become zeros while they are read": Fault("sealed_barrier_before_zeros", "", RACE),
    "scales are read before they are zeros": Fault("sealed_barrier_after_zeros", "", RACE),
}

PROMPT_FAULTS = {
    "values that have not arrived are unpacked": Fault("prefill_sealed_wait", "", "in flight"),
    "keys that are being unpacked are multiplied": Fault("prefill_sealed_barrier_after_keys", "", UNFINISHED),
    "values that are being unpacked are multiplied": Fault("prefill_sealed_barrier_after_values", "", UNFINISHED),
    "scales of tokens of other items": Fault("prefill_sealed_scales_of_other_items", "const bool exists = true;", None),
    "keys of a quarter without its first token": Fault(
        "prefill_sealed_quarters", "const bool exists = keys.has(token + 16 * quarter);", WRONG
    ),
    "slots of a quarter without its first token": Fault(
        "prefill_sealed_slots", "const bool exists = keys.has(own);", WRONG
    ),
    "rows of the caches over sealed rows": Fault("prefill_sealed_rows", "if (row < 0) continue;", None),
}
# Dims that an instance pads.
PADDED_FAULTS = {
    "rows of the caches past their dims": Fault("prefill_sealed_rows_past_dims", "const KeyRange own_keys = keys;"),
    "words of keys past their dims": Fault(
        "sealed_words_past_dims", "pc_copy_async(to, words, from, exists);", OUTSIDE
    ),
    "scales of keys past their dims": Fault("sealed_key_scales_past_dims", "const bool has_scales = exists;"),
    "values past their dims are not stored": Fault(
        "prefill_sealed_values_past_dims", "if (row >= end || !exists) continue;"
    ),
}
# Words and scales in the memory of their rows.
IN_PLACE_FAULTS = {
    "keys over words of other threads": Fault("prefill_sealed_barrier_in_keys", "", UNFINISHED),
    "values over words of other threads": Fault("prefill_sealed_barrier_in_values", "", RACE),
}


def run_seal(*where: Path) -> None:
    """Groups of 32 channels in four lanes, of one token, and float32 numbers with scales of float16."""
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        for bits, groups, size, dims in (((4, 4), (16, 32), 16, (16, 96)), ((2, 2), (1, 16), 16, (32, 48))):
            sealed = empty_sealed(7, (size, test_seal.HEADS, *dims), bits, groups, DTYPES["float16"])
            test_seal.check(Kit(runtime), test_seal.caches(("float32", "float32"), size, dims), sealed)
        runtime.finish()


def run_restore(*where: Path) -> None:
    """Several groups that begin within the eight codes of a thread; more threads than tasks."""
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        for axis in (-2, -1):
            test_quantize.test_sealed_formats_as_on_the_host(Kit(runtime), 2, ("kivi2", axis), "float16")
        test_quantize.test_leading_axes_that_do_not_follow_each_other(Kit(runtime))
        runtime.finish()


def run_sealed(*where: Path) -> None:
    runtime = EmulatedRuntime(*where)
    shape = Shape((70, 33), (7, 1), heads=(4, 2), dims=(80, 96), cache_dtype="bfloat16", layout="padded")
    with use_runtime(runtime):
        sealed_calls.check(Kit(runtime), make_sealed_case(shape))
        sealed_calls.check(Kit(runtime), make_sealed_case(replace(shape, dims=(64, 64), query_lens=None), (2, 2)))
        test_sealed_inputs.test_contents_of_device_arrays_that_are_wrong_read_nothing_outside(Kit(runtime))
        test_sealed.test_nan_reaches_only_the_rows_that_attend_to_it(Kit(runtime), 4)
        matrix = Shape((70, 33, 90), (4, 1, 2), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
        for queries in (matrix.query_lens, None):
            sealed_calls.check(Kit(runtime), make_sealed_case(replace(matrix, query_lens=queries), window=37))
        padded = replace(matrix, dims=(80, 80))
        sealed_calls.check(Kit(runtime), in_last_blocks(make_sealed_case(padded, (4, 2), (16, 16))))
        windowed = make_sealed_case(padded, (2, 4), (16, 16), window=40)
        windowed.sealed.value_scale[windowed.sealed.block_table[0, 1], 12] = np.nan  # two of four queries attend to it
        sealed_calls.run(Kit(runtime), windowed)
        test_sealed.test_blocks_selected_for_matrix_instructions(Kit(runtime), (48, 64), (2, 4), 32)
        runtime.finish()


def in_last_blocks(case: SealedCase) -> SealedCase:
    """Return the case with its sealed blocks after others, one for each block of the caches; the last one is used."""
    *planes, table, lens = case.sealed
    count = len(planes[0])
    used = 1 + table[(table >= 0) & (table < count)].max()
    planes = [np.concatenate([np.full_like(each, -1), each[:used]]) for each in planes]
    return replace(case, sealed=SealedBlocks(*planes, table + np.where(table < count, count, 0), lens))


def run_prompts(*where: Path) -> None:
    """Windows that begin within a quarter of a tile, and NaN in tokens that rows do not attend to.

    The planes have more blocks than the caches.
    """
    runtime = EmulatedRuntime(*where)
    shape = Shape((150, 70), (33, 7), heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16")
    with use_runtime(runtime):
        sealed_calls.check(Kit(runtime), in_last_blocks(make_sealed_case(shape, window=50)))
        single = make_sealed_case(replace(shape, query_lens=None), window=80)
        single.sealed.value_scale[single.sealed.block_table[0, 4], 5] = (
            np.nan
        )  # of token 69, the last before the window
        sealed_calls.check(Kit(runtime), single, planned={"batch_invariant": True})
        test_sealed.test_nan_in_a_sealed_block_reaches_only_the_rows_of_a_prompt_that_attend_to_it(Kit(runtime), 4)
        runtime.finish()


def run_padded(*where: Path) -> None:
    """Rows of values of 20 bytes; the last block of the planes and of the caches is that of a sequence."""
    runtime = EmulatedRuntime(*where)
    shape = Shape((150, 70), (33, 7), heads=(4, 1), dims=(80, 80), query_dtype="bfloat16", cache_dtype="bfloat16")
    with use_runtime(runtime):
        for bits in ((2, 2), (4, 2)):
            sealed_calls.check(Kit(runtime), in_last_blocks(make_sealed_case(shape, bits, (16, 16), window=50)))
        runtime.finish()


def run_in_place(*where: Path) -> None:
    """Tiles of 32 tokens of 256 dims, of which 16 tokens are in a sealed block."""
    runtime = EmulatedRuntime(*where)
    shape = Shape((80,), (33,), heads=(4, 1), dims=(256, 256), query_dtype="bfloat16", cache_dtype="bfloat16")
    with use_runtime(runtime):
        sealed_calls.check(Kit(runtime), keep_sealed(make_sealed_case(shape, (4, 2)), 0, 48))
        runtime.finish()


def test_the_kernels_are_right_without_a_fault():
    run_seal()
    run_restore()
    run_sealed()
    run_prompts()
    run_padded()
    run_in_place()


RUNS = [
    (SEAL_FAULTS, run_seal),
    (RESTORE_FAULTS, run_restore),
    (SEALED_FAULTS, run_sealed),
    (PROMPT_FAULTS, run_prompts),
    (PADDED_FAULTS, run_padded),
    (IN_PLACE_FAULTS, run_in_place),
]
PLANTED = [(name, faults, run) for faults, run in RUNS for name in cases(list(faults)[::2], list(faults))]


@pytest.mark.parametrize(("name", "faults", "run"), PLANTED, ids=[f"{run.__name__}-{name}" for name, _, run in PLANTED])
def test_a_planted_fault_is_caught(planting, name, faults, run):
    fault = faults[name]
    with (
        planting.planted(SOURCES, fault, faults.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run(sources)
