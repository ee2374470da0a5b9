"""Calls that a cache makes to its tiers, under its lock: promotions, backups, spills, and counts of hits."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.cache.parts import CacheParts
from pagecore.cache.prefix.retention import RetentionOptions, Spans
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.state._state import Held
from pagecore.cache.step._step import lacked, lacked_slots, shortage
from pagecore.errors import PagecoreError
from pagecore.tiers.host.methods.records import Backup
from pagecore.tiers.host.operations._operations import (
    count_once,
    is_new,
    newly_run,
    options_of,
    origin_of,
    version_of,
)
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.arguments import Write
from pagecore.tiers.manager.hits.inherited import InheritedPrefixes
from pagecore.tiers.manager.hits.origins import DEVICE, HOST, Origins, PrefixIdentity, PrefixMedia
from pagecore.tiers.manager.hits.second_hit import SecondHits
from pagecore.tiers.manager.stores import StoreSide
from pagecore.tiers.manager.writing.stream_parts import StreamedPrefix
from pagecore.tiers.manager.writing.streams import ALL

# Blocks of prompts that "second_hit" remembers for each state of a host without blocks.
BLOCKS_PER_STATE = 256


class CacheObserver:
    """Base class of `Tiers`, which a cache calls before and after what it does (`CacheState.observer`)."""

    _stores: StoreSide

    def __init__(self, parts: CacheParts, host: HostTier, write: Write, min_tokens: int, num_stores: int) -> None:
        self.host, self.write, self.min_tokens = host, write, min_tokens
        self._parts = parts
        self.num_origins = most = _num_origins(parts, host)
        self._hits = SecondHits(parts.block_size, most)
        self._promoted = Origins(parts.block_size, most)  # blocks that were promoted, until a prompt uses them
        is_filled = num_stores > 0 and host.tree.num_nodes > 0 and write != "explicit"
        self._inherited = InheritedPrefixes(parts.block_size, most) if is_filled else None
        self._hit_counts = np.zeros(HOST + 1 + num_stores, np.int64)  # by medium, over all sequences

    def adding(self, ids: NDArray[np.int32], options: RetentionOptions, most: int) -> None:
        """Promote what the host has of a prefix; a failed copy leaves its tokens to be computed."""
        array = np.asarray(ids, np.int32)
        before = self.host.num_promoted_tokens
        with suppress(PagecoreError):  # counted by the host tier
            now = self.host.promote_ids(array, options, most, self.min_tokens)
            if self.host.num_promoted_tokens > before:
                self._note_promoted(array[:now], options, now - (self.host.num_promoted_tokens - before))

    def copying(self, sequences: list[Sequence]) -> None:
        """Count the hits of sequences that are copied before their first step: their copies count none."""
        for sequence in sequences:
            if is_new(sequence) and sequence.num_tokens:
                self._note_first(sequence)

    def preparing(self, sequences: list[Sequence], counts: ArrayLike) -> None:
        """Save what a step will evict, if the step has room."""
        if self.write == "on_evict" and not any(shortage(self._parts.state, sequences, counts)):
            state = self._parts.state
            self.evicting(lacked(state, sequences, counts) + lacked_slots(state, sequences, counts))

    def evicting(self, missing: list[int]) -> None:
        """Save what an operation will evict: blocks of each group of the block tables, and state slots after them."""
        cached = missing[: len(self._parts.cached_groups)]  # the tails of sealed blocks follow them
        cached += missing[self._parts.state.tables.num_groups :]
        cached = [max(count, 0) for count in cached]  # a group that has more than enough lacks fewer than 0
        if self.write == "on_evict" and any(cached):
            with suppress(PagecoreError):  # the operation evicts what is left
                self.host.spill(cached)
            self._write()

    def committed(self, sequences: list[Sequence]) -> None:
        """Count hits, and back up what a step has published."""
        for sequence in newly_run(sequences):
            self._note_first(sequence)
        if self.write in ("through", "second_hit"):
            streams, num_cut = self._stores.streams, self.host.num_cut
            is_streamed = streams.has_owners
            # A step rarely completes a block of a decoding sequence; limits of second hits may change without one.
            limits = [self._hits.limit(sequence) for sequence in sequences] if self.write == "second_hit" else None
            for sequence in self.host.list_changed(sequences, max_tokens=limits):
                self._back_up(sequence, streams.limit_of(sequence) if is_streamed else None)
            self._write()
            if is_streamed or self.host.num_cut > num_cut:
                for sequence in sequences:
                    self._stream(sequence)

    def _note_first(self, sequence: Sequence) -> None:
        """Note a use of the prompt of a sequence that has computed its first tokens; count it if it is new."""
        found = sequence.num_cached_tokens
        if is_new(sequence):
            reused = self._reused(sequence)
            counts = reused.counts(found, self._parts.block_size)
            count_once(sequence, reused if counts[DEVICE] < found else None, counts, self._hit_counts)
        self._promoted.forget(sequence.tokens, options_of(sequence))
        self._touch(sequence, found)  # or what is written after it could evict it
        if found:
            self._write_missing(sequence, found)
        if self.write == "second_hit":
            self._hits.note(sequence)

    def removing(self, sequence: Sequence) -> None:
        """Back up what a sequence leaves to the prefix cache, unless it is swapped out."""
        for each in newly_run([sequence]):  # an interrupt came before the end of its first commit
            self._note_first(each)
        if sequence.row >= 0:
            if self.write not in ("explicit", "on_evict"):
                self._back_up(sequence, self._stores.streams.limit_of(sequence), is_last=True)
                self._write()
                self._stream(sequence)
            self._touch(sequence, sequence.num_computed_tokens)
        self._hits.forget(sequence)
        self._stores.streams.forget_owner(sequence)

    def hit_tokens(self, sequence: Sequence) -> dict[str, int]:
        """Return the reused tokens of a sequence by the medium that had them."""
        reused = self._reused(sequence) if is_new(sequence) else origin_of(sequence)
        if reused is None:
            reused = PrefixMedia(np.empty(0, np.int64), self._stores.media)
        return _by_medium(reused.counts(sequence.num_cached_tokens, self._parts.block_size), reused.names)

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
        backups = self._ended_backups()
        if self._inherited is not None:
            backups = [self._inherited.whole(each) for each in backups]
        self._stores.write(backups)

    def _write_missing(self, sequence: Sequence, found: int) -> None:
        """Write what a sequence reuses and a store lacks: it has failed to take it, or was attached later."""
        tokens, options = sequence.tokens[:found], options_of(sequence)
        if self._inherited is not None:
            stop = found // self._parts.block_size * self._parts.block_size
            whole = self._inherited.whole(Backup(tokens[:stop], options.namespace, options.spans, stop, stop))
            if whole.start < stop:
                self._stores.write([whole])
        if self._stores.has_unsaved:
            self._stores.write_again(tokens, options.namespace, options.spans)

    def _ended_backups(self) -> list[Backup]:
        """Return the backups that have ended; what the host has from them is from no store."""
        with Held(self._parts.state.lock):
            ended = self.host.poll()
            for backup in ended:
                self._stores.loaded.forget(backup.tokens[: backup.stop], backup, backup.start)
        return ended

    def _back_up(self, sequence: Sequence, limit: int | None = None, is_last: bool = False) -> None:
        most = self._hits.limit(sequence) if self.write == "second_hit" else None
        if limit is not None:
            most = limit if most is None else min(most, limit)
        with suppress(PagecoreError):  # counted by the host tier
            self.host.backup(sequence, max_tokens=most, is_last=is_last)

    def _stream(self, sequence: Sequence, most: int | None = None) -> None:
        """Write the blocks for which the host has no room to the stores, after those for which it had."""
        streams = self._stores.streams
        if not streams.is_on:
            return
        with suppress(PagecoreError):
            wanted = ALL if most is None else most
            if most is None and self.write == "second_hit":
                wanted = self._hits.limit(sequence)
            version = version_of(sequence)
            there, end = self.host.unsaved(sequence, wanted, streams.done_of(sequence, version))
            if end:
                options = options_of(sequence)
                prefix = StreamedPrefix(np.array(sequence.tokens[:end], np.int32), options.namespace, options.spans)
                self._stores.stream(sequence, prefix, there, version)

    def _touch(self, sequence: Sequence, length: int) -> None:
        """Report the first tokens of a sequence as used: the stores have not seen what device and host served."""
        if length and self._stores.counts_uses:
            options = options_of(sequence)
            self._stores.touch(sequence.tokens[:length], options.namespace, options.spans)

    def _write_whole(self, sequence: Sequence, most: int) -> None:
        """Write up to `most` tokens of what the host has of a sequence to the stores, after its backup."""
        ended = self._ended_backups()
        tokens, options = sequence.tokens[: min(sequence.num_computed_tokens, most)], options_of(sequence)
        # Copies of other sequences may end meanwhile.
        own = [one.start for one in ended if _is_of(one, tokens, options)]
        stop = min(own, default=len(tokens) // self._parts.block_size * self._parts.block_size)
        before = Backup(tokens, options.namespace, options.spans, 0, stop)
        self._stores.write([before, *ended])

    def bring(self, ids: NDArray[np.int32], namespace: Hashable, spans: Spans | None, most: int) -> None:
        """Promote what the host has of a prefix, for a load that continues it; a failed copy brings nothing."""
        prefix: dict[str, Any] = {"namespace": namespace, "spans": spans}
        with suppress(PagecoreError):  # counted by the host tier
            before = self.host.match_both(ids, max_tokens=most, **prefix)[0]
            now = self.host.promote(ids, max_tokens=most, **prefix)
            if now > before:
                self._note_promoted(ids[:now], StreamedPrefix(ids[:now], namespace, spans), before)

    def note_streamed(
        self, ids: NDArray[np.int32], prefix: PrefixIdentity, start: int, media: NDArray[np.int64]
    ) -> None:
        """Note the media from which the blocks of a prefix came to the device, from token `start` on."""
        self._promoted.note(ids, prefix, start, media)

    def _note_promoted(self, ids: NDArray[np.int32], options: PrefixIdentity, start: int) -> None:
        """Note that the tokens of a prefix from `start` on were promoted, after requests may have loaded them."""
        start = start // self._parts.block_size * self._parts.block_size
        media = np.maximum(self._stores.loaded.media_of(ids, options), HOST)
        self._stores.loaded.forget(ids, options)
        self._promoted.note(ids, options, start, media[start // self._parts.block_size :])

    def _reused(self, sequence: Sequence) -> PrefixMedia:
        """Return the media of the tokens that a sequence reuses, before its first step."""
        tokens = sequence.tokens[: sequence.num_cached_tokens]
        return PrefixMedia(self._promoted.media_of(tokens, options_of(sequence)), self._stores.media)

    def _hits_by_medium(self) -> dict[str, int]:
        """Return the reused tokens of all sequences by medium."""
        return _by_medium(self._hit_counts, self._stores.media)


def _num_origins(parts: CacheParts, host: HostTier) -> int:
    """Return the blocks of prefixes to remember: what any group of the host or the device has, or the longest prompt.

    A group with a window has few blocks of a long prefix.
    """
    tables = parts.state.tables
    if host.num_groups:
        most = max(*host.num_blocks, *(pool.num_blocks for pool in tables.pools))
    else:
        most = host.num_blocks[0] * BLOCKS_PER_STATE
    return max(most, tables.max_blocks_per_sequence) + 1  # block 0 is unused


def _by_medium(counts: NDArray[np.int64], names: tuple[str, ...]) -> dict[str, int]:
    """Return counts of tokens by the name of their medium; those of stores only where there are any."""
    named = enumerate(zip(names, counts.tolist(), strict=False))
    return {medium: count for index, (medium, count) in named if count or index <= HOST}


def _is_of(backup: Backup, tokens: NDArray[np.int32], options: RetentionOptions) -> bool:
    """Return True if a backup is of a prefix of these tokens."""
    if type(backup.namespace) is not type(options.namespace) or backup.namespace != options.namespace:
        return False
    return np.array_equal(backup.tokens, tokens[: len(backup.tokens)])
