"""The methods of a paged cache that add, copy, cut and remove sequences."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import SupportsIndex

from numpy.typing import ArrayLike

from pagecore.cache import lifecycle
from pagecore.cache.lifecycle.cross_request import cross_namespace, cross_request, name_output
from pagecore.cache.memory.limits import check_length
from pagecore.cache.parts import PartsOwner
from pagecore.cache.prefix.retention import Priority, Spans, checked_rank, retention_options, reusable
from pagecore.cache.sequences._sequences import Sequence, token_ids
from pagecore.storage.checks import flag, require_int


class LifecycleMethods(PartsOwner):
    """`PagedKVCache.add_sequence`, `append_tokens`, `fork`, `reorder`, `truncate`, `remove` and `set_cross_tokens`."""

    def add_sequence(
        self,
        tokens: ArrayLike,
        id: object = None,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        priority: Priority | None = None,
        time_to_live: float | None = None,
        rank: float | None = None,
        cross_tokens: SupportsIndex | None = None,
        cross_digest: bytes | int | None = None,
        tentative: bool = False,
    ) -> Sequence:
        """Add a sequence with known `tokens`; its cached prefix is shared, and `prepare` takes the other blocks.

        A cached prefix consists of whole blocks, and never includes the last token, whose output is still to be
        computed. It is held until the sequence is removed; `Sequence.num_cached_tokens` is its length. In a cache with
        states it ends with the deepest cached state. The blocks after it, up to the full match, are shared too: layers
        that keep a state compute their tokens again, and the slots of these tokens are -1.

        Parameters
        ----------
        tokens : array_like of int
            Token ids, ``[num_tokens]``; may be empty.
        id : hashable, optional
            The caller's name for the sequence; by default an unused number.
        namespace : hashable, optional
            Sequences of different namespaces (adapters, tenants) share nothing. Namespaces are equal only if their
            types are equal too, also within tuples. Ignored without a prefix cache or `scrub`.
        spans : iterable of (int, int, bytes or int), optional
            Positions [start, end) of an image or audio, whose content a digest identifies in addition to the token ids.
        max_tokens : int, optional
            Maximum number of tokens to reuse.
        priority : float or list of (int, int or None, float), optional
            For the policy "priority": 0 to 100 (35 by default) for the blocks of the sequence; or for ranges of its
            tokens [start, end), in order, where None is the end of the sequence, generated tokens included. A block
            belongs to the range of its first token. A fourth number is the time to live of a range.
        time_to_live : float, optional
            Seconds from the removal of the sequence after which priorities fall back to 35.
        rank : float, optional
            For the policy "rank": blocks with the lowest rank are evicted first.
        cross_tokens : int, optional
            Number of encoder tokens, for a cache with cross-attention layers; see `set_cross_tokens`. 0 for a prompt
            without an encoder's input: its cross-attention layers return zeros, and such prompts share prefixes.
        cross_digest : bytes or int, optional
            Identity of the encoder's input. While any sequence of the namespace holds an encoder output with this
            digest, later ones share its blocks, and their steps do not write it again. Cached prefixes of the decoder
            are shared between equal digests only; a sequence with encoder tokens and without a digest neither reuses a
            prefix nor leaves one.
        tentative : bool
            True for a sequence that may be removed before its first step, and added again later, because it has no
            room: its prefix counts once its first step is prepared or it is copied, in `stats` and as a hit for the
            eviction policy. Otherwise each call counts at once.

        Raises
        ------
        InvalidSequence
            The id is already in use or cannot be hashed.
        OutOfRows
            The cache already has `max_sequences` sequences.
        ShapeError
            More tokens than a row has room for; invalid spans, priority or numbers; more encoder tokens than the
            cross-attention layers serve, or another number than that of the output with the digest.
        UnsupportedDtype
            A namespace or digest of a type that cannot be compared.
        UnsupportedOption
            A priority or rank that the policy does not use; a time_to_live without a priority; cross_tokens for a cache
            without cross-attention layers; a cross_digest without cross_tokens, or with 0; `tentative` that is not True
            or False.
        """
        ids = token_ids(tokens)
        is_tentative = flag("tentative", tentative)
        cross, own_namespace = None, namespace
        if cross_tokens is not None or cross_digest is not None:
            cross = cross_request(self._parts, cross_tokens, cross_digest, namespace)
            own_namespace = cross_namespace(namespace, cross_digest)
        options = retention_options(self._parts.eviction_policy, own_namespace, spans, priority, time_to_live, rank)
        most = reusable(len(ids), max_tokens)
        if self._parts.cross is not None and (cross is None or cross[1] is None):
            most = 0  # the encoder output that its keys depend on has no name
        check_length(len(ids), self._parts.max_tokens_per_sequence)
        return lifecycle.add(self._parts.state, id, ids, options, most, cross, is_tentative)

    def set_cross_tokens(
        self, sequence: Sequence, num_tokens: SupportsIndex, *, digest: bytes | int | None = None
    ) -> None:
        """Set the number of encoder tokens that the cross-attention layers of a sequence see; once per sequence.

        The first `prepare` with new tokens of the sequence takes their blocks, once and all or nothing with the other
        blocks, and its batch has their slots: `write` then stores the encoder's keys and values in the cross-attention
        layers. Forks and reordered sequences share the blocks, which are freed with the last sequence that holds them.

        Parameters
        ----------
        sequence : Sequence
            Idle, and added without `cross_tokens`.
        num_tokens : int
            0 for a sequence without an encoder's input.
        digest : bytes or int, optional
            Identity of the encoder's input: sequences of one namespace with equal digests share one encoder output.
            The sequence neither reuses nor leaves a cached prefix; `add_sequence` with a digest does both.

        Raises
        ------
        ShapeError
            The number is set already, or differs from that of the output with the digest; more tokens than the
            cross-attention layers serve.
        UnsupportedOption
            The cache has no cross-attention layers.
        UnsupportedDtype
            A digest that is neither bytes nor an int.
        InvalidSequence
            `sequence` is not idle in this cache.
        """
        count, name = name_output(self._parts, require_int("num_tokens", num_tokens, 0), digest)
        lifecycle.set_cross(self._parts.state, sequence, count, name)

    def append_tokens(
        self,
        sequences: Sequence | Iterable[Sequence],
        ids: ArrayLike | Iterable[ArrayLike],
        counts: ArrayLike | None = None,
    ) -> None:
        """Make the ids of sampled tokens known; all or nothing.

        The call may follow the prepare, or even the commit, of the step that computes those tokens.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        ids : array_like of int
            ``[num_sequences]``, one for each sequence; ``[num_sequences, k]``, k for each; or a list with a list of
            ids for each, of any lengths. For a sequence that is not in a list also an id, or ``[k]``.
        counts : array_like of int, optional
            ``[num_sequences]``, for an array ``[num_sequences, k]``: the number of ids of each row that become known,
            0 to k, such as the accepted tokens of a step with drafts; the other ids of the row are ignored.

        Raises
        ------
        ShapeError, UnsupportedDtype
            Ids outside int32, or not one row of ids per sequence; counts that do not fit the rows, or without such an
            array.
        InvalidSequence
            An object that is not a sequence of this cache.
        """
        lifecycle.append(self._parts.state, sequences, ids, counts)

    def fork(self, sequence: Sequence, id: object = None) -> Sequence:
        """Add a sequence with the same tokens; the two share every block until one of them writes to it.

        Raises
        ------
        InvalidSequence
            `sequence` is not idle in this cache, or `id` is in use.
        OutOfRows
            The cache already has `max_sequences` sequences.
        """
        return lifecycle.fork(self._parts.state, sequence, id)

    def reorder(self, sequences: Sequence | Iterable[Sequence], parents: Sequence | Iterable[Sequence]) -> None:
        """Make each sequence a copy of its parent as it was before the call (beam search); all or nothing.

        The sequences keep their ids, and share the blocks of their parents, as after `fork`; blocks that only they had
        are released. Blocks and states are shared until a step writes to them.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        parents : Sequence or iterable of Sequence
            One for each sequence. A parent may repeat, may be the sequence itself, and may be a copy of another one.

        Raises
        ------
        ShapeError
            Another number of parents than of sequences.
        InvalidSequence
            A sequence or parent that is not idle in this cache, or a sequence that is listed twice.
        NotEnoughMemory
            The host cannot allocate the copies of token ids; nothing was changed.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> first = cache.add_sequence(range(6))
        >>> cache.commit(cache.prepare([first], 6))
        >>> second = cache.fork(first)
        >>> cache.append_tokens([first, second], [7, 8])
        >>> cache.reorder([first, second], [second, second])
        >>> int(first.tokens[-1]), int(second.tokens[-1])
        (8, 8)
        """
        lifecycle.reorder(self._parts.state, sequences, parents)

    def truncate(self, sequences: Sequence | Iterable[Sequence], lengths: ArrayLike) -> None:
        """Forget the tokens of sequences past a length, and release the blocks that only they needed; all or nothing.

        Inside a sealed block (format "kivi2" or "kivi4"), the tokens that stay return to the tail with the numbers of
        the block, rounded to the dtype of the spec. What the sequence computes from there on is not published, because
        sealing these numbers again adds an error.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
        lengths : int or list of int
            Number of known or computed tokens to keep: one for all sequences, or one for each.

        Raises
        ------
        ShapeError
            A sequence has fewer tokens.
        OutOfBlocks, DeviceError
            A length is inside a sealed block, and a tail has no free block, or the stream of the last step is being
            captured.
        UnsupportedOption
            A group with a window has released keys that the next token would see; truncate to 0 and compute again. Or a
            length after which the sequence has no state: possible are 0, its checkpoint, which the message names, and
            the number of its computed tokens or more. Or a length inside a sealed block, with ``device="none"``.
        """
        lifecycle.truncate(self._parts.state, sequences, lengths)

    def remove(self, sequence: Sequence, *, rank: float | None = None) -> None:
        """Remove a sequence and release its blocks, tail first; allowed while its step is in flight.

        The step then writes nothing for the sequence, whose blocks may have new owners, and its attention output for
        the sequence is meaningless. A swapped sequence releases its blocks of the swap space. Its cached blocks stay in
        the prefix cache until they are evicted.

        Parameters
        ----------
        rank : float, optional
            For the policy "rank": the rank of the blocks that no sequence uses from now on.

        Raises
        ------
        InvalidSequence
            An object that is not a sequence of this cache.
        UnsupportedOption
            A rank that the policy does not use.
        """
        lifecycle.remove(self._parts.state, sequence, checked_rank(self._parts.eviction_policy, rank))
