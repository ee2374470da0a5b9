"""Operations on the sequences and prefixes of a cache: add, fork, truncate, remove, evict, revoke, pin and others.

Each function takes the lock of the cache, plans, and then commits by calls that cannot fail; see `CacheState`.
"""

from pagecore.cache.lifecycle._lifecycle import (
    add,
    append,
    available,
    clear,
    evict_namespace,
    evict_prefix,
    fork,
    held_from,
    pin,
    remove,
    reorder,
    require_live,
    revoke_blocks,
    revoke_prefix,
    set_cross,
    shared_length,
    truncate,
)

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
    "shared_length",
    "truncate",
]
