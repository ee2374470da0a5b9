from collections.abc import Iterable

from numpy.typing import ArrayLike

from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState

class StepPlan:
    @property
    def state(self) -> CacheState: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_arrival(self) -> bool: ...
    def has_room(self) -> bool: ...
    def num_cross_tokens(self) -> int: ...

def plan_step(
    state: CacheState, sequences: list[Sequence], counts: ArrayLike, is_arrival: bool = False
) -> StepPlan: ...
def lacked(
    state: CacheState, sequences: list[Sequence], counts: ArrayLike, limits: list[int | None] | None = None
) -> list[int]: ...
def shortage(
    state: CacheState,
    sequences: Sequence | Iterable[Sequence],
    counts: ArrayLike,
    limits: list[int | None] | None = None,
) -> list[int]: ...
