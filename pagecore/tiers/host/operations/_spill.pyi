from collections.abc import Callable, Hashable
from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.state._state import CacheState
from pagecore.tiers.host.operations._backup import Backup
from pagecore.tiers.host.operations._index import HostIndex
from pagecore.tiers.host.operations._tail import SpilledPart

def save_victims(
    state: CacheState,
    host: HostIndex,
    missing: Listed[int],
    copy: Callable[[Backup | SpilledPart], bool],
    done: Callable[[Backup], None],
) -> int: ...
def publish_waiting(
    state: CacheState, host: HostIndex, copy: Callable[[Backup | SpilledPart], bool], done: Callable[[Backup], None]
) -> None: ...
def publish_for(
    state: CacheState,
    host: HostIndex,
    ids: NDArray[np.int32],
    options: RetentionOptions,
    copy: Callable[[Backup | SpilledPart], bool],
    done: Callable[[Backup], None],
) -> None: ...
def evict_waiting(
    state: CacheState, host: HostIndex, ids: NDArray[np.int32], options: RetentionOptions, keep: int
) -> None: ...
def drop_waiting_of(state: CacheState, host: HostIndex, namespace: Hashable) -> None: ...
def drop_waiting(state: CacheState, host: HostIndex) -> None: ...
