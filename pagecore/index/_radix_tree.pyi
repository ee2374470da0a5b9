from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.index._radix_values import Evicted, Inserted, Match

_Spans = Iterable[tuple[int, int, bytes | int]]

POLICIES: tuple[str, ...]

class Receipt:
    tree: RadixTree
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

class RadixTree:
    block_size: int
    components: tuple[str, ...]
    windows: tuple[int, ...]
    policy: str
    state_interval: int | None
    def __new__(
        cls,
        block_size: int = 16,
        *,
        full: int = 1,
        windows: Iterable[int] | int = (),
        states: bool = False,
        state_interval: int | None = None,
        policy: str = "lru",
    ) -> Self: ...
    def match(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: _Spans | None = None,
        max_tokens: int | None = None,
    ) -> Match: ...
    def match_and_lock(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: _Spans | None = None,
        max_tokens: int | None = None,
        time: float | None = None,
    ) -> Receipt: ...
    def release(
        self,
        receipt: Receipt,
        component: str | None = None,
        *,
        time: float | None = None,
        rank: float | None = None,
    ) -> None: ...
    def insert(
        self,
        tokens: ArrayLike,
        blocks: ArrayLike | Sequence[ArrayLike],
        *,
        states: Iterable[tuple[int, int]] | None = None,
        namespace: Hashable = None,
        spans: _Spans | None = None,
        receipt: Receipt | None = None,
        time: float | None = None,
        priority: float | None = None,
        time_to_live: float | None = None,
        rank: float | None = None,
    ) -> Inserted: ...
    def extend(
        self,
        tokens: ArrayLike,
        blocks: ArrayLike | Sequence[ArrayLike],
        receipt: Receipt,
        *,
        time: float | None = None,
    ) -> Inserted: ...
    def block_at(self, receipt: Receipt, index: int, lane: int = 0) -> int: ...
    def replace(self, receipt: Receipt, index: int, block: int, lane: int = 0) -> int: ...
    def evict(self, component: str, amount: int, *, time: float | None = None) -> Evicted: ...
    def held_blocks(self, lane: int = 0) -> NDArray[np.int32]: ...
    def held_states(self) -> NDArray[np.int32]: ...
    def evictable(self, component: str = "full") -> int: ...
    def protected(self, component: str = "full") -> int: ...
    def match_all(
        self,
        prefixes: Iterable[ArrayLike],
        *,
        namespaces: Iterable[Hashable] | None = None,
        spans: Iterable[_Spans | None] | None = None,
        max_tokens: Iterable[int | None] | None = None,
    ) -> list[Match]: ...
    def match_and_lock_all(
        self,
        prefixes: Iterable[ArrayLike],
        *,
        namespaces: Iterable[Hashable] | None = None,
        spans: Iterable[_Spans | None] | None = None,
        max_tokens: Iterable[int | None] | None = None,
        time: float | None = None,
    ) -> list[Receipt]: ...
    def release_all(self, receipts: Iterable[Receipt], *, time: float | None = None) -> None: ...
    def insert_all(self, entries: Iterable[Mapping[str, Any]], *, time: float | None = None) -> list[Inserted]: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def num_receipts(self) -> int: ...
    @property
    def num_namespaces(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def check_invariants(self) -> None: ...
