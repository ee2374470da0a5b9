"""Faults planted in the kernels of sparse selection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pagecore import ops
from pagecore.arrays.cuda.current import use_runtime
from tests.cuda import test_sparse
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime

pytestmark = pytest.mark.slow

RACE = "races|uninitialised"
NAMES = {
    "summary": ["after_votes", "before_counts", "after_counts", "after_tokens"],
    "score": ["before_rows", "after_rows"],
    "select": [
        "after_clearing",
        "before_bins",
        "after_digit",
        "before_holding",
        "after_holding",
        "before_counts",
        "after_counts",
        "before_sorting",
        "in_sorting",
    ],
}
FAULTS = {f"{kernel} {name}": Fault(f"{kernel}_barrier_{name}", "", RACE) for kernel in NAMES for name in NAMES[kernel]}


def summaries(kit: Kit) -> None:
    test_sparse.test_long_and_scattered_blocks_have_exact_bounds(kit)


def scores(kit: Kit) -> None:
    test_sparse.test_any_number_of_query_heads_shares_a_key_head(kit, (40, 2))


def selections(kit: Kit) -> None:
    """Rows that are held, rows of which a digit is held, and a row after another."""
    for kind in ("normal", "few values"):
        rows = test_sparse.some_scores(kind, (3, 9000))
        scores, lens = kit.put(rows), kit.put(np.array([9000, 300, 8500], np.int32))
        ops.select(scores, 40, lens=lens, sinks=1)
        got = ops.select_topk(scores, 40, lens)
        np.testing.assert_array_equal(kit.get(got), ops.select_topk(rows, 40, [9000, 300, 8500]))


WORK: dict[str, Callable[[Kit], None]] = {"summary": summaries, "score": scores, "select": selections}


def run(kernel: str, *where: Path) -> None:
    run_on(EmulatedRuntime(*where), kernel)


def run_on(runtime: EmulatedRuntime, kernel: str) -> None:
    launch = runtime.launch
    with use_runtime(runtime):
        if kernel == "select":  # a grid of one block, so that it has several rows
            runtime.launch = one_block(runtime.launch)  # type: ignore[method-assign]
        WORK[kernel](Kit(runtime))
        runtime.finish()
    runtime.launch = launch  # type: ignore[method-assign]


def one_block(launch: Callable[..., None]) -> Callable[..., None]:
    def launch_one(kernel: object, grid: tuple[int, int, int], *arguments: object) -> None:
        launch(kernel, (1, *grid[1:]), *arguments)

    return launch_one


@pytest.mark.parametrize("kernel", WORK)
def test_sparse_kernels_are_right_without_a_fault(kernel):
    run(kernel)


@pytest.mark.parametrize("name", cases(list(FAULTS)[::3], list(FAULTS)))
def test_a_fault_planted_in_a_sparse_kernel_is_caught(planting, name):
    fault = FAULTS[name]
    # EmulatorError is an AssertionError.
    with (
        planting.planted(SOURCES, fault, FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run(name.split()[0], sources)
