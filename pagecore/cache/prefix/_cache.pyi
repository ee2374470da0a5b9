from collections.abc import Callable

from pagecore.cache.prefix._watched import WatchedPool
from pagecore.cache.sequences._sequence import Sequence
from pagecore.index import BlockTables, RadixTree, StateTable
from pagecore.storage.specs.attended import AttendedKeys

class PrefixCache:
    @property
    def policy(self) -> str: ...
    @property
    def now(self) -> float: ...
    @property
    def transfers(self) -> set[object]: ...
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
        states: StateTable | None = None,
    ) -> None: ...
    @property
    def num_evicted_states(self) -> int: ...
    @property
    def is_watched(self) -> bool: ...
    def watch(self, watched: list[WatchedPool] | None) -> None: ...
