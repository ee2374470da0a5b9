from collections.abc import Iterable

from numpy.typing import ArrayLike

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

def append(
    state: CacheState, sequences: Sequence | Iterable[Sequence], ids: ArrayLike | Iterable[ArrayLike]
) -> None: ...
