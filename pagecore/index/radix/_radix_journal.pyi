from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.index.radix.changes import Change

class ChangeLog:
    @property
    def has_overflowed(self) -> bool: ...
    def __len__(self) -> int: ...
    def to_list(self) -> list[Change]: ...

def chain_hashes(
    tokens: ArrayLike,
    block_size: int,
    *,
    namespace: Hashable = None,
    spans: Iterable[tuple[int, int, bytes | int]] | None = None,
) -> NDArray[np.uint64]: ...
