"""Upper bounds of what runs between two turns free: blocks of each group, and state slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagecore.storage import CrossSpec, StateSpec
from pagecore.storage.checks import ceil_div

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, Sequence
    from pagecore.serving.scheduling.request import Run
    from pagecore.storage import Spec

__all__ = ["Holdings"]


class Holdings:
    """Upper bounds of what sequences without a step in flight free, in the order of `PagedKVCache.shortages`.

    A shared block is not freed, but a later write then needs no copy of it; both count as one block.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        specs = [cache.spec(layer) for layer in range(cache.num_layers)]
        groups = {cache.group_of(n): spec for n, spec in enumerate(specs) if not isinstance(spec, StateSpec)}
        self._cache = cache
        # None: sealed blocks, whose layers have the groups of their tails.
        self._specs: list[Spec | None] = [groups.get(group) for group in range(cache.num_groups)]
        states = [spec for spec in specs if isinstance(spec, StateSpec)]
        self._has_states = bool(states)
        self._quantises = any(spec.checkpoint_format is not None for spec in states)

    def upper_bounds(self, run: Run, held: Sequence, *, swaps: bool) -> list[int]:
        """Return the most blocks of each group, and state slots, that a run frees with its sequence `held`.

        Checkpoints count only with `swaps`, for a swap_in: a step drops those of others itself.
        """
        bounds = [self._blocks(run, held, group) for group in range(len(self._specs))]
        return [*bounds, self._slots(held, swaps=swaps)] if self._has_states else bounds

    def most_blocks(self, run: Run, held: Sequence) -> int:
        """Return the largest of the bounds of the groups."""
        return max((self._blocks(run, held, group) for group in range(len(self._specs))), default=0)

    def _blocks(self, run: Run, held: Sequence, group: int) -> int:
        spec, size = self._specs[group], self._cache.block_size
        if isinstance(spec, CrossSpec):
            return ceil_div(run.request.cross_tokens or 0, size)
        # A sample may spare the copy of one more.
        blocks = ceil_div(held.capacity, size) + (run.request.samples > 1)
        if getattr(spec, "window", None) is None and getattr(spec, "chunk", None) is None:
            return blocks
        released = self._cache.held_from(held, group) // size
        return blocks - max(released - ceil_div(getattr(spec, "sink_tokens", 0), size), 0)

    def _slots(self, held: Sequence, *, swaps: bool) -> int:
        slots = {self._cache.state_slot(held), self._cache.spare_slot(held)}
        checkpoint = self._cache.checkpoint(held) if swaps else None
        has_own_pool = self._quantises and checkpoint is not None
        if checkpoint is not None and not has_own_pool:
            slots.add(checkpoint[0])  # at the end of a step it is the running slot
        return len(slots - {0}) + has_own_pool
