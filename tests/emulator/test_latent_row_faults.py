"""Faults planted in the kernels of latent rows and of the sparse indexer: each is caught by the tests of tests/cuda."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagecore import gather_latent, index_scores, transfer_blocks
from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_index, test_latent_rows
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime

pytestmark = pytest.mark.slow

LATENT_ROW_FAULTS = {
    "tokens past the end": Fault("latent_tokens_past_the_end"),
    "a scale of half a tile": Fault(
        "latent_lanes_of_a_scale", "    const float largest = largest_of_lanes(largest_of(x), 8);"
    ),
    "a NaN of half a group": Fault("latent_nan_of_a_group"),
    "products that are not rounded": Fault("latent_rounding_of_products", "      x[i] *= scale;"),
    "blocks outside of the cache": Fault("latent_blocks_outside", "  return block;", "after the end"),
    "query tokens past the end": Fault(
        "index_tokens_past_the_end", "  if (low >= batch.num_sequences) return {-1, 0, 0};"
    ),
    "keys past the end": Fault("index_keys_past_the_end"),
    "keys after a query token": Fault("index_hidden_keys", "    const int hidden = 0;"),
    "a weight without the factor of its head": Fault("index_factor_of_a_head", "  return exists ? weight : 0.0f;"),
    "the heads of one lane": Fault("index_heads_of_a_column"),
    "the scale of another key": Fault("index_scale_of_a_key", "      const float scale = pc_shuffle(keys.scale, key);"),
    "pairs outside of the caches": Fault(
        "convert_pairs_outside", "    convert(pair.source, pair.target);", "after the end|before the begin"
    ),
    "converted tokens past the end": Fault("convert_latent_tokens_past_the_end"),
    "negative products": Fault("index_positive_part", "  return x;"),
}


def check_rows(cuda: Kit) -> None:
    """Write rows with a NaN; gather scales that are not powers of two, and blocks outside of the cache."""
    test_latent_rows.test_nan_and_infinity(cuda)
    planes, stored = test_latent_rows.filled("fp8_ds_mla", (3, 5))
    table, lens = cuda.put(np.array([[1, 7], [2, 0]])), cuda.put(np.array([10, 5]))
    out = cuda.get(gather_latent(cuda.put(planes[0]), None, table, lens, out=cuda.empty((15, 576))))
    assert out.tolist() == np.concatenate([stored[1], np.zeros((5, 576)), stored[2]]).tolist()


def check_index(cuda: Kit) -> None:
    """Write and score keys of 128 dims; the last query token has no sequence."""
    test_index.test_keys_equal_the_twin(cuda, 40, "float32")
    case = test_index.Scored(33, 128, "bfloat16")
    test_index.test_tokens_without_a_sequence_see_nothing(cuda)
    case.check(cuda.get(index_scores(*case.arrays(cuda)[:5], case.lens, cu_query_lens=case.cu)))


def check_convert(cuda: Kit) -> None:
    """Convert blocks of 5 latents, which a block of 4 warps does not divide; two pairs have absent blocks."""
    rows = np.random.default_rng(0).standard_normal((3, 5, 576)).astype(np.float32)
    codes = np.full((3, 5, 656), 7, np.uint8)
    to = cuda.put(codes)
    transfer_blocks(cuda.put(rows), to, cuda.put(np.array([[2, 1], [9, 2], [1, 9]])))
    transfer_blocks(rows, codes, [(2, 1)])
    assert cuda.get(to).tobytes() == codes.tobytes()


def run(check: Callable[[Kit], None], *where: Path) -> None:
    runtime = EmulatedRuntime(*where)
    with use_runtime(runtime):
        check(Kit(runtime))
        runtime.finish()


CHECKS = {"index": check_index, "convert": check_convert}


def test_rows_and_scores_are_right_without_a_fault():
    for check in (check_rows, check_index, check_convert):
        run(check)


@pytest.mark.parametrize("name", cases(list(LATENT_ROW_FAULTS)[::3], list(LATENT_ROW_FAULTS)))
def test_a_fault_planted_in_a_kernel_of_rows_or_scores_is_caught(planting, name):
    fault = LATENT_ROW_FAULTS[name]
    with (
        planting.planted(SOURCES, fault, LATENT_ROW_FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),  # EmulatorError is an AssertionError
    ):
        run(CHECKS.get(fault.marker.split("_")[0], check_rows), sources)
