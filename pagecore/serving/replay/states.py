"""State slots and state hits of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagecore.cache import CacheStats
    from pagecore.serving.scheduling.reuse import Reuse

__all__ = ["StateReport", "StateUse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReport:
    """Recurrent states of a replay; shares from 0 to 1.

    A prefix can be reused only up to a cached state, although the blocks of more tokens may be cached. `matched_tokens`
    of the prompt tokens were in cached blocks, `hit_tokens` of these came before the deepest cached state and were not
    computed again, and `share_lost` is the share of the matched tokens that were. A request counts at its first
    admission.

    `num_states` counts the slots, the null slot included, and `bytes_per_state` the bytes of each. Shares of the slots
    are those that sequences or the prefix cache hold after each step; `cached_peak` slots at most were held by the
    prefix cache. `evicted_states` states were evicted.

    Quantised checkpoints have slots of their own, `num_checkpoints` with the null slot, of `bytes_per_checkpoint` bytes
    each; shares are of these. All are 0 if checkpoints have slots of states.
    """

    num_states: int
    bytes_per_state: int
    matched_tokens: int
    hit_tokens: int
    share_lost: float
    held_mean: float
    held_peak: float
    cached_peak: int
    evicted_states: int
    num_checkpoints: int = 0
    bytes_per_checkpoint: int = 0
    checkpoints_held_mean: float = 0.0
    checkpoints_held_peak: float = 0.0


class StateUse:
    """Use of the slots of states and of quantised checkpoints, step by step."""

    def __init__(self, bytes_per_state: int, bytes_per_checkpoint: int) -> None:
        self.bytes_per_state = bytes_per_state
        self.bytes_per_checkpoint = bytes_per_checkpoint
        self._kept_sum = self._kept_peak = 0.0
        self._held_sum = self._held_peak = 0.0
        self._cached_peak = self._evicted = self._steps = 0

    def observe(self, stats: CacheStats) -> None:
        """Add one step."""
        held = 1 - stats.num_free_states / stats.num_states
        kept = 1 - stats.num_free_checkpoints / stats.num_checkpoints if stats.num_checkpoints else 0.0
        self._kept_sum += kept
        self._kept_peak = max(self._kept_peak, kept)
        self._steps += 1
        self._held_sum += held
        self._held_peak = max(self._held_peak, held)
        self._cached_peak = max(self._cached_peak, stats.num_cached_states)
        self._evicted = stats.num_evicted_states

    def report(self, num_states: int, num_checkpoints: int, reuse: Reuse) -> StateReport:
        """Return the report of a cache with these numbers of slots."""
        matched, hit = reuse.prefix_matched_tokens, reuse.prefix_hit_tokens
        return StateReport(
            num_states=num_states,
            bytes_per_state=self.bytes_per_state,
            matched_tokens=matched,
            hit_tokens=hit,
            share_lost=1 - hit / matched if matched else 0.0,
            held_mean=self._held_sum / self._steps if self._steps else 0.0,
            held_peak=self._held_peak,
            cached_peak=self._cached_peak,
            evicted_states=self._evicted,
            num_checkpoints=num_checkpoints,
            bytes_per_checkpoint=self.bytes_per_checkpoint if num_checkpoints else 0,
            checkpoints_held_mean=self._kept_sum / self._steps if self._steps else 0.0,
            checkpoints_held_peak=self._kept_peak,
        )
