"""The methods of a paged cache that evict, revoke or pin cached prefixes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import SupportsIndex

from numpy.typing import ArrayLike

from pagecore.cache import lifecycle
from pagecore.cache.layers.groups import group_number
from pagecore.cache.lifecycle._lifecycle import PrefixPin
from pagecore.cache.lifecycle.cross_request import cross_namespace
from pagecore.cache.parts import PartsOwner
from pagecore.cache.prefix.retention import Spans, retention_options
from pagecore.cache.sequences._sequences import Sequence, token_ids
from pagecore.cache.state._state import Held
from pagecore.errors import InvalidBlock, UnsupportedOption
from pagecore.storage.checks import as_tuple, member, require_int

# Name of the memory of the cache among those of tiers.
DEVICE_MEDIUM = "GPU"


class PrefixMethods(PartsOwner):
    """`PagedKVCache.clear_prefix_cache`, and the methods that evict, revoke and pin cached prefixes."""

    @property
    def has_tiers(self) -> bool:
        """True while `Tiers` serve the cache."""
        return self._parts.prefix is not None and self._parts.state.observer is not None

    def hit_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Return the reused tokens of a sequence by the medium that had them when it was added.

        Parameters
        ----------
        sequence : Sequence
            A live sequence.

        Returns
        -------
        dict
            "GPU" for tokens of this cache, whatever its device; with `Tiers` also "CPU" for those that were copied from
            host memory, and the media of stores, "DISK" or "EXTERNAL", for those that a request had loaded. The values
            add up to `Sequence.num_cached_tokens`. Of several sequences that reuse what was copied once, the first one
            to run or to be copied has the tokens of the farther medium, and the others find them on the device. The
            copies of a fork count as "GPU"; `reorder` copies the media of the parent. Tokens that a truncation leaves
            of a block keep its medium after the first step; before it, they count as "GPU".

        Raises
        ------
        InvalidSequence
            The sequence was removed, or belongs to another cache.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> with cache.add_sequence(range(8)) as sequence:
        ...     cache.commit(cache.prepare([sequence], 8))
        >>> cache.hit_tokens(cache.add_sequence(range(9)))
        {'GPU': 8}
        """
        with Held(self._parts.state.lock):
            lifecycle.require_live(self._parts.state, sequence)
            observer = self._parts.state.observer
            if observer is None or self._parts.prefix is None:
                return {DEVICE_MEDIUM: sequence.num_cached_tokens}
            return observer.hit_tokens(sequence)

    def clear_prefix_cache(self) -> int:
        """Evict every cached block that no sequence uses and nothing pins; return the number of freed blocks."""
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
        the last cached one of `tokens`, until one that a sequence or a pin holds or another cached prefix continues: a
        shared system prompt stays. Copies in tiers stay, too, and none is made; `Tiers.evict_prefix` evicts them, too.

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

    def revoke_prefix(
        self,
        tokens: ArrayLike,
        *,
        valid: SupportsIndex = 0,
        namespace: Hashable = None,
        spans: Spans | None = None,
        cross_digest: bytes | int | None = None,
    ) -> dict[Sequence, int]:
        """Withdraw cached blocks whose content is wrong, also while sequences use them.

        For an external load that failed after its blocks were published, or a block that was found corrupt. The block
        that has token `valid` of the prefix leaves the prefix cache, with every block that continues it, in this and
        any other prefix: later sequences compute these tokens. Copies in tiers stay; `Tiers.revoke_prefix` revokes them
        as well.

        Sequences that have the block keep it and go on, but nothing that they compute from it on is published: keys and
        values after it depend on it. Truncate them to the number of tokens that is returned, and compute the rest
        again, which is then published; or remove them. Sequences that computed the same tokens in blocks of their own,
        or have only the beginning of the block, are treated alike.

        Parameters
        ----------
        tokens : array_like of int
            The prefix, up to the end of the first wrong block or longer, ``[num_tokens]``; a last block that is
            incomplete is not looked up.
        valid : int
            Tokens at its beginning whose keys and values are right.
        namespace, spans, cross_digest
            As for `add_sequence`.

        Returns
        -------
        dict
            Sequences that have the block, those that are swapped out or have a step in flight included, and the number
            of their tokens before it, those of the step included: fewer are left if its commit accepts fewer. Commit or
            abandon a step, or swap a sequence in, before `truncate`, which refuses lengths without a state or whose
            window was released: truncate to 0 then.

        Raises
        ------
        ShapeError
            `valid` is negative; tokens or spans are out of range.
        UnsupportedDtype
            Tokens that are not integers, or a namespace or digest of a type that cannot be compared.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> sequence = cache.add_sequence(range(12))
        >>> cache.commit(cache.prepare([sequence], 12))
        >>> for each, valid in cache.revoke_prefix(range(12), valid=6).items():
        ...     cache.truncate(each, valid)
        >>> sequence.num_computed_tokens, cache.match_length(range(13))
        (4, 4)
        """
        first = require_int("valid", valid, 0, max=None)
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, cross_digest), spans)
        ids = token_ids(tokens)
        return lifecycle.revoke_prefix(self._parts.state, ids, options, min(first, len(ids)))

    def revoke_blocks(self, blocks: Iterable[SupportsIndex], *, group: SupportsIndex = 0) -> dict[Sequence, int]:
        """Withdraw cached blocks whose content is wrong by their ids; see `revoke_prefix`.

        Blocks that are cached leave the prefix cache with what continues them; blocks that only sequences hold are
        never published. Takes time linear in the cached blocks for each block.

        Parameters
        ----------
        blocks : iterable of int
            Ids as in `block_table`. Blocks that nothing holds have no effect.
        group : int
            Group of layers to which the blocks belong.

        Returns
        -------
        dict
            As for `revoke_prefix`: sequences that have one of the blocks, or the same tokens, and the number of their
            tokens before the first of them.

        Raises
        ------
        InvalidBlock
            An id that is not one of a block of the group.
        ShapeError
            The cache does not have that group.
        UnsupportedOption
            A group of cross-attention layers, whose blocks are in no prefix.
        """
        state = self._parts.state
        number = group_number(group, self._parts.num_groups)
        if number >= state.tables.num_groups:
            raise UnsupportedOption(f"group {number} has cross-attention layers, whose blocks are never cached")
        size = state.tables.pools[number].num_blocks
        given = as_tuple("blocks", blocks, "block ids")
        ids = [member("block", each, size, f"group {number}", InvalidBlock) for each in given]
        if 0 in ids:
            raise InvalidBlock("block 0 is the null block, which no prefix has; give blocks from 1 on")
        return lifecycle.revoke_blocks(state, ids, number)

    def pin_prefix(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> PrefixPin:
        """Keep what is cached of a prefix until the pin is released, without a sequence.

        For system prompts that must stay, or the prefix of a request that is scheduled elsewhere first. The pin holds
        what a sequence with these tokens would reuse now, and takes no row; what a host tier has is brought to the
        device first. Its blocks count as used: `num_available`, `shortage` and so the admissions of a `Scheduler` leave
        them out, and a request for which too few other blocks are left does not run. Several pins of a prefix are
        independent.

        Parameters
        ----------
        tokens : array_like of int
            ``[num_tokens]``; unlike `add_sequence`, the last token may be part of the prefix.
        namespace, spans, max_tokens, cross_digest
            As for `add_sequence`. In a cache with cross-attention layers, a call without `cross_digest` pins the prefix
            of prompts without an encoder's input; a prompt with encoder tokens and without a digest reuses nothing.

        Returns
        -------
        PrefixPin
            Keep it: a pin that is collected is released. Its `num_tokens` is 0 if nothing is cached, and without a
            prefix cache. `revoke_prefix` shortens it; the blocks are free once it is released.

        Raises
        ------
        ShapeError
            Tokens, spans or max_tokens are out of range.
        UnsupportedDtype
            Tokens that are not integers, or a namespace or digest of a type that cannot be compared.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> with cache.add_sequence(range(12)) as sequence:
        ...     cache.commit(cache.prepare([sequence], 12))
        >>> pin = cache.pin_prefix(range(8))
        >>> cache.clear_prefix_cache(), cache.match_length(range(12)), cache.num_available
        (1, 8, 6)
        >>> pin.release()
        >>> cache.num_available
        8
        """
        ids = token_ids(tokens)
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, cross_digest), spans)
        most = len(ids) if max_tokens is None else require_int("max_tokens", max_tokens, 0, max=None)
        return lifecycle.pin(self._parts.state, ids, options, min(most, len(ids)))
