"""Thinner products of parameters, or whole ones with ``PAGECORE_EMULATE=full``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any


def in_turn(*axes: Iterable[Any], over: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return the product of `axes`, each with one of the combinations of `over` in turn.

    The combination follows from the sum of the positions on the axes, as in a Latin square. Every value of an axis
    therefore meets every combination if the other axes are long enough.
    """
    combinations = list(itertools.product(*over))
    cells = itertools.product(*(list(enumerate(axis)) for axis in axes))
    if os.environ.get("PAGECORE_EMULATE", "") == "full":
        return [(*(value for _, value in cell), *each) for cell in cells for each in combinations]
    picked = ((cell, combinations[sum(at for at, _ in cell) % len(combinations)]) for cell in cells)
    return [(*(value for _, value in cell), *each) for cell, each in picked]


def interleaved(one: Iterable[Any], other: Iterable[Any], every: int = 2, first: int = 0) -> list[tuple[Any, Any]]:
    """Return one in `every` pairs of two axes; each value of an axis meets one in `every` of the other axis.

    `first` selects the pairs: those of 0 to ``every - 1`` are together all pairs.
    """
    step = 1 if os.environ.get("PAGECORE_EMULATE", "") == "full" else every
    cells = itertools.product(enumerate(one), enumerate(other))
    return [(a, b) for (i, a), (j, b) in cells if (i + j) % step == first % step]
