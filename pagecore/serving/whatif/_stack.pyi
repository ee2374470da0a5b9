from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

class Numbers:
    def __new__(cls, rate: float = 1.0) -> Numbers: ...
    def of(self, hashes: NDArray[np.uint64]) -> NDArray[np.int32]: ...

class Stack:
    def __new__(cls, rate: float = 1.0, capacities: Iterable[int] = ()) -> Stack: ...
    @property
    def num_lookups(self) -> int: ...
    def add(
        self,
        blocks: NDArray[np.int32],
        starts: NDArray[np.int64],
        first: NDArray[np.int64],
        reusable: NDArray[np.int64],
        has_partial: NDArray[np.uint8],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...
    def hits(self) -> NDArray[np.int64]: ...
