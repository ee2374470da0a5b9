from collections.abc import Hashable, Iterable

from numpy.typing import ArrayLike

from pagecore.index.radix._radix_core import Receipt
from pagecore.index.radix._radix_journal import RadixJournal
from pagecore.index.radix._radix_values import Evicted

class RadixTree(RadixJournal):
    def evict(self, component: str, amount: int, *, time: float | None = None) -> Evicted: ...
    def evict_path(
        self,
        tokens: ArrayLike,
        *,
        keep: int = 0,
        namespace: Hashable = None,
        spans: Iterable[tuple[int, int, bytes | int]] | None = None,
    ) -> Evicted: ...
    def revoke(
        self,
        tokens: ArrayLike,
        *,
        valid: int = 0,
        receipts: Iterable[Receipt] = (),
        namespace: Hashable = None,
        spans: Iterable[tuple[int, int, bytes | int]] | None = None,
    ) -> Evicted: ...
    def evict_namespace(self, namespace: Hashable) -> Evicted: ...
