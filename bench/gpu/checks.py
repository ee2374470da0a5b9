"""Checks of what a job of a GPU bench wrote."""

from __future__ import annotations

import math
from typing import Any

from bench.harness.runner import Job

TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def run_over_nan(subject: Job, outs: Any) -> None:
    """Run a job whose outputs are NaN before it, and require finite numbers after it."""
    outs.fill_(math.nan)
    subject.run()
    assert outs.isfinite().all(), "a row was not written"


def relative_error(got: Any, expected: Any) -> float:
    """Return the relative error of an array by the Frobenius norm."""
    return float((got - expected).norm() / expected.norm())


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Fail if the relative error of a row exceeds the tolerance."""
    error = relative_error(got, expected)
    assert error <= tolerance, f"a row is off by {error:.1e}, more than {tolerance:.0e}"
