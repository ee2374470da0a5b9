from collections.abc import Iterable

from numpy.typing import ArrayLike

from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState

def truncate(state: CacheState, sequences: Sequence | Iterable[Sequence], lengths: ArrayLike) -> None: ...
