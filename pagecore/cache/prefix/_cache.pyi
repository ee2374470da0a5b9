from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from pagecore.cache._sequence import Sequence
from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.index import BlockTables, RadixTree
from pagecore.storage.attended import AttendedKeys

class PrefixCache:
    @property
    def policy(self) -> str: ...
    @property
    def now(self) -> float: ...
    @property
    def num_evicted_blocks(self) -> int: ...
    @property
    def tree(self) -> RadixTree: ...
    def __init__(
        self,
        attended: list[AttendedKeys],
        tables: BlockTables,
        by_row: list[Sequence | None],
        policy: str,
        clock: Callable[[], float],
        gives_up_last: bool = False,
    ) -> None: ...
    def figures(self) -> dict[str, int]: ...
    def cached(self, group: int) -> NDArray[np.int32]: ...
    def match_length(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> int: ...
    def check_invariants(self, sequences: Iterable[Sequence]) -> None: ...
