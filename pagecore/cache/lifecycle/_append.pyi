from collections.abc import Iterable

from numpy.typing import ArrayLike

from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState

def append(
    state: CacheState, sequences: Sequence | Iterable[Sequence], ids: ArrayLike | Iterable[ArrayLike]
) -> None: ...
