"""The read-only part of a paged cache: its layers, arrays, statistics and recounts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Listed
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from pagecore.arrays import Tensor
from pagecore.cache import lifecycle
from pagecore.cache.inspect.block_map import BlockMap, map_blocks, map_contents
from pagecore.cache.inspect.occupancy import measure
from pagecore.cache.inspect.states import check_states
from pagecore.cache.inspect.stats import CacheStats
from pagecore.cache.layers.groups import group_number
from pagecore.cache.layers.sealed import blocks_of
from pagecore.cache.lifecycle.cross_request import cross_namespace
from pagecore.cache.memory.demand import block_limit, longest_sequence, longest_step
from pagecore.cache.parts import CacheParts, PartsOwner
from pagecore.cache.prefix._prefix import cached_blocks, cached_length, cached_states, check_prefixes
from pagecore.cache.prefix.retention import Spans, retention_options, reusable
from pagecore.cache.sequences._sequences import Sequence, as_list, token_ids
from pagecore.cache.state._state import Held
from pagecore.cache.state.sequences import Sequences
from pagecore.cache.step._step import shortage
from pagecore.cache.swap.shortage import shortage_with_swapped
from pagecore.errors import InvalidSequence, UnsupportedOption
from pagecore.index import StateTable
from pagecore.ops import SealedBlocks
from pagecore.storage import AttentionSpec, Region, Spec
from pagecore.storage.checks import flag, require_int

NONE = np.zeros(0, np.int32)


class CacheReader(PartsOwner):
    """Properties and queries of `PagedKVCache` that change nothing."""

    def __init__(self, parts: CacheParts) -> None:
        self._parts = parts
        self.block_size = parts.block_size
        self.max_sequences = parts.tables.max_sequences
        self.max_tokens_per_sequence = parts.max_tokens_per_sequence
        self.device = parts.device
        self.eviction_policy = parts.eviction_policy
        self.scrub = parts.scrub
        self.index_dtype = parts.index_dtype
        self.parallel = parts.parallel

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Number of model layers, including aliases."""
        return len(self._parts.layers)

    @property
    def num_groups(self) -> int:
        """Number of groups; the layers of a group share a pool."""
        return self._parts.num_groups

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group, including the null block."""
        return tuple(pool.num_blocks for pool in self._parts.block_pools)

    @property
    def num_states(self) -> int:
        """State slots, including the null slot; 0 for a cache without layers that keep states."""
        states = self._parts.state.states
        return 0 if states is None else states.num_slots

    @property
    def num_checkpoints(self) -> int:
        """Slots of quantised checkpoints, including the null slot; 0 if checkpoints have slots of states, or none."""
        states = self._parts.state.states
        return 0 if states is None else states.num_checkpoints

    @property
    def num_available(self) -> int:
        """Blocks of the scarcest group that are free or can be freed by eviction.

        In a cache whose layers all keep states, the blocks that every row can name: tokens take no memory there.
        """
        tables = self._parts.tables
        rows = tables.max_sequences * tables.max_blocks_per_sequence
        return min(lifecycle.available(self._parts.state), default=rows)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that the available blocks and a row hold, computed in steps as necessary."""
        parts = self._parts
        longest = longest_sequence(parts.groups, lifecycle.available(parts.state), parts.block_size)
        return min(longest, parts.max_tokens_per_sequence)

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a sequence alone can always compute in one step, however far it is; at most `max_length`.

        Less than `max_length` if the blocks of a window hold only a part of a long prompt at once.
        """
        parts = self._parts
        available = lifecycle.available(parts.state)
        longest = min(longest_sequence(parts.groups, available, parts.block_size), parts.max_tokens_per_sequence)
        return longest_step(parts.groups, available, parts.block_size, longest)

    @property
    def max_cross_tokens(self) -> int | None:
        """Most encoder tokens of a sequence; None in a cache without cross-attention layers."""
        return None if self._parts.cross is None else self._parts.cross.contents.max_tokens

    @property
    def has_prefix_cache(self) -> bool:
        """True if sequences reuse the computed prefixes of others."""
        return self._parts.prefix is not None

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the cache, including those that are swapped out."""
        return self._parts.state.num_live

    @property
    def sequences(self) -> Sequences:
        """The sequences in the cache by id, including those that are swapped out: a read-only mapping."""
        return Sequences(self._parts.state)

    @property
    def nbytes(self) -> int:
        """Bytes of all planes in all pools of this rank, states included."""
        return self._parts.store.nbytes

    def regions(self) -> list[Region]:
        """Return the memory of all planes and states as regions, to register it with NIXL or Mooncake in one call.

        Empty for a cache without bytes.
        """
        return self._parts.store.regions()

    # -- layers and arrays ---------------------------------------------------------------------------------------

    def group_of(self, layer: int) -> int:
        """Return the number of the group that model layer `layer` belongs to.

        Raises
        ------
        UnsupportedOption
            The layer keeps a state, and belongs to no group.
        """
        place = self._parts.layer(layer)
        if place.keeps_state:
            raise UnsupportedOption(f"layer {layer} keeps a state and belongs to no group; ask for layers that attend")
        return place.group

    def spec(self, layer: int) -> Spec:
        """Return the spec of this rank's part of a model layer; for an alias, that of the layer that it shares."""
        return self._parts.layer(layer).spec

    def plane(self, name: str, layer: int) -> Tensor:
        """Return one plane of a model layer, such as "key", "value" or "latent".

        Returns
        -------
        Tensor
            ``[num_blocks, block_size, *plane.shape]``, or ``[num_blocks, *plane.shape]`` for a plane per block, in the
            plane's dtype; ``[num_slots, *plane.shape]`` for a layer that keeps a state. It aliases the pool and keeps
            its memory alive.

        Raises
        ------
        UnsupportedOption
            The spec of the layer has no plane of that name.
        ShapeError
            The cache does not have that layer.
        DeviceError
            The cache was made with ``device="none"``.
        """
        place = self._parts.layer(layer)
        return self._parts.store.plane(name, place)

    def sealed_planes(self, layer: int) -> SealedBlocks:
        """Return the planes of a layer's sealed blocks as `paged_attention` reads them, without a block table.

        `Batch.group` has the block table and the lengths of a step, in `sealed`.

        Returns
        -------
        SealedBlocks
            Of Tensors that alias the pool and keep its memory alive; see `SealedBlocks` for their shapes.

        Raises
        ------
        UnsupportedOption
            The layer has no sealed blocks.
        ShapeError
            The cache does not have that layer.
        DeviceError
            The cache was made with ``device="none"``.
        """
        place = self._parts.layer(layer)
        if place.sealed_group is None:
            raise UnsupportedOption(
                f"layer {layer} has no sealed blocks; make its spec with format='kivi2' or 'kivi4', or use plane"
            )
        self._parts.store.pool(place)
        assert isinstance(place.spec, AttentionSpec)
        return blocks_of(self._parts.store.pools[place.sealed_group], place.index, place.spec)

    def checkpoint_plane(self, name: str, layer: int) -> Tensor:
        """Return one plane of the checkpoints of a layer that keeps a state: those whose slot `checkpoint` returns.

        Returns
        -------
        Tensor
            ``[num_checkpoints, *plane.shape]``, int8 for a quantised plane, whose scales are the plane
            ``f"{name}_scale"``, see `CheckpointPool`. Without a `checkpoint_format` it is `plane`.

        Raises
        ------
        UnsupportedOption, ShapeError, DeviceError
            As in `plane`, or a layer without a state.
        """
        return self._parts.store.checkpoint_plane(name, self._parts.layer(layer))

    def key(self, layer: int) -> Tensor:
        """Return ``plane("key", layer)``, ``[num_blocks, block_size, num_kv_heads, head_dim]``; it aliases the pool."""
        return self.plane("key", layer)

    def value(self, layer: int) -> Tensor:
        """Return ``plane("value", layer)``, ``[num_blocks, block_size, num_kv_heads, v_head_dim]``; also an alias."""
        return self.plane("value", layer)

    def block_table(self, group: int = 0) -> Tensor:
        """Return the block table of a group, for attention kernels of your own.

        Returns
        -------
        Tensor
            int32 ``[max_sequences + 1, max_blocks]``, read-only. It aliases the index and changes with the cache; on
            CUDA it is a copy on the device, which each prepare updates. `Sequence.row` is the row of a sequence. The
            table of a cross-attention group has a row for each encoder output instead; `Batch.cross` lists them.
            Entries past a row's blocks are 0, and so are the holes that a window left. The last row contains only 0:
            padding refers to it.

        Raises
        ------
        ShapeError
            The cache does not have that group.
        """
        return self._parts.block_tables[group_number(group, self.num_groups)]

    @property
    def row_lengths(self) -> Tensor:
        """Tokens of each row that have slots, including those of a step in flight.

        int32 ``[max_sequences + 1]``, read-only. It aliases the index and changes with the cache; on CUDA it is a copy
        on the device, as `block_table` is. Unused rows are 0, and so is the last, to which padding refers.
        """
        return self._parts.row_lengths

    # -- queries -------------------------------------------------------------------------------------------------

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
        return lifecycle.held_from(self._parts.state, sequence, group_number(group, self.num_groups))

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
        number = group_number(group, self.num_groups)
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
        options = retention_options(self.eviction_policy, cross_namespace(namespace, cross_digest), spans)
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
        parts = self._parts
        counts_outputs, limits = flag("encoder_outputs", encoder_outputs), None
        if step_tokens is not None:
            most = require_int("step_tokens", step_tokens)
            limits = [block_limit(group, parts.block_size, most) for group in parts.token_groups]
        with Held(parts.state.lock):
            listed = as_list(sequences)
            if any(isinstance(one, Sequence) and one.is_swapped for one in listed):
                parts.state.give_up_lost()
                return shortage_with_swapped(parts, listed, counts, limits, counts_outputs)
            missing = shortage(parts.state, listed, counts, limits)
            if not counts_outputs:
                del missing[len(parts.token_groups) : self.num_groups]
            return max(missing, default=0)

    # -- state ---------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return the current statistics of the cache."""
        with Held(self._parts.state.lock):
            self._parts.state.give_up_lost()
            return measure(self._parts)

    def block_map(self, group: int = 0) -> BlockMap:
        """Return the current holders of each block of a group; works with every device, including "none".

        Raises
        ------
        ShapeError
            The cache does not have that group.
        """
        number = group_number(group, self.num_groups)
        with Held(self._parts.state.lock):
            self._parts.state.give_up_lost()
            cross, listed = self._parts.cross, self._parts.state.listed()
            if cross is not None and number >= cross.first_group:
                return map_contents(number, cross.first_group, cross.contents.tables, listed)
            known = NONE if self._parts.prefix is None else cached_blocks(self._parts.prefix, number)
            return map_blocks(number, self._parts.tables, listed, known)

    def check_invariants(self) -> None:
        """Recount every block from its holders; raise `PagecoreError` if the index contradicts itself."""
        state, tables = self._parts.state, self._parts.tables
        with Held(state.lock):
            state.give_up_lost()
            sequences = state.listed()
            tables.check_invariants(exclusive=state.prefix is None)
            if state.prefix is not None:
                check_prefixes(state.prefix, sequences)
            if state.tenants is not None:
                state.tenants.check_invariants(sequences)
            if state.states is not None:
                cached = NONE if state.prefix is None else cached_states(state.prefix)
                check_states(state.states, sequences, cached)
            if self._parts.cross is not None:
                self._parts.cross.contents.check_invariants(state.crossed())
            for sequence in sequences:
                if not sequence.is_swapped and sequence.num_computed_tokens > tables.length(sequence.row):
                    raise InvalidSequence(f"{sequence!r} is inconsistent with its row {sequence.row}")
            if len(sequences) != state.num_live:
                raise InvalidSequence(f"{len(sequences)} sequences are listed, but {state.num_live} are counted")
            for space in self._parts.swap_spaces:
                space.check_invariants()

    def __repr__(self) -> str:
        used = sum(pool.num_used for pool in self._parts.block_pools)
        blocks = sum(self.num_blocks) - self.num_groups
        return (
            f"PagedKVCache({self.num_layers} layers in {self.num_groups} groups on {self.device!r}, "
            f"{self.num_sequences} sequences, {used} of {blocks} blocks of {self.block_size} tokens in use)"
        )
