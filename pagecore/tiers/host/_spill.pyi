from collections.abc import Callable
from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._state import CacheState
from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.tiers.host._backup import Backup
from pagecore.tiers.host._index import HostIndex

class SpilledPart:
    options: None
    num_receipts: int
    @property
    def pairs(self) -> list[NDArray[np.int32]]: ...
    def drop(self) -> None: ...
    def finish(self) -> None: ...
    def give_up(self) -> None: ...

class SpilledTail:
    @property
    def num_leases(self) -> int: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def num_device_tokens(self) -> int: ...

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
def drop_waiting(state: CacheState, host: HostIndex) -> None: ...
