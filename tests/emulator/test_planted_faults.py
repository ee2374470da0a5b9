"""Faults planted in a kernel that is right without them: the emulator catches each one in every order of threads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator import (
    test_attention_kernels,
    test_device_order,
    test_float8_faults,
    test_hadamard_faults,
    test_latent_faults,
    test_latent_row_faults,
    test_merge_faults,
    test_padding_faults,
    test_sealed_faults,
    test_sparse_faults,
    test_state_faults,
    test_stored_faults,
    test_tree_faults,
)
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault, MarkerError, markers, plant
from tests.emulator.probing import KERNELS, probe
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

pytestmark = pytest.mark.slow

SEEDS = range(6)
NUM_TILES = 11


def run_ring(runtime, name="pc_bfloat16", n=NUM_TILES):
    """Return the result of the kernel and the expected result."""
    kit = Kit(runtime)
    dtype = {"pc_half": np.float16, "pc_bfloat16": ml_dtypes.bfloat16}[name]
    random = np.random.default_rng(1)
    tiles, query = random.integers(-4, 4, (n, 16, 64)).astype(dtype), random.integers(-4, 4, (16, 64)).astype(dtype)
    out = kit.empty((16, 16))
    probe(
        runtime,
        f"ring<{name}>",
        input=kit.put(tiles),
        extra=kit.put(query),
        output=out,
        n=n,
        threads=128,
        shared_bytes=4 * 2 * 2048,
    )
    return kit.get(out), query.astype(np.float64) @ tiles.astype(np.float64).sum(0).T


@pytest.mark.parametrize("n", [1, 4, 5, 11])
@pytest.mark.parametrize("name", ["pc_half", "pc_bfloat16"])
def test_the_kernel_is_right_in_any_order(name, n):
    for seed in SEEDS:
        got, expected = run_ring(EmulatedRuntime(KERNELS, seed=seed), name, n)
        np.testing.assert_array_equal(got, expected)


def test_the_work_of_a_kernel_is_counted():
    runtime = EmulatedRuntime(KERNELS)
    run_ring(runtime)
    rounds = -(-NUM_TILES // 4)
    assert runtime.counts["copied_bytes"] == NUM_TILES * 16 * 64 * 2
    assert runtime.counts["read_bytes"] == 4 * 16 * 64 * 2  # each warp reads the queries
    assert runtime.counts["written_bytes"] == 16 * 16 * 4
    assert runtime.counts["matrix_loads"] == 4 * rounds * 4 * 4
    assert runtime.counts["matrix_conflicts"] == 0


def test_a_conflicting_swizzle_gives_right_numbers_and_is_counted(planting):
    with planting.planted(KERNELS, SWIZZLE, ALL_FAULTS) as sources:
        runtime = EmulatedRuntime(sources)
        got, expected = run_ring(runtime)
    np.testing.assert_array_equal(got, expected)
    assert runtime.counts["matrix_conflicts"] == runtime.counts["matrix_loads"]


SWIZZLE = Fault("swizzle", "return row * kRowBytes + ((chunk ^ (row % 4)) << 4);")
RACE = "races|uninitialised|in flight"
FAULTS = {
    "no barrier before the buffer is reused": Fault("barrier_before_sums", "", "races|in flight"),
    "no barrier before the sums are read": Fault("barrier_after_sums", "", RACE),
    "no barrier after the wait": Fault("barrier_after_wait", "", "races|in flight"),
    "no barrier before a stage is refilled": Fault(
        "barrier_before_refill", "", r"races: it writes what thread \d+ reads|in flight"
    ),
    "a wait that leaves one group more": Fault("wait", "pc_wait_copies<2>();", "has in flight"),
    "no wait at the end": Fault("last_wait", "", "has in flight|with . copies in flight|writes what the copy"),
    "no commit": Fault("commit", "", "has in flight"),
    "a copy past the last tile": Fault(
        "copy",
        "pc_copy_async(to, tiles, from, tile <= num_tiles);",
        "copies 16 bytes at .* after the end",
    ),
    "one stage": Fault("stages", "constexpr int kStages = 1;", "in flight"),
    "the ring of another warp": Fault(
        "ring_of_warp",
        "const Shared<pc_uint8> own = pc_shared_buffer() + warp / 2 * kStages * kTileBytes;",
        "races|in flight",
    ),
    "a read past the shared buffer": Fault(
        "added_sums",
        "for (int w = 0; w < kWarps; ++w) sum += sums.load(w * 256 + i * 17);",
        "of the shared buffer, which has 16384 bytes",
    ),
    "a collective under divergence": Fault(
        "start_of_step", "pc_uint32 b[4]; if (lane < 7) continue;", "is reached by a part of the warp"
    ),
    "a barrier under divergence": Fault(
        "barrier_after_sums", "if (warp == 0) pc_sync_block();", "pc_sync_block is reached by"
    ),
    "an index outside a local array": Fault(
        "second_product",
        "pc_multiply<T>(c[1], a[k], b[2], b[k + 1]);",
        "an index lies outside a local array",
    ),
    "a misaligned copy": Fault(
        "source_of_copy",
        "const pc_int64 from = (static_cast<pc_int64>(tile) * 16 + row) * 64 + chunk * 8 + 1;",
        "which is not a multiple of 16",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught_in_any_order(planting, fault):
    with planting.planted(KERNELS, fault, ALL_FAULTS) as sources:
        for seed in SEEDS:
            with pytest.raises(EmulatorError, match=fault.message):
                run_ring(EmulatedRuntime(sources, seed=seed))


WRONG = {
    "swizzle on one side": Fault("target_of_copy", "const SharedAddress to = stage + row * kRowBytes + chunk * 16;"),
    "matrices in another order": Fault("order_of_matrices", "const int row = lane % 16, chunk = k * 2 + lane / 16;"),
    "the sums of one warp left out": Fault(
        "added_sums", "for (int w = 0; w < kWarps - 1; ++w) sum += sums.load(w * 256 + i);"
    ),
    "the first eight rows twice": Fault("stored_sum", "const float sum = c[j][i % 2];"),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_an_arithmetic_fault_gives_wrong_numbers(planting, fault):
    with planting.planted(KERNELS, fault, ALL_FAULTS) as sources:
        got, expected = run_ring(EmulatedRuntime(sources))
    assert not np.array_equal(got, expected)


ALL_FAULTS = (SWIZZLE, *FAULTS.values(), *WRONG.values())


def test_a_copy_with_faults_is_right_until_one_is_selected(planting):
    with planting.planted(KERNELS, SWIZZLE, ALL_FAULTS) as sources:
        pass
    for seed in SEEDS:
        got, expected = run_ring(EmulatedRuntime(sources, seed=seed))
        np.testing.assert_array_equal(got, expected)


# ---- the markers


def test_a_missing_marker_is_an_error(tmp_path):
    with pytest.raises(MarkerError, match=r"expected one line with '// fault: nothing' in .*, got 0 \(none\)"):
        plant(tmp_path, KERNELS, Fault("nothing"))


@pytest.mark.parametrize("file", ["ring.cu", "tickets.cu"])
def test_an_ambiguous_marker_is_an_error(tmp_path, file):
    sources = plant(tmp_path / "first", KERNELS)
    with (sources / file).open("a") as text:
        text.write("int more;  // fault: wait\n")
    with pytest.raises(MarkerError, match="got 2 "):
        plant(tmp_path, sources, Fault("wait"))


def test_a_fault_replaces_its_line_and_no_other(tmp_path):
    before = (KERNELS / "ring.cu").read_text().splitlines()
    after = (plant(tmp_path, KERNELS, Fault("commit", "// none")) / "ring.cu").read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [("  pc_commit_copies();  // fault: commit", "// none")]


def test_every_marker_is_of_a_fault_that_is_planted():
    own = [SWIZZLE, *FAULTS.values(), *WRONG.values(), *test_device_order.FAULTS.values(), test_device_order.NO_JOIN]
    assert sorted({fault.marker for fault in own}) == markers(KERNELS)
    tables = (
        test_attention_kernels.FAULTS,
        test_attention_kernels.GENERAL_FAULTS,
        test_float8_faults.FLOAT8_FAULTS,
        test_hadamard_faults.FAULTS,
        test_padding_faults.PADDING_FAULTS,
        test_stored_faults.STORED_FAULTS,
        test_stored_faults.UNIT_FAULTS,
        test_latent_row_faults.LATENT_ROW_FAULTS,
        test_latent_faults.LATENT_FAULTS,
        test_sparse_faults.FAULTS,
        test_state_faults.STATE_FAULTS,
        test_tree_faults.FAULTS,
        test_merge_faults.FAULTS,
        test_sealed_faults.SEAL_FAULTS,
        test_sealed_faults.RESTORE_FAULTS,
        test_sealed_faults.SEALED_FAULTS,
        test_sealed_faults.PROMPT_FAULTS,
        test_sealed_faults.PADDED_FAULTS,
        test_sealed_faults.IN_PLACE_FAULTS,
    )
    assert sorted({fault.marker for table in tables for fault in table.values()}) == markers(SOURCES)
