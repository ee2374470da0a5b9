"""Native allocations that fail at points of each call: it raises MemoryError and changes nothing, or is done."""

import sys

import pytest

from tests.failing_calls import run_cases
from tests.index.failing_calls import OPTIONS

pytestmark = pytest.mark.slow

# Cases that allocate nothing.
TREE_CALLS = ("fork", "release", "release of the last of a namespace")
WITHOUT_ALLOCATIONS = {"journal: stop_journal"} | {
    f"tree with {name}: {call}" for name in OPTIONS for call in TREE_CALLS
}


def test_a_failed_native_allocation_leaves_the_index_as_it_was(tmp_path):
    outcome = run_cases(tmp_path, "tests.index.failing_calls", 4)
    assert not outcome.problems, "\n".join(outcome.problems)
    if sys.version_info < (3, 12):  # later interpreters allocate less
        assert {name for name, points in outcome.points.items() if points == 0} <= WITHOUT_ALLOCATIONS
