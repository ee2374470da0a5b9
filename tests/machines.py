"""State machines of Hypothesis whose examples are all drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.stateful import RuleBasedStateMachine


def drawn(machine: type[RuleBasedStateMachine]) -> Any:
    """Return the test case of a machine, without mutations of earlier examples.

    Hypothesis follows each example by up to five copies of it in which a value occurs several times. The machines draw
    from few values, which repeat anyway: with half of the examples and no copies, most machines reach more lines of
    twins and caches. If a version of Hypothesis has no such method, its examples stay as they are.
    """

    class Drawn(machine.TestCase):  # type: ignore[misc,name-defined]
        def runTest(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ConjectureRunner, "generate_mutations_from", lambda *_: None, raising=False)
                super().runTest()

        runTest.is_hypothesis_test = True  # type: ignore[attr-defined]

    return Drawn
