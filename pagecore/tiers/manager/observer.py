"""Calls that a cache makes to its tiers, under its lock: promotions, backups, spills, and counts of hits."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.step._step import lacked, lacked_slots, shortage
from pagecore.errors import PagecoreError
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.host.operations._operations import options_of
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.arguments import Write
from pagecore.tiers.manager.origins import DEVICE, HOST, Origins
from pagecore.tiers.manager.second_hit import SecondHits
from pagecore.tiers.manager.stores import StoreSide

# Blocks of prompts that "second_hit" remembers for each state of a host without blocks.
BLOCKS_PER_STATE = 256


class CacheObserver:
    """Base class of `Tiers`, which a cache calls before and after what it does (`CacheState.observer`)."""

    _stores: StoreSide

    def __init__(self, parts: CacheParts, host: HostTier, write: Write, min_tokens: int) -> None:
        self.host, self.write, self.min_tokens = host, write, min_tokens
        self._parts = parts
        # Reused tokens of sequences whose first step runs: a prompt may be added and removed before it gets room.
        self._first: dict[int, int] = {}
        self.num_origins = most = host.num_blocks[0] * (1 if host.num_groups else BLOCKS_PER_STATE)
        self._hits = SecondHits(parts.block_size, most)
        # Blocks that were promoted, until a prompt uses them; reused tokens by medium, of sequences that used any.
        self._promoted = Origins(parts.block_size, most)
        self._media_of: dict[int, NDArray[np.int64]] = {}
        self._hit_counts = np.zeros(1, np.int64)  # by medium, over all sequences

    def adding(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> None:
        """Promote what the host has of a prefix; a failed copy leaves its tokens to be computed."""
        array = np.asarray(ids)
        before = self.host.num_promoted_tokens
        with suppress(PagecoreError):  # counted by the host tier
            now = self.host.promote_ids(array, options, most, self.min_tokens)
            if self.host.num_promoted_tokens > before:
                self._note_promoted(array[:now], options, now - (self.host.num_promoted_tokens - before))

    def preparing(self, sequences: list[Sequence], counts: ArrayLike) -> None:
        """Note first steps; save what a step will evict, if the step has room."""
        for sequence in sequences:
            if isinstance(sequence, Sequence) and sequence.num_computed_tokens == sequence.num_cached_tokens:
                self._first[id(sequence)] = sequence.num_cached_tokens
        if self.write == "on_evict" and not any(shortage(self._parts.state, sequences, counts)):
            state = self._parts.state
            self.evicting(lacked(state, sequences, counts) + lacked_slots(state, sequences, counts))

    def evicting(self, missing: list[int]) -> None:
        """Save what an operation will evict: blocks of each group, and state slots after them."""
        if self.write == "on_evict" and any(missing):
            with suppress(PagecoreError):  # the operation evicts what is left
                self.host.spill(missing)
            self._write()

    def committed(self, sequences: list[Sequence]) -> None:
        """Count hits, and back up what a step has published."""
        if self._first:
            for sequence in sequences:
                self._note_first(sequence)
        if self.write in ("through", "second_hit"):
            for sequence in sequences:
                self._back_up(sequence)
            self._write()

    def _note_first(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence once, after the first step that computed any of its tokens."""
        if sequence.num_computed_tokens <= sequence.num_cached_tokens or id(sequence) not in self._first:
            return
        found = self._first.pop(id(sequence))
        counts = self._count_media(sequence, found)
        self._promoted.forget(sequence.tokens, options_of(sequence))
        self._hit_counts = self._hit_counts + counts
        if counts[DEVICE] < found:
            self._media_of[id(sequence)] = counts
        self._touch(sequence, found)  # or what is written after it could evict it
        if self.write == "second_hit":
            self._hits.note(sequence)

    def removing(self, sequence: Sequence) -> None:
        """Back up what a sequence leaves to the prefix cache."""
        if self.write not in ("explicit", "on_evict"):
            self._back_up(sequence, is_last=True)
            self._write()
        self._touch(sequence, sequence.num_computed_tokens)
        self._hits.forget(sequence)
        self._first.pop(id(sequence), None)
        self._media_of.pop(id(sequence), None)

    def hit_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Return the reused tokens of a sequence by the medium that had them."""
        counts, found = self._media_of.get(id(sequence)), sequence.num_cached_tokens
        if counts is None:
            has_run = sequence.num_computed_tokens > found
            counts = self._count_media(sequence, 0 if has_run else found)
            counts[DEVICE] += found if has_run else 0
        return self._by_medium(counts)

    def match_ids(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> int:
        """Return the tokens of a prefix that the device would have after `adding`."""
        device, host = self.host.match_ids(ids, options, most)
        return host if host - device >= max(self.min_tokens, 1) else device

    def settling(self) -> None:
        """Wait for copies between device and host, and end them."""
        self.host.drain()
        self._write()

    def releasing(self) -> None:
        """Move all cached prefixes to the host if it holds what the device does not; otherwise it has its copies."""
        if self.write != "on_evict" or self.host.is_released:
            return
        states = self._parts.state.states
        pools = self._parts.state.tables.pools[: len(self._parts.cached_groups)]
        used = [pool.num_used for pool in pools]
        with suppress(PagecoreError):  # what is left is evicted
            self.host.spill(used if states is None else [*used, states.checkpoints.num_used])
        self.settling()

    def _write(self) -> None:
        """Write what backups have published to the stores."""
        self._stores.write(self.host.poll())

    def _back_up(self, sequence: Sequence, is_last: bool = False) -> None:
        most = self._hits.limit(sequence) if self.write == "second_hit" else None
        with suppress(PagecoreError):  # counted by the host tier
            self.host.backup(sequence, max_tokens=most, is_last=is_last)

    def _touch(self, sequence: Sequence, length: int) -> None:
        """Report the first tokens of a sequence as used: the stores have not seen what device and host served."""
        if length and self._stores.counts_uses:
            options = options_of(sequence)
            self._stores.touch(sequence.tokens[:length], options.namespace, options.spans)

    def _write_whole(self, sequence: Sequence, most: int) -> None:
        """Write up to `most` tokens of what the host has of a sequence to the stores, after its backup."""
        ended = self.host.poll()
        tokens, options = sequence.tokens[: min(sequence.num_computed_tokens, most)], options_of(sequence)
        # Copies of other sequences may end meanwhile.
        own = [one.start for one in ended if _is_of(one, tokens, options)]
        stop = min(own, default=len(tokens) // self._parts.block_size * self._parts.block_size)
        before = Backup(tokens, options.namespace, options.spans, 0, stop)
        self._stores.write([before, *ended])

    def _note_promoted(self, ids: NDArray[np.int32], options: RetentionOptions, start: int) -> None:
        """Note that the tokens of a prefix from `start` on were promoted, after requests may have loaded them."""
        start = start // self._parts.block_size * self._parts.block_size
        media = np.maximum(self._stores.loaded.of(ids, options), HOST)
        self._stores.loaded.forget(ids, options)
        self._promoted.note(ids, options, start, media[start // self._parts.block_size :])

    def _count_media(self, sequence: Sequence, found: int) -> NDArray[np.int64]:
        """Return the first `found` tokens of a sequence, which it reuses, by the index of the medium that had them."""
        media = self._promoted.of(sequence.tokens[:found], options_of(sequence))
        return np.bincount(media, minlength=len(self._stores.media)) * self._parts.block_size

    def _by_medium(self, counts: NDArray[np.int64]) -> dict[str, int]:
        """Return counts of tokens by the name of their medium."""
        tokens = np.zeros(len(self._stores.media), np.int64)
        tokens[: len(counts)] = counts
        named = zip(self._stores.media, tokens.tolist(), strict=True)
        return {medium: count for index, (medium, count) in enumerate(named) if count or index <= HOST}


def _is_of(backup: Backup, tokens: NDArray[np.int32], options: RetentionOptions) -> bool:
    """Return True if a backup is of a prefix of these tokens."""
    if type(backup.namespace) is not type(options.namespace) or backup.namespace != options.namespace:
        return False
    return np.array_equal(backup.tokens, tokens[: len(backup.tokens)])
