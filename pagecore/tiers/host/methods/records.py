"""Records of a host tier: backups that ended, and statistics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import UnsupportedDtype
from pagecore.tiers.host.methods.namespaces import namespace_of
from pagecore.tiers.host.operations._operations import Backup as RunningBackup

Spans = tuple[tuple[int, int, bytes | int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Backup:
    """The end of a backup: the host's tree has the prefix now, unless `error` says why not.

    Attributes
    ----------
    tokens : ndarray
        int32 ``[num_tokens]``, whole blocks.
    namespace : hashable
    spans : tuple of (int, int, digest), or None
    start, stop : int
        Tokens [start, stop), in whole blocks, whose entries are new in the host.
    state_tokens : int
        Tokens before the state that was copied; 0 for none.
    error : str or None
    """

    tokens: NDArray[np.int32]
    namespace: Hashable
    spans: Spans | None
    start: int
    stop: int
    state_tokens: int = 0
    error: str | None = None

    @classmethod
    def of(cls, one: RunningBackup, error: str | None = None) -> Self | None:
        """Return the record of a backup that has ended; None if its namespace is known only inside of the process."""
        if one.options is None:
            key, spans = one.identity
            try:
                namespace = namespace_of(key)
            except UnsupportedDtype:
                return None
        else:
            namespace, spans = one.options.namespace, one.options.spans
        start = min(one.num_old_tokens, one.num_tokens)
        if one.state_tokens:  # the block at whose end it is counts as new
            start = min(start, one.state_tokens - one.block_size)
        return cls(
            tokens=one.tokens,
            namespace=namespace,
            spans=spans,
            start=start,
            stop=one.num_tokens,
            state_tokens=one.state_tokens,
            error=error,
        )


@dataclass(frozen=True, slots=True)
class HostStats:
    """Statistics of a host tier.

    Attributes
    ----------
    num_blocks : int
        Entries of all lanes, without the null entries.
    num_cached_blocks, num_evicted_blocks : int
        Blocks that the tree has, and those that it has evicted so far, summed over the groups.
    num_cached_states, num_evicted_states : int
        States that the tree has, and those that it has evicted so far.
    num_promotions, num_promoted_tokens : int
        Promotions that copied anything, and the tokens by which they extended the device's prefixes.
    num_backups, num_backed_up_blocks : int
        Backups that began, and their blocks; their states, if every layer of the cache keeps a state.
    num_failed : int
        Promotions and backups whose copies failed.
    num_pending : int
        Copies that run.
    nbytes : int
    """

    num_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int
    num_cached_states: int
    num_evicted_states: int
    num_promotions: int
    num_promoted_tokens: int
    num_backups: int
    num_backed_up_blocks: int
    num_failed: int
    num_pending: int
    nbytes: int
