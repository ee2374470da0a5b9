from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState
from pagecore.cache.step._record import StepRecord
from pagecore.ops import AttentionPlan
from pagecore.ops.moves._slot_moves import SlotMoves

_Copy = Callable[[tuple[NDArray[np.int32], ...], list[NDArray[np.int32]]], None]

class Step(StepRecord):
    def load(self, sequences: list[Sequence], counts: ArrayLike, is_arrival: bool = False) -> None: ...
    def take(self, plans: list[AttentionPlan], copy: _Copy) -> bool: ...
    def require_computed_here(self) -> None: ...
    def run(self, call: Callable[..., Any], *args: Any) -> Any: ...
    def is_used_elsewhere(self) -> bool: ...
    def commit(
        self,
        accepted: ArrayLike | None = None,
        accepted_path: Listed[ArrayLike | None] | None = None,
        moves: Callable[[], list[SlotMoves]] | None = None,
        save: Callable[[], None] | None = None,
    ) -> None: ...
    def abandon(self) -> None: ...
    def give_up(self) -> None: ...

class BatchTicket:
    def __init__(self, step: Step) -> None: ...

_B = TypeVar("_B")
_Load = tuple[list[Sequence], ArrayLike, bool] | None
_Ready = Callable[[], tuple[_B, Step, _Load, list[AttentionPlan], _Copy] | None]

@overload
def take_step(state: CacheState, ready: _Ready[_B], refusal: Callable[[], Exception]) -> _B: ...
@overload
def take_step(state: CacheState, ready: _Ready[_B], refusal: None) -> _B | None: ...
def abandon_steps(state: CacheState, sequences: Any) -> None: ...
