from collections.abc import Hashable

from pagecore.cache._sequence import Sequence
from pagecore.cache._state import CacheState

def set_cross(state: CacheState, sequence: Sequence, num_tokens: int, key: Hashable) -> None: ...
