from collections.abc import Hashable, Iterable

from numpy.typing import ArrayLike

from pagecore.index.radix._radix_core import RadixCore, Receipt
from pagecore.index.radix._radix_values import Match

_Spans = Iterable[tuple[int, int, bytes | int]]

class RadixLookup(RadixCore):
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
