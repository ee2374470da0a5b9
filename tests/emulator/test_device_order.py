"""The order of accesses to device memory: a join by the last block, and faults planted in it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator.probing import KERNELS, mutated, probe
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

BLOCKS = 5
SEEDS = range(5)


def join(runtime):
    kit = Kit(runtime)
    values = np.random.default_rng(1).integers(0, 1000, (BLOCKS, 64), dtype=np.int32)
    out, extra = kit.empty(64, np.int32), kit.put(np.zeros(BLOCKS * 64 + 1, np.int32))
    given = kit.put(values)
    for _ in range(2):  # the counter is 0 again
        probe(
            runtime, "tickets", input=given, output=out, extra=extra, grid=(BLOCKS, 1, 1), threads=64, shared_bytes=16
        )
    return kit.get(out), values.sum(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_block_joins_in_any_order(seed):
    got, expected = join(EmulatedRuntime(KERNELS, seed=seed))
    np.testing.assert_array_equal(got, expected)


OTHER_BLOCK = (
    r"races: it reads at 0x[0-9a-f]+ what block \([0-4], 0, 0\), thread \d+, writes \(line \d+\), without a fence"
)
FAULTS = {
    "fence before the ticket": ("    pc_fence_device();  // for the others\n", "", OTHER_BLOCK),
    "fence behind the ticket": ("    pc_fence_device();  // of the others\n", "", OTHER_BLOCK),
    "barrier before the ticket": ("  pc_sync_block();  // the block has written\n", "", OTHER_BLOCK),
    "barrier behind the ticket": ("  pc_sync_block();  // the flag is there\n", "", "races|nobody has written"),
    "parts of one block in another's place": (
        "parts.store(pc_block_x() * 64",
        "parts.store(pc_block_x() / 2 * 64",
        r"races: it overwrites at 0x[0-9a-f]+ what block",
    ),
    "one thread's part in another's place": (
        "* 64 + 63 - t, Global",
        "* 64 + 63 - t / 2, Global",
        r"races: it overwrites at 0x[0-9a-f]+ what thread \d+ writes",
    ),
    "no barrier between threads of a block": (
        "  pc_sync_block();  // the block has written\n",
        "  parts.load(pc_block_x() * 64 + t);\n  pc_sync_block();\n",
        r"races: it reads at 0x[0-9a-f]+ what thread \d+ writes",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), FAULTS.values(), ids=FAULTS)
def test_a_missing_link_is_named_in_any_order(tmp_path, before, after, message):
    sources = mutated(tmp_path, "tickets.cu", before, after)
    for seed in SEEDS:
        with pytest.raises(EmulatorError, match=message):
            join(EmulatedRuntime(sources, tmp_path, seed=seed))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("parts.store(pc_block_x() * 64", "parts.store(pc_block_x() / 2 * 64"),
        ("* 64 + 63 - t, Global", "* 64 + 63 - t / 2, Global"),
    ],
    ids=["blocks", "threads"],
)
def test_a_place_may_be_written_twice_where_the_test_says_so(tmp_path, before, after):
    (tmp_path / "first").mkdir()
    sources = mutated(tmp_path / "first", "tickets.cu", before, after)
    sources = mutated(tmp_path, "tickets.cu", "if (flag.load(0) == 0) return;", "return;", sources)
    runtime = EmulatedRuntime(sources, tmp_path)
    runtime.may_overwrite = True
    join(runtime)
