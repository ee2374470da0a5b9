from collections.abc import Iterable

from numpy.typing import ArrayLike

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

def truncate(state: CacheState, sequences: Sequence | Iterable[Sequence], lengths: ArrayLike) -> None: ...
