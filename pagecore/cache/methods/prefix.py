"""The methods of a paged cache that evict cached prefixes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import SupportsIndex

from numpy.typing import ArrayLike

from pagecore.cache import lifecycle
from pagecore.cache.lifecycle.cross_request import cross_namespace
from pagecore.cache.parts import PartsOwner
from pagecore.cache.prefix.retention import Spans, retention_options
from pagecore.cache.sequences._sequence import token_ids
from pagecore.storage.checks import require_int


class PrefixMethods(PartsOwner):
    """`PagedKVCache.clear_prefix_cache`, `evict_prefix` and `evict_namespace`."""

    def clear_prefix_cache(self) -> int:
        """Evict every cached block that no sequence uses; return the number of freed blocks."""
        return lifecycle.clear(self._parts.state)

    def evict_prefix(
        self,
        tokens: ArrayLike,
        *,
        keep: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Evict the end of one cached prefix, whatever the eviction policy; return the number of freed blocks.

        A chat that has ended, or whose last turns were edited, gives its blocks back before others do. Blocks go from
        the last cached one of `tokens`, until one that a sequence uses or another cached prefix continues: a shared
        system prompt stays. Copies in tiers stay, too, and none is made; `Tiers.evict_prefix` evicts them as well.

        Parameters
        ----------
        tokens : array_like of int
            The whole prefix, generated tokens included, ``[num_tokens]``.
        keep : int
            Tokens at its beginning that stay cached, in whole blocks.
        namespace, spans, cross_digest
            As for `add_sequence`.

        Raises
        ------
        ShapeError
            `keep` is negative; tokens or spans are out of range.
        UnsupportedDtype
            Tokens that are not integers, or a namespace or digest of a type that cannot be compared.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> for last in (1, 2):
        ...     with cache.add_sequence([7] * 4 + [last] * 8) as chat:
        ...         cache.commit(cache.prepare([chat], 12 - chat.num_cached_tokens))
        >>> cache.evict_prefix([7] * 4 + [1] * 8), cache.match_length([7] * 4 + [1] * 9)
        (2, 4)
        """
        kept = require_int("keep", keep, 0, max=None)
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, cross_digest), spans)
        ids = token_ids(tokens)
        return lifecycle.evict_prefix(self._parts.state, ids, options, min(kept, len(ids)))

    def evict_namespace(self, namespace: Hashable, *, cross_digest: bytes | int | None = None) -> int:
        """Evict all cached prefixes of a namespace that no sequence uses; return the number of freed blocks.

        For a tenant that has left, or an adapter whose weights were replaced under the same name. Sequences of the
        namespace keep their blocks, which stay cached when they are removed: remove them first, or call it again then.
        Copies in tiers stay; `Tiers.evict_namespace` evicts those of the host as well.

        Parameters
        ----------
        namespace, cross_digest
            As for `add_sequence`; None is the namespace of sequences without one.

        Raises
        ------
        UnsupportedDtype
            A namespace or digest of a type that cannot be compared.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> for name in ("adapter", None):
        ...     with cache.add_sequence(range(8), namespace=name) as sequence:
        ...         cache.commit(cache.prepare([sequence], 8))
        >>> cache.evict_namespace("adapter"), cache.match_length(range(9))
        (2, 8)
        """
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, cross_digest), None)
        return lifecycle.evict_namespace(self._parts.state, options.namespace)
