"""Order of the calls of a scheduler, and the arguments of `accept`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagecore.errors import InvalidSequence, ShapeError, UnsupportedDtype
from pagecore.serving.checks import as_array
from pagecore.serving.scheduling.step import Step, StepState
from pagecore.storage.checks import shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["read_flags", "require_room", "require_step"]


def require_room(steps: tuple[Step, ...], *, overlap: bool) -> None:
    """Raise InvalidSequence unless a step may be scheduled while `steps` are open."""
    state = steps[-1].state
    if len(steps) > 1:
        raise InvalidSequence("two steps are open; accept the ids of the older one, then schedule the next step")
    if not overlap:
        raise InvalidSequence(
            f"the last step is {state.value} and not accepted; "
            "accept its ids, or abandon it before its commit, then schedule the next step"
        )
    if state is not StepState.COMMITTED:
        raise InvalidSequence(
            f"the last step is {state.value} and not committed; commit or abandon it, then schedule the next step"
        )


def require_step(steps: tuple[Step, ...], step: Step, state: StepState, verb: str) -> None:
    """Raise InvalidSequence unless `step` is open and in `state`; the verb "accept" requires the oldest open step."""
    if not isinstance(step, Step):
        raise InvalidSequence(f"expected a Step (as returned by schedule), got {shown(step)}")
    if step not in steps:
        is_over = step.state in (StepState.ACCEPTED, StepState.ABANDONED)
        reason = f"was already {step.state.value}" if is_over else "belongs to another scheduler"
        raise InvalidSequence(f"cannot {verb} a step that {reason}; {verb} each step returned by schedule once")
    if step.state is not state:
        remedy = "commit it first" if state is StepState.COMMITTED else "accept the ids of its outputs"
        raise InvalidSequence(f"cannot {verb} a step that is {step.state.value}; {remedy}")
    if verb == "accept" and step is not steps[0]:
        raise InvalidSequence("cannot accept a step before the older one; accept steps in their order")


def read_flags(given: ArrayLike, count: int) -> NDArray[np.bool_]:
    """Return `finished` of `accept` as booleans, one for each of `count` outputs."""
    flags = as_array("finished", given, "a 1-D array of booleans")
    if flags.shape != (count,):
        raise ShapeError(f"finished has shape {flags.shape}; expected one flag for each of {count} outputs")
    if flags.size and flags.dtype != np.bool_:
        raise UnsupportedDtype(f"finished has dtype {flags.dtype}; expected booleans")
    return flags.astype(np.bool_, copy=False)
