from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

def missing_cross(state: CacheState, sequences: list[Sequence], counts: list[int]) -> list[int]: ...
def stored_content_blocks(state: CacheState, space: Any) -> list[tuple[NDArray[np.int32], ...]]: ...
