from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagecore.index.radix._radix_values import Match

class Receipt:
    tree: RadixCore
    match: Match
    @property
    def num_tokens(self) -> int: ...
    @property
    def components(self) -> tuple[str, ...]: ...
    def release(
        self, component: str | None = None, *, time: float | None = None, rank: float | None = None
    ) -> None: ...
    def fork(self) -> Receipt: ...
    def __enter__(self) -> Receipt: ...
    def __exit__(self, *_: object) -> None: ...

class RadixCore:
    block_size: int
    components: tuple[str, ...]
    windows: tuple[int, ...]
    chunks: tuple[int, ...]
    sinks: tuple[int, ...]
    policy: str
    state_interval: int | None
    def __new__(
        cls,
        block_size: int = 16,
        *,
        full: int = 1,
        windows: Iterable[int] | int = (),
        chunks: Iterable[int | None] | int = (),
        sinks: Iterable[int | None] | int = (),
        states: bool = False,
        state_interval: int | None = None,
        policy: str = "lru",
    ) -> Self: ...
    def held_blocks(self, lane: int = 0) -> NDArray[np.int32]: ...
    def held_states(self) -> NDArray[np.int32]: ...
    def evictable(self, component: str = "full") -> int: ...
    def protected(self, component: str = "full") -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_receipts(self) -> int: ...
    @property
    def num_namespaces(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def check_invariants(self) -> None: ...
