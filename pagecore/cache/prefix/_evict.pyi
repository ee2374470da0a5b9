from collections.abc import Sequence as Listed

from pagecore.cache._sequence import Sequence
from pagecore.cache.prefix._cache import PrefixCache

def evictable(prefix: PrefixCache) -> list[int]: ...
def lacking(prefix: PrefixCache, missing: Listed[int], writers: list[Sequence]) -> list[int]: ...
