from collections.abc import Hashable

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState

def set_cross(state: CacheState, sequence: Sequence, num_tokens: int, key: Hashable) -> None: ...
