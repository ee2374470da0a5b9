"""Native allocations that fail at points of each call: it raises MemoryError and changes nothing, or is done."""

import pytest

from tests.failing_calls import run_cases

pytestmark = pytest.mark.slow


def test_a_failed_native_allocation_leaves_a_stack_as_it_was(tmp_path):
    outcome = run_cases(tmp_path, "tests.serving.whatif.failing_calls", 9)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert all(outcome.points.values()), outcome.points
