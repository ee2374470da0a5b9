"""Native allocations that fail at points of each call: it raises MemoryError and changes nothing, or is done."""

import sys

import pytest

from tests.failing_calls import run_cases

pytestmark = pytest.mark.slow


def test_a_failed_native_allocation_leaves_tiers_consistent(tmp_path):
    outcome = run_cases(tmp_path, "tests.tiers.failing_calls", 1)
    assert not outcome.problems, "\n".join(outcome.problems)
    if sys.version_info < (3, 12):  # later interpreters allocate less
        assert all(outcome.points.values()), outcome.points
