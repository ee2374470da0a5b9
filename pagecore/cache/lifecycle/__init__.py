"""Operations on the sequences and prefixes of a cache: add, fork, truncate, remove, evict, revoke, pin and others.

Each function takes the lock of the cache, plans, and then commits by calls that cannot fail; see `CacheState`.
"""

from pagecore.cache.lifecycle._add import add, fork
from pagecore.cache.lifecycle._append import append
from pagecore.cache.lifecycle._cross import set_cross
from pagecore.cache.lifecycle._pin import pin
from pagecore.cache.lifecycle._queries import (
    available,
    clear,
    evict_namespace,
    evict_prefix,
    held_from,
    require_live,
    revoke_blocks,
    revoke_prefix,
)
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
    "pin",
    "remove",
    "reorder",
    "require_live",
    "revoke_blocks",
    "revoke_prefix",
    "set_cross",
    "truncate",
]
