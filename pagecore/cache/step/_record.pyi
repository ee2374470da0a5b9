import numpy as np
from numpy.typing import NDArray

from pagecore.cache.staging.staged import StagedPart
from pagecore.cache.state._state import CacheState
from pagecore.cache.step._cross import CrossStep
from pagecore.cache.step._draft_ids import DraftIds
from pagecore.cache.step._plan import StepPlan
from pagecore.cache.step._tree import StepTree
from pagecore.index import StateBuffers, StepBuffers

class StepRecord:
    staged: StagedPart | None
    cross: CrossStep | None
    def __init__(self, state: CacheState, buffers: StepBuffers, plan: StepPlan | None = None) -> None: ...
    @property
    def buffers(self) -> StepBuffers: ...
    @property
    def states(self) -> StateBuffers | None: ...
    @property
    def state(self) -> CacheState: ...
    @property
    def in_flight(self) -> bool: ...
    @property
    def is_lost(self) -> bool: ...
    offered: StepTree | None
    offered_ids: DraftIds | None
    @property
    def has_tree(self) -> bool: ...
    def moved_slots(self) -> tuple[NDArray[np.int64], ...]: ...
    def copied(self) -> tuple[NDArray[np.int32], ...]: ...
