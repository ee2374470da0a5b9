from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState
from pagecore.cache.prefix.retention import RetentionOptions

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
