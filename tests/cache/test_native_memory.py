"""Native allocations that fail in static caches and in conversions between formats: done, or nothing has changed."""

import pytest

from tests.failing_calls import run_cases

pytestmark = pytest.mark.slow

ALLOCATE_NOTHING = {"static: reset"}


def test_a_failed_native_allocation_leaves_static_caches_and_formats_as_they_were(tmp_path):
    outcome = run_cases(tmp_path, "tests.cache.failing_calls", 4)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert {name for name, count in outcome.points.items() if count == 0} <= ALLOCATE_NOTHING
