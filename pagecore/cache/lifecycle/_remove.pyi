from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

def remove(state: CacheState, sequence: Sequence, rank: float | None = None) -> None: ...
