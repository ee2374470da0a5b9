from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.state._state import CacheState
from pagecore.tiers.host.operations._index import HostIndex
from pagecore.tiers.host.operations._lease import EntryHold

def promote(
    state: CacheState,
    host: HostIndex,
    ids: NDArray[np.int32],
    options: RetentionOptions,
    most: int,
    min_tokens: int,
    copy: Callable[[list[NDArray[np.int32]], EntryHold], bool],
    spill: Callable[[list[int]], object] | None = None,
) -> tuple[int, int, list[int]]: ...
def match_both(
    state: CacheState, host: HostIndex, ids: NDArray[np.int32], options: RetentionOptions, most: int
) -> tuple[int, int]: ...
