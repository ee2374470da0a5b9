"""RadixTree against a dictionary of prefixes and peers: insert, match, lock, evict, drain, by tree and block size.

The load: sequences of 1,024 tokens in groups of 100 that share 512, in trees of 1,000 to 100,000 sequences. A sample is
a run of single calls, and its time is that of one call. "warm": the same eight keys repeatedly, keys that were looked
up just before, or leaves after others have been evicted. "cold": random keys, or the oldest leaves, after the
processor's caches were filled with other data.

Times are CPU time instead of wall time: a single thread does all work, and time taken by other processes does not
count.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.harness.runner import Bench, Job
from bench.harness.targets import (
    DRAIN_NS_MAX,
    EVICT_US_MAX,
    FLATNESS_MIN,
    INSERT_US_MAX,
    LOCK_US_MAX,
    MATCH_US_MAX,
    PREFIX_SEQUENCES,
)
from bench.index.prefix_load import CacheFlush, Load
from bench.index.prefix_sides import ChainedDict, Ours, Side, check_found

BLOCK_SIZES = (1, 16, 64)
SEQUENCES = (1000, PREFIX_SEQUENCES, 100_000)
CLOCK = time.process_time
# Calls in a sample: lookups, and changes of the tree.
LOOKUPS, CHANGES = 256, 100
WARM_KEYS = 8
# Sequences whose unshared halves total 65,536 tokens.
MANY = 128
# Refilling a cache takes seconds.
DRAINS = 3


def run(bench: Bench, options: argparse.Namespace) -> None:
    """Run every block size and tree size; the tree of 10,000 is a control of the tree of 100,000."""
    bench.effort = replace(bench.effort, figure_s=min(bench.effort.figure_s, 0.5))
    flush = CacheFlush(bench.kind == "smoke")
    for block_size in BLOCK_SIZES:
        smaller: list[Side] = []
        for num_sequences in bench.pick(SEQUENCES, (64,), quick=(PREFIX_SEQUENCES,)):
            load = Load(num_sequences, block_size, *bench.pick((), (16, 64)))
            sides = [Ours(load), *_controls(load, options.peer), *smaller]
            figures = _Figures(bench, load, sides, flush)
            figures.changes()
            figures.lookups()
            figures.locks()
            if num_sequences == PREFIX_SEQUENCES or bench.kind == "smoke":
                figures.batches()
            figures.drain()
            figures.memory()
            smaller = [sides[0]] if num_sequences == PREFIX_SEQUENCES else []


def _controls(load: Load, peers: list[str]) -> list[Side]:
    sides: list[Side] = [ChainedDict(load)] if load.num_blocks <= ChainedDict.BLOCKS_MAX else []
    for peer in dict.fromkeys(peers):
        sides += importlib.import_module(f"bench.peers.{peer}_prefix").sides(load)
    return sides


class _Figures:
    """The figures of one load; the first side is pagecore, and the others are its controls."""

    def __init__(self, bench: Bench, load: Load, sides: list[Side], flush: CacheFlush) -> None:
        self.bench, self.load, self.sides, self.flush = bench, load, sides, flush
        self.title = f"{load.num_sequences:,} x 1024, block {load.block_size}"
        self.is_target = load.num_sequences == PREFIX_SEQUENCES
        self.lookups_a_sample = bench.pick(LOOKUPS, WARM_KEYS)
        self.changes_a_sample = bench.pick(CHANGES, 4)

    def changes(self) -> None:
        """Time insert and evict, while the order of use is still that of the ring."""
        count = self.changes_a_sample
        self._changes("insert, warm", self._insert_job, warm=True, at_most=INSERT_US_MAX)
        self._changes("insert, cold", self._insert_job, warm=False)
        flatness = {side.name: FLATNESS_MIN for side in self.sides[1:] if isinstance(side, Ours)}
        self._changes("evict a leaf, warm", self._evict_job, warm=True, at_most=EVICT_US_MAX, at_least=flatness)
        self._changes("evict a leaf, cold", self._evict_job, warm=False)
        many = min(MANY, self.load.num_sequences // 2)
        self._compare(
            f"evict {many * self.load.leaf_blocks * self.load.block_size:,} tokens",
            lambda side: Job(partial(side.evict_at_once, many), after=partial(_refill, side, many)),
            partial(self._check_ring, many),
        )
        self._check_ring(count)

    def lookups(self) -> None:
        """Time match: the whole key, half of it, or nothing is found."""
        for kind in ("hit", "half", "miss"):
            for warm in (True, False):
                most = MATCH_US_MAX[self.load.block_size] if kind == "hit" and warm and self.is_target else None
                self._lookup(f"match, {kind}, {_temperature(warm)}", kind, warm, "match", at_most=most)

    def locks(self) -> None:
        """Time a second lock of a locked path, and match, lock and unlock together."""
        for warm in (True, False):
            most = LOCK_US_MAX if warm and self.is_target else None
            self._compare(
                f"lock + unlock, {_temperature(warm)}", partial(self._lock_job, warm), self._check_locks, at_most=most
            )
            self._lookup(f"match + lock + unlock, {_temperature(warm)}", "hit", warm, "match_and_lock")

    def batches(self) -> None:
        """Time the calls that take all sequences of a step, against single calls."""
        ours, count = self.sides[0], self.changes_a_sample
        assert isinstance(ours, Ours)
        # The lookups changed the order of use.
        ours.drain()
        ours.fill()
        before = partial(ours.make_room, count)
        self.bench.compare(
            f"{self.title}: insert_all of {count}",
            Job(ours.insert_all, before=before, calls=count),
            {"insert, one by one": Job(ours.insert_missing, before=before, calls=count)},
            check=partial(self._check_ring, count, [ours]),
            each="sequence",
            sizes=self.load.sizes | {"batch": count},
        )
        keys = _Keys(ours.keys["hit"], count, warm=True)
        keys.take()
        self.bench.compare(
            f"{self.title}: match_all of {count}",
            Job(lambda: ours.tree.match_all(keys.now), calls=count),
            {"match, one by one": Job(lambda: ours.match(keys.now), calls=count)},
            check=partial(check_found, ours, "hit", keys.now),
            each="sequence",
            sizes=self.load.sizes | {"batch": count},
        )

    def drain(self) -> None:
        """Time the eviction of everything at once."""

        def check() -> None:
            for side in self.sides:
                side.drain()
                assert set(side.lengths(side.keys["hit"][: self.lookups_a_sample])) == {0}, side.name
                side.fill()

        self._compare(
            "drain",
            lambda side: Job(side.drain, after=side.fill, calls=side.load.num_sequences),
            check,
            unit="ns",
            each="leaf",
            rounds=DRAINS,
            at_most=DRAIN_NS_MAX if self.load.num_sequences == SEQUENCES[-1] else None,
        )

    def memory(self) -> None:
        """Report the tree's memory per token, which includes 4 bytes for the token and 4 bytes for each block."""
        ours, tokens = self.sides[0], self.load.num_blocks * self.load.block_size
        assert isinstance(ours, Ours)
        self.bench.fact(f"{self.title}: memory", ours.tree.nbytes / tokens, "bytes a token")

    def _changes(self, name: str, job: Callable[..., Job], at_most: float | None = None, **options: Any) -> None:
        about = {"at_least": options.pop("at_least", {}), "at_most": at_most if self.is_target else None}
        self._compare(name, partial(job, **options), partial(self._check_ring, self.changes_a_sample), **about)

    def _insert_job(self, side: Side, warm: bool) -> Job:
        count = self.changes_a_sample

        def before() -> None:
            side.make_room(count)
            if warm:
                side.match([side.keys["hit"][number] for number in side.missing])
            else:
                self.flush()

        return Job(side.insert_missing, before=before, after=side.settle, calls=count)

    def _evict_job(self, side: Side, warm: bool) -> Job:
        count = self.changes_a_sample

        def before() -> None:
            if warm:
                side.evict_leaves(count)
                _refill(side, count)
                side.glance(count)
            else:
                self.flush()

        return Job(partial(side.evict_leaves, count), before=before, after=partial(_refill, side, count), calls=count)

    def _lookup(self, name: str, kind: str, warm: bool, call: str, **about: Any) -> None:
        def job(side: Side, call: str = call) -> Job:
            keys = _Keys(side.keys[kind], self.lookups_a_sample, warm)

            def before() -> None:
                keys.take()
                if not warm:
                    self.flush()

            look_up = getattr(side, call)
            return Job(lambda: look_up(keys.now), before=before, calls=self.lookups_a_sample)

        def check() -> None:
            for side in self.sides:
                check_found(side, kind, side.keys[kind][: self.lookups_a_sample])

        others = {}
        if call == "match":
            for side in self.sides:
                if side.other_match is not None:
                    others[side.other_match[0]] = job(side, side.other_match[1])
        self._compare(name, job, check, others, **about)

    def _lock_job(self, warm: bool, side: Side) -> Job:
        keys = _Keys(side.keys["hit"], self.lookups_a_sample, warm)
        held: list[Any] = []

        def before() -> None:
            keys.take()
            held[:] = side.hold(keys.now)
            if not warm:
                self.flush()

        return Job(
            lambda: side.lock_again(held),
            before=before,
            after=lambda: side.release(held),
            calls=self.lookups_a_sample,
        )

    def _check_locks(self) -> None:
        """A locked path stays locked after a second lock and unlock."""
        ours = self.sides[0]
        assert isinstance(ours, Ours)
        held = ours.hold(ours.keys["hit"][:1])
        ours.lock_again(held)
        assert ours.tree.protected("full") == ours.load.blocks.shape[1]
        ours.release(held)
        assert ours.tree.protected("full") == 0

    def _check_ring(self, count: int, sides: list[Side] | None = None) -> None:
        """Check that evicted sequences are gone and an insert restores them.

        A peer's match makes what it finds the most recently used.
        """
        for side in self.sides if sides is None else sides:
            side.make_room(count)
            keys = side.keys["hit"]
            check_found(side, "half", [keys[number] for number in side.missing])
            side.insert_missing()
            side.settle()
            check_found(side, "hit", [keys[number] for number in side.missing])
            if isinstance(side, Ours):
                assert side.tree.evictable("full") == side.load.num_blocks

    def _compare(
        self,
        name: str,
        job: Callable[[Side], Job],
        check: Callable[[], None],
        others: Mapping[str, Job] | None = None,
        **about: Any,
    ) -> None:
        subject, *controls = self.sides
        at_least = {side.name: side.targets[name] for side in controls if self.is_target and name in side.targets}
        self.bench.compare(
            f"{self.title}: {name}",
            job(subject),
            {side.name: job(side) for side in controls} | dict(others or {}),
            check=check,
            at_least=at_least | about.pop("at_least", {}),
            sizes=self.load.sizes,
            **about,
        )


class _Keys:
    """The keys of the next sample: a few in turn, or the next part of all keys in random order."""

    def __init__(self, keys: list[Any], count: int, warm: bool) -> None:
        order = range(WARM_KEYS) if warm else np.random.default_rng(1).permutation(len(keys))
        chosen = [keys[i] for i in order]
        self._ring = chosen * (-(-count // len(chosen)) + 1)
        self._count, self._turn, self._start = count, len(chosen), 0
        self.now: list[Any] = []

    def take(self) -> None:
        self.now = self._ring[self._start : self._start + self._count]
        self._start = (self._start + self._count) % self._turn


def _refill(side: Side, count: int) -> None:
    side.note_missing(count)
    side.insert_missing()
    side.settle()


def _temperature(warm: bool) -> str:
    return "warm" if warm else "cold"
