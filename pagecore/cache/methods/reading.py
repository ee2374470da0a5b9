"""The sizes of a paged cache, its sequences, statistics and recounts."""

from __future__ import annotations

import numpy as np

from pagecore.cache import lifecycle
from pagecore.cache.inspect.block_map import BlockMap, map_blocks, map_contents
from pagecore.cache.inspect.occupancy import measure
from pagecore.cache.inspect.states import check_states
from pagecore.cache.inspect.stats import CacheStats
from pagecore.cache.layers.groups import group_number
from pagecore.cache.memory.demand import longest_sequence, longest_step
from pagecore.cache.parts import CacheParts, PartsOwner
from pagecore.cache.prefix._prefix import cached_blocks, cached_states, check_prefixes
from pagecore.cache.state._state import Held
from pagecore.cache.state.sequences import Sequences
from pagecore.errors import InvalidSequence

NONE = np.zeros(0, np.int32)


class CacheReader(PartsOwner):
    """Sizes, statistics and recounts of `PagedKVCache`."""

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
    def recompute_last_block(self) -> bool:
        """True if a hit in the prefix cache drops its last block."""
        return self._parts.recompute_last_block

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
