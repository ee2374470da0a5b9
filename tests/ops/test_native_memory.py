"""Native allocations that fail at points of each call: it raises MemoryError and changes nothing, or is done."""

import pytest

from tests.failing_calls import run_cases

pytestmark = pytest.mark.slow


def test_a_failed_native_allocation_leaves_operators_and_their_arguments_as_they_were(tmp_path):
    outcome = run_cases(tmp_path, "tests.ops.failing_calls", 4)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert all(outcome.points.values()), outcome.points
