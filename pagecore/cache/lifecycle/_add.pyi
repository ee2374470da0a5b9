from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

NO_IDS: NDArray[np.int32]

class Prefix: ...

def add(
    state: CacheState,
    name: object,
    ids: NDArray[np.int32],
    options: RetentionOptions,
    most: int,
    cross: tuple[int, Hashable] | None = None,
) -> Sequence: ...
def fork(state: CacheState, parent: Sequence, name: object) -> Sequence: ...
