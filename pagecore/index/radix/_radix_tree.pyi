from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from pagecore.index.radix._radix_core import RadixCore, Receipt
from pagecore.index.radix._radix_values import Evicted, Inserted, Match

_Spans = Iterable[tuple[int, int, bytes | int]]

class RadixTree(RadixCore):
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
    def evict_path(
        self,
        tokens: ArrayLike,
        *,
        keep: int = 0,
        namespace: Hashable = None,
        spans: _Spans | None = None,
    ) -> Evicted: ...
    def evict_namespace(self, namespace: Hashable) -> Evicted: ...
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
