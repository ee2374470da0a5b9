"""Questions about sequences: what a group holds of them, what they share, reuse or lack."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Listed
from typing import SupportsIndex

from numpy.typing import ArrayLike

from pagecore.cache import lifecycle
from pagecore.cache.layers.groups import group_number
from pagecore.cache.lifecycle.cross_request import cross_namespace
from pagecore.cache.memory.demand import block_limit
from pagecore.cache.parts import PartsOwner
from pagecore.cache.prefix._prefix import cached_length
from pagecore.cache.prefix.retention import Spans, retention_options, reusable
from pagecore.cache.sequences._sequences import Sequence, as_list, token_ids
from pagecore.cache.state._state import Held
from pagecore.cache.step._step import shortage
from pagecore.cache.swap.shortage import shortage_with_swapped
from pagecore.errors import InvalidSequence, UnsupportedOption
from pagecore.index import StateTable
from pagecore.storage.checks import flag, require_int


class QueryMethods(PartsOwner):
    """Queries of `PagedKVCache` about sequences and prompts; they change nothing."""

    def held_from(self, sequence: Sequence, group: int = 0) -> int:
        """Return the position from which on a group has every computed token of a sequence.

        The position is a multiple of the block size, and 0 in a group without a window. In a group with a window it may
        equal `num_computed_tokens`; the group then has none of them, or its sink tokens only.

        Raises
        ------
        InvalidSequence
            A sequence that is not of this cache, or that is swapped out.
        ShapeError
            The cache does not have that group.
        """
        return lifecycle.held_from(self._parts.state, sequence, group_number(group, self._parts.num_groups))

    def shared_length(self, sequences: Sequence | Iterable[Sequence], group: SupportsIndex = 0) -> int:
        """Return the number of tokens at the beginning of sequences that are in the same blocks of a group.

        Attention can read these once for all sequences, and merge the result with that of the tokens after them
        (cascade attention; `get_num_common_prefix_blocks` in vLLM). The number counts whole blocks of computed tokens,
        and holds until one of the sequences is truncated, reordered, compacted, swapped or removed. Takes time linear
        in the blocks that are compared.

        Parameters
        ----------
        sequences : Sequence or iterable of Sequence
            A step in flight does not matter: its tokens do not count.
        group : int
            Group of layers; see `group_of`. The number is 0 for a group with a window or chunks, whose queries do not
            all see the beginning, and for newest tokens next to sealed blocks; a group of these counts what is sealed.

        Raises
        ------
        InvalidSequence
            A sequence that is listed twice, not of this cache, or swapped out.
        ShapeError
            The cache does not have that group.
        UnsupportedOption
            A group of cross-attention layers, whose blocks hold no tokens of the sequences.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4)
        >>> first = cache.add_sequence(range(10))
        >>> cache.commit(cache.prepare([first], 10))
        >>> second = cache.add_sequence([*range(9), 7, 7])
        >>> cache.shared_length([first, second])
        8
        """
        number = group_number(group, self._parts.num_groups)
        if number >= self._parts.state.tables.num_groups:
            raise UnsupportedOption(
                f"group {number} has cross-attention layers, whose blocks hold no tokens of the sequences; give a "
                "group of the decoder's own layers"
            )
        return lifecycle.shared_length(self._parts.state, as_list(sequences), number)

    def state_slot(self, sequence: Sequence) -> int:
        """Return the slot of the state after a sequence's computed tokens; 0 if it has none.

        A sequence that begins with a quantised checkpoint, or returned to one, has no slot until its next step. The
        next step may move the state to another slot. During a step it is the slot that the step reads.

        Raises
        ------
        UnsupportedOption
            No layer of the cache keeps a state.
        InvalidSequence
            A sequence that is not of this cache, or that is swapped out.
        """
        return self._states_of(sequence).slot(sequence.row)

    def spare_slot(self, sequence: Sequence) -> int:
        """Return the slot that a sequence keeps for the state that its next step writes; 0 for none.

        Where layers write in place there is none, and none during a step. It is free once the sequence is removed.

        Raises
        ------
        UnsupportedOption, InvalidSequence
            As in `state_slot`.
        """
        return self._states_of(sequence).spare(sequence.row)

    def checkpoint(self, sequence: Sequence) -> tuple[int, int] | None:
        """Return the slot of a sequence's newest checkpoint and the number of tokens that it covers, or None.

        The slot is one of `checkpoint_plane`.

        Raises
        ------
        UnsupportedOption, InvalidSequence
            As in `state_slot`.
        """
        return self._states_of(sequence).checkpoint(sequence.row)

    def _states_of(self, sequence: Sequence) -> StateTable:
        state = self._parts.state
        if state.states is None:
            raise UnsupportedOption("no layer of the cache keeps a state; give the cache a StateSpec for such layers")
        with Held(state.lock):
            state.give_up_lost()
            lifecycle.require_live(state, sequence)
            if sequence.is_swapped:
                raise InvalidSequence(f"sequence {sequence.id!r} is swapped out; swap it in first")
        return state.states

    def match_length(
        self,
        tokens: ArrayLike,
        *,
        namespace: Hashable = None,
        spans: Spans | None = None,
        max_tokens: int | None = None,
        cross_digest: bytes | int | None = None,
    ) -> int:
        """Return the number of tokens that `add_sequence` would reuse; 0 without a prefix cache.

        Nothing is held, and nothing counts as used. What a host tier has counts even where the device lacks the room
        for it now. Arguments, ShapeError and UnsupportedDtype are those of `add_sequence`. In a cache with
        cross-attention layers, a call without `cross_digest` answers for prompts without an encoder's input; a prompt
        with encoder tokens and without a digest reuses nothing.
        """
        ids = token_ids(tokens)
        options = retention_options(self._parts.eviction_policy, cross_namespace(namespace, cross_digest), spans)
        most = reusable(len(ids), max_tokens)
        with Held(self._parts.state.lock):
            if self._parts.prefix is None:
                return 0
            found = cached_length(self._parts.prefix, ids, options, most)
            observer = self._parts.state.observer
            if observer is None or (self._parts.saver is not None and self._parts.saver.is_released):
                return found
            return max(found, observer.match_ids(ids, options, most))

    def shortage(
        self,
        sequences: Listed[Sequence],
        counts: ArrayLike,
        *,
        step_tokens: SupportsIndex | None = None,
        encoder_outputs: bool = True,
    ) -> int:
        """Return the number of blocks that a prepare would lack in the scarcest group; 0 means that it succeeds.

        State slots count as blocks of a group of their own. Cached states, and checkpoints of sequences without a step
        in flight, count as available.

        If some sequences are swapped out, the result covers one `swap_in` of all of these, and then the prepare.

        Parameters
        ----------
        sequences : list of Sequence
        counts : int or list of int
            New tokens of each sequence: one number for all, or one for each.
        step_tokens : int, optional
            The sequences compute their counts in several steps of up to `step_tokens` tokens. Windows release blocks
            between the steps, so that a sequence never holds all blocks of a long prompt in their groups.
        encoder_outputs : bool
            If False, the blocks of encoder outputs are not counted.

        Raises
        ------
        InvalidSequence, ShapeError
            As `prepare`; ShapeError also for `step_tokens` below 1.
        UnsupportedOption
            `encoder_outputs` is not True or False.
        """
        counts_outputs = flag("encoder_outputs", encoder_outputs)
        return max(self._count_missing(sequences, counts, step_tokens, counts_outputs), default=0)

    def shortages(
        self, sequences: Listed[Sequence], counts: ArrayLike, *, step_tokens: SupportsIndex | None = None
    ) -> list[int]:
        """Return the number of blocks that a prepare would lack in each group; `shortage` is the largest of them.

        Parameters
        ----------
        sequences, counts, step_tokens
            As in `shortage`.

        Returns
        -------
        list of int
            One number for each group, 0 or more; in a cache with states another one, for the state slots, at the end.

        Raises
        ------
        InvalidSequence, ShapeError
            As `shortage`.

        Examples
        --------
        >>> from pagecore import AttentionSpec, PagedKVCache
        >>> specs = [AttentionSpec(1, 8), AttentionSpec(1, 8, window=8)]
        >>> cache = PagedKVCache(specs, num_blocks=[4, 9], block_size=4)
        >>> sequences = [cache.add_sequence(range(12)), cache.add_sequence(range(20, 32))]
        >>> cache.shortages(sequences, 12)
        [3, 0]
        """
        return self._count_missing(sequences, counts, step_tokens, True)

    def _count_missing(
        self, sequences: Listed[Sequence], counts: ArrayLike, step_tokens: SupportsIndex | None, counts_outputs: bool
    ) -> list[int]:
        parts, limits = self._parts, None
        if step_tokens is not None:
            most = require_int("step_tokens", step_tokens)
            limits = [block_limit(group, parts.block_size, most) for group in parts.token_groups]
        with Held(parts.state.lock):
            listed = as_list(sequences)
            if parts.swap_spaces and any(isinstance(one, Sequence) and one.is_swapped for one in listed):
                parts.state.give_up_lost()
                return shortage_with_swapped(parts, listed, counts, limits, counts_outputs)
            missing = shortage(parts.state, listed, counts, limits)
            if not counts_outputs:
                del missing[len(parts.token_groups) : self._parts.num_groups]
            return missing
