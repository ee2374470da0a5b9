from collections.abc import Iterable

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

class Heir: ...

def reorder(state: CacheState, sequences: Iterable[Sequence], parents: Iterable[Sequence]) -> None: ...
