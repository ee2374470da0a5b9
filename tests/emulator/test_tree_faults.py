"""Faults planted in the masks of trees: the tests of trees on a device must catch them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.attention_cases import BF16, check
from tests.cuda.kit import Kit
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.cases import Shape
from tests.ops.trees import tree_case

FAULTS = {
    "a window counts no ancestor": Fault("tree_window", "", "is off by|not finite"),
    "the history in a tile of the tree is left out": Fault(
        "tree_history", "if (from < 0) return load_tree_word(p, token, 0) << -from;", "is off by|not finite"
    ),
}


def run(*where: Path) -> None:
    for shape in (Shape((40, 30), (9, 3), heads=(4, 2), **BF16), Shape((40,), (20,), heads=(8, 2), **BF16)):
        runtime = EmulatedRuntime(*where)
        with use_runtime(runtime):
            check(Kit(runtime), tree_case(shape, window=4))


def test_the_kernels_are_right_without_a_fault():
    run()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(planting, fault):
    with (
        planting.planted(SOURCES, fault, FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),
    ):
        run(sources)
