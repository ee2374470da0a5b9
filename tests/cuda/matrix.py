"""Choice of cases: a few that reach each path once, or all of them with ``PAGECORE_EMULATE=full``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("PAGECORE_EMULATE", "") == "full"


def cases(few: Sequence[T], every: Sequence[T]) -> Sequence[T]:
    """Return the cases of this test session."""
    return every if FULL else few
