import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._cross_contents import CrossContents
from pagecore.cache.staging.staged import StagedPart
from pagecore.index import StepBuffers
from pagecore.ops import AttentionPlan

class CrossStep:
    staged: StagedPart | None
    plans: list[AttentionPlan]
    def __init__(self, contents: CrossContents, buffers: StepBuffers, plans: list[AttentionPlan]) -> None: ...
    @property
    def contents(self) -> CrossContents: ...
    @property
    def buffers(self) -> StepBuffers: ...
    def taken_pairs(self) -> list[NDArray[np.int32]]: ...
