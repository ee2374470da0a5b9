"""Operations on the sequences of a cache: add, fork, reorder, append, truncate, compact, remove and set_cross.

Each function takes the lock of the cache, plans, and then commits by calls that cannot fail; see `CacheState`.
"""

from pagecore.cache.lifecycle._add import add, fork
from pagecore.cache.lifecycle._append import append
from pagecore.cache.lifecycle._cross import set_cross
from pagecore.cache.lifecycle._queries import available, clear, evict_namespace, evict_prefix, held_from, require_live
from pagecore.cache.lifecycle._remove import remove
from pagecore.cache.lifecycle._reorder import reorder
from pagecore.cache.lifecycle._truncate import truncate

__all__ = [
    "add",
    "append",
    "available",
    "clear",
    "evict_namespace",
    "evict_prefix",
    "fork",
    "held_from",
    "remove",
    "reorder",
    "require_live",
    "set_cross",
    "truncate",
]
