from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.index.radix.changes import Change

class Interned: ...
class Prefix: ...
class Insertion: ...

def validate_namespace(namespace: Hashable) -> None: ...
def validate_spans(spans: Iterable[tuple[int, int, bytes | int]]) -> tuple[tuple[int, int, bytes | int], ...]: ...

_Lanes = NDArray[np.int32] | tuple[NDArray[np.int32], ...]

class Match:
    num_tokens: int
    num_full_tokens: int
    checkpoint: int | None
    state: int | None
    blocks: _Lanes
    num_shared_tokens: int
    shared_blocks: _Lanes

class Inserted:
    num_tokens: int
    num_old_tokens: int
    @property
    def taken(self) -> _Lanes: ...
    @property
    def duplicates(self) -> _Lanes: ...
    @property
    def taken_states(self) -> NDArray[np.int32]: ...
    @property
    def duplicate_states(self) -> NDArray[np.int32]: ...

class Evicted:
    amount: int
    @property
    def blocks(self) -> _Lanes: ...
    @property
    def states(self) -> NDArray[np.int32]: ...

POLICIES: tuple[str, ...]
PROTECTED_SHARE: float

def check_policy(policy: object, name: str = "policy", known: tuple[str, ...] = ...) -> str: ...

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
    min_kept: int
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
        min_kept: int = 0,
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

class ChangeLog:
    @property
    def has_overflowed(self) -> bool: ...
    def __len__(self) -> int: ...
    def to_list(self) -> list[Change]: ...

class RadixJournal(RadixInsertion):
    @property
    def has_journal(self) -> bool: ...
    def start_journal(self, *, max_bytes: int = 67108864) -> None: ...
    def stop_journal(self) -> None: ...
    def take_changes(self) -> ChangeLog: ...
    def list_contents(self) -> ChangeLog: ...

def chain_hashes(
    tokens: ArrayLike,
    block_size: int,
    *,
    namespace: Hashable = None,
    spans: Iterable[tuple[int, int, bytes | int]] | None = None,
) -> NDArray[np.uint64]: ...

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
