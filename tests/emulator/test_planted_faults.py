"""Faults planted in a kernel that is right without them: each is caught, in whatever order threads run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator.probing import KERNELS, mutated, probe
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

pytestmark = pytest.mark.slow

SEEDS = range(6)
NUM_TILES = 11


def run_ring(runtime, name="pc_bfloat16", n=NUM_TILES):
    """Return what the kernel gives, and what it should."""
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


def test_what_a_kernel_does_is_counted():
    runtime = EmulatedRuntime(KERNELS)
    run_ring(runtime)
    rounds = -(-NUM_TILES // 4)
    assert runtime.counts["copied_bytes"] == NUM_TILES * 16 * 64 * 2
    assert runtime.counts["read_bytes"] == 4 * 16 * 64 * 2  # each warp reads the queries
    assert runtime.counts["written_bytes"] == 16 * 16 * 4
    assert runtime.counts["matrix_loads"] == 4 * rounds * 4 * 4
    assert runtime.counts["matrix_conflicts"] == 0


def test_a_swizzle_that_meets_banks_twice_gives_right_numbers_but_is_counted(tmp_path):
    sources = mutated(tmp_path, "ring.cu", "chunk ^ (row % 8)", "chunk ^ (row % 4)")
    runtime = EmulatedRuntime(sources, tmp_path)
    got, expected = run_ring(runtime)
    np.testing.assert_array_equal(got, expected)
    assert runtime.counts["matrix_conflicts"] == runtime.counts["matrix_loads"]


RACE = "races|nobody has written|in flight"
FAULTS = {
    "barrier of the block before the buffer is used again": (
        "  pc_wait_copies<0>();\n  pc_sync_block();\n",
        "  pc_wait_copies<0>();\n",
        "races|in flight",
    ),
    "barrier of the block before the sums are read": ("  pc_sync_block();\n  if (warp == 0)", "  if (warp == 0)", RACE),
    "barrier of the warp behind the wait": (
        "    pc_wait_copies<1>();\n    pc_sync_warp();\n",
        "    pc_wait_copies<1>();\n",
        "races|in flight",
    ),
    "barrier of the warp before a stage is filled again": (
        "    pc_sync_warp();  // before the stage is filled again\n",
        "",
        r"races: it writes what thread \d+ reads|in flight",
    ),
    "wait that leaves a group too many": ("pc_wait_copies<1>", "pc_wait_copies<2>", "has in flight"),
    "wait at the end": ("  pc_wait_copies<0>();\n", "", "has in flight|with . copies in flight|writes what the copy"),
    "commit": ("  pc_commit_copies();\n", "", "has in flight"),
    "read behind the last tile": ("tile < num_tiles", "tile <= num_tiles", "copies 16 bytes at .* behind the end"),
    "one stage": ("kStages = 2", "kStages = 1", "in flight"),
    "stages of another warp": ("pc_shared_buffer() + warp *", "pc_shared_buffer() + warp / 2 *", "races|in flight"),
    "read past the shared buffer": ("w * 256 + i", "w * 256 + i * 17", "of the shared buffer, which has 16384 bytes"),
    "collective under divergence": (
        "      pc_uint32 b[4];\n",
        "      pc_uint32 b[4];\n      if (lane < 7) continue;\n",
        "is reached by a part of the warp",
    ),
    "barrier under divergence": (
        "  pc_sync_block();\n  if (warp == 0) {",
        "  if (warp == 0) {\n  pc_sync_block();",
        "pc_sync_block is reached by",
    ),
    "index outside a local array": ("b[2], b[3]", "b[2], b[k + 1]", "an index lies outside a local array"),
    "misaligned copy": ("chunk * 8;", "chunk * 8 + 1;", "which is no multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "message"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught_in_any_order(tmp_path, before, after, message):
    sources = mutated(tmp_path, "ring.cu", before, after)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message):
            run_ring(EmulatedRuntime(sources, tmp_path, seed=seed))


WRONG = {
    "swizzle on one side": ("stage + chunk_at(row, chunk)", "stage + row * kRowBytes + chunk * 16"),
    "matrices in another order": ("lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2", "lane % 16, k * 2 + lane / 16"),
    "sums of a warp left out": ("w < kWarps; ++w", "w < kWarps - 1; ++w"),
    "rows past the first eight": ("lane % 4 * 2 + i % 2, c[j][i]", "lane % 4 * 2 + i % 2, c[j][i % 2]"),
}


@pytest.mark.parametrize(("before", "after"), WRONG.values(), ids=WRONG)
def test_a_fault_of_arithmetic_gives_wrong_numbers(tmp_path, before, after):
    got, expected = run_ring(EmulatedRuntime(mutated(tmp_path, "ring.cu", before, after), tmp_path))
    assert not np.array_equal(got, expected)
