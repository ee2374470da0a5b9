from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState

def remove(state: CacheState, sequence: Sequence, rank: float | None = None) -> None: ...
