"""Checks of the order of accesses to device memory: a join by the last block, and faults planted in it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.kit import Kit
from tests.emulator.faults import Fault, plant
from tests.emulator.probing import KERNELS, probe
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
OTHER_BLOCKS_PART = Fault(
    "target_of_part",
    "const int block = pc_block_x() / 2, at = 63 - t;",
    r"races: it overwrites at 0x[0-9a-f]+ what block",
)
OTHER_THREADS_PART = Fault(
    "target_of_part",
    "const int block = pc_block_x(), at = 63 - t / 2;",
    r"races: it overwrites at 0x[0-9a-f]+ what thread \d+ writes",
)
FAULTS = {
    "no fence before the ticket": Fault("fence_before_ticket", "", OTHER_BLOCK),
    "no fence after the ticket": Fault("fence_after_ticket", "", OTHER_BLOCK),
    "no barrier before the ticket": Fault("barrier_before_ticket", "", OTHER_BLOCK),
    "no barrier after the ticket": Fault("barrier_after_ticket", "", "races|uninitialised"),
    "a block overwrites the part of another": OTHER_BLOCKS_PART,
    "a thread overwrites the number of another": OTHER_THREADS_PART,
    "no barrier between threads of a block": Fault(
        "barrier_before_ticket",
        "parts.load(pc_block_x() * 64 + t); pc_sync_block();",
        r"races: it (reads|overwrites) at 0x[0-9a-f]+ what thread \d+ (writes|reads)",
    ),
    "a block overwrites what others read": Fault(
        "barrier_before_ticket",
        "const Global<int> out(params.out); if (t == 0) { if (pc_block_x() < 4) out.load(7); else out.store(7, 1); } "
        "pc_sync_block();",
        r"races: it (reads|overwrites) at 0x[0-9a-f]+ what block \([0-4], 0, 0\), thread 0, (writes|reads)",
    ),
}
NO_JOIN = Fault("join", "return;")
ONCE = {
    "after a write": Fault(
        "barrier_before_ticket",
        "pc_sync_block(); if (t == 0) parts.load_vector_once(pc_block_x() * 64);",
        r"races: it reads once at 0x[0-9a-f]+ what thread \d+ writes",
    ),
    "before a write": Fault(
        "target_of_part",
        "const int block = pc_block_x(), at = 63 - t; if (t == 1) parts.store(block * 64, 7); pc_sync_block(); "
        "if (t == 2) parts.load_vector_once(block * 64 + 4); pc_sync_block();",
        r"races: it overwrites at 0x[0-9a-f]+ what thread 2 reads once",
    ),
}


@pytest.mark.parametrize("fault", (FAULTS | ONCE).values(), ids=FAULTS | ONCE)
def test_a_race_is_named_in_any_order(planting, fault):
    with planting.planted(KERNELS, fault, (FAULTS | ONCE).values()) as sources:
        for seed in SEEDS:
            with pytest.raises(EmulatorError, match=fault.message):
                join(EmulatedRuntime(sources, seed=seed))


@pytest.mark.parametrize("fault", [OTHER_BLOCKS_PART, OTHER_THREADS_PART], ids=["blocks", "threads"])
def test_an_element_may_be_written_twice_if_the_test_allows_it(tmp_path, fault):
    runtime = EmulatedRuntime(plant(tmp_path, KERNELS, fault, NO_JOIN), tmp_path)
    runtime.may_overwrite = True
    join(runtime)
