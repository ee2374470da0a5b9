from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from pagecore.index.radix._radix_core import Receipt
from pagecore.index.radix._radix_lookup import RadixLookup
from pagecore.index.radix._radix_values import Inserted

_Spans = Iterable[tuple[int, int, bytes | int]]

class RadixInsertion(RadixLookup):
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
    def insert_all(self, entries: Iterable[Mapping[str, Any]], *, time: float | None = None) -> list[Inserted]: ...
    def block_at(self, receipt: Receipt, index: int, lane: int = 0) -> int: ...
    def replace(self, receipt: Receipt, index: int, block: int, lane: int = 0) -> int: ...
