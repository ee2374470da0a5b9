"""Fuzz targets of the paged cache, its sequences, batches and swap spaces."""

import contextlib

import numpy as np

from pagecore import (
    InvalidSequence,
    OutOfBlocks,
    PagedKVCache,
    Sequence,
    SwapSpace,
)
from pagecore.cache import Alias
from tests.cache.fuzz_base import SPEC, WINDOWED, Target
from tests.cache.state import reachable


class Paged(Target):
    methods = (
        "cache.add_sequence tokens:ids id=name namespace=space_name spans=spans max_tokens=some",
        "priority.add_sequence tokens:ids priority=number time_to_live=number",
        "rank.add_sequence tokens:ids rank=number",
        "cache.match_length tokens:ids namespace=space_name spans=spans max_tokens=some",
        "cache.append_tokens sequences:sequences ids:ids",
        "cache.fork sequence:sequence id=name",
        "cache.reorder sequences:sequences parents:sequences",
        "cache.truncate sequences:sequences lengths:one",
        "cache.remove sequence:sequence rank=none",
        "rank.remove sequence:sequence rank=number",
        "cache.swap_out sequences:sequences space:space",
        "cache.try_swap_out sequences:sequences space:space",
        "cache.swap_in sequences:swapped",
        "cache.try_swap_in sequences:swapped",
        "cache.make_batch max_sequences=some max_tokens=some",
        "cache.prepare sequences:sequences counts:one out=batch stream=none",
        "cache.try_prepare sequences:sequences counts:one out=batch stream=none",
        "cache.prepare_arrival sequence:sequence num_tokens:one out=batch stream=none",
        "cache.try_prepare_arrival sequence:sequence num_tokens:one out=batch stream=none",
        "cache.held_from sequence:sequence group=layer",
        "cache.shortage sequences:sequences counts:one",
        "cache.shortages sequences:sequences counts:one",
        "cache.commit batch:batch accepted=accepted",
        "cache.abandon batch:batch",
        "cache.write layer:layer key:tokens value:tokens batch:batch stream=none",
        "cache.attend layer:layer query:tokens batch:batch scale=number window=some softcap=number out=tokens "
        "plan=none causal=yes sinks=ids",
        "cache.block_map group:layer",
        "cache.block_table group:layer",
        "cache.group_of layer:layer",
        "cache.spec layer:layer",
        "cache.key layer:layer",
        "cache.value layer:layer",
        "batch.group layer:layer",
        "batch.copied_blocks layer:layer",
        "sequence.__exit__ kind:none error:none trace:none",
        "PagedKVCache layers:spec num_blocks!some num_layers=one block_size=some memory=none max_sequences=some "
        "max_tokens_per_sequence=some device=device layout=layout parallel=parallel prefix_cache=yes "
        "eviction_policy=policy index_dtype=index clock=clock",
        "PagedKVCache layers:specs num_blocks!blocks",
        "SwapSpace cache:cache num_blocks!some memory=none layout=layout dtype=dtype",
        "Sequence owner:cache id:name row:one ids:array",
    )

    def __init__(self, random):
        super().__init__(random)
        options = {"block_size": 4, "max_sequences": 6}
        self.named = {
            "PagedKVCache": PagedKVCache,
            "SwapSpace": SwapSpace,
            "Sequence": Sequence,
            "priority": PagedKVCache(SPEC, num_blocks=9, eviction_policy="priority", **options),
            "rank": PagedKVCache(SPEC, num_blocks=9, eviction_policy="rank", **options),
        }
        cache = self.named["cache"] = PagedKVCache([SPEC, WINDOWED], num_blocks=17, **options)
        self.spaces = [SwapSpace(cache, num_blocks=9) for _ in range(2)]
        self.living = [cache.add_sequence(range(4 * i + 3)) for i in range(4)]
        cache.commit(cache.prepare(self.living, [3, 7, 8, 2]))
        cache.swap_out(self.living[2], self.spaces[0])
        self.ready = cache.make_batch(4, 16)
        self.flying = cache.prepare(self.living[:1], 2)
        self.named |= {"batch": self.flying, "sequence": self.living[1]}

    def mischief(self):
        cache = self.named["cache"]
        choice = self.random.integers(8)
        if choice == 0:
            cache.remove(self.sequence())
        elif choice == 1:
            self.living.append(cache.add_sequence(self.ids()))
        elif choice == 2:
            cache.swap_out(self.sequence(), self.space())
        elif choice == 3:
            cache.commit(self.flying)
        elif choice == 4:
            cache.truncate(self.sequence(), 0)
        elif choice == 5:
            with contextlib.suppress(OutOfBlocks):
                cache.prepare([self.sequence()], 3, out=self.ready)
        elif choice == 6:
            cache.evict_prefix(self.ids())
            cache.revoke_prefix(self.ids(), valid=self.random.integers(9))
        else:
            cache.clear_prefix_cache()

    def check(self):
        for name in ("cache", "priority", "rank"):
            self.named[name].check_invariants()

    def finish(self):
        cache = self.named["cache"]
        for batch in (self.flying, self.ready):
            if batch.in_flight:
                cache.abandon(batch)
        self.depth = 99  # after this line nothing calls back
        for sequence in reachable(cache, Sequence):
            with contextlib.suppress(InvalidSequence):  # a sequence of another cache, found by its id
                cache.remove(sequence)
        cache.clear_prefix_cache()
        self.check()
        stats = cache.stats()
        left = (stats.num_sequences, stats.num_used_blocks, stats.num_cached_blocks, stats.num_swapped_blocks)
        assert left == (0, 0, 0, 0), f"sequences, used, cached and swapped blocks at the end: {left}"

    def state(self):
        """Return the part of the state that an error must leave unchanged."""
        cache = self.named["cache"]
        maps = [cache.block_map(group) for group in range(2)]
        counts = [array.tolist() for one in maps for array in (one.owner, one.holders, one.cached, one.num_tokens)]
        lines = [(one.num_tokens, one.num_computed_tokens, one.is_swapped, one.row) for one in self.living]
        return maps[0].sequences, counts, lines, cache.stats(), self.ready.in_flight, self.flying.in_flight

    def sequence(self):
        return self.living[self.random.integers(len(self.living))]

    def sequences(self):
        return [self.living[i] for i in self.random.permutation(len(self.living))[: self.random.integers(1, 3)]]

    def swapped(self):
        return [one for one in self.living if one.is_swapped] or self.sequences()

    def batch(self):
        return self.ready if self.one() == 0 else self.flying

    def accepted(self):
        return [1]

    def space(self):
        return self.spaces[self.random.integers(2)]

    def cache(self):
        return self.named["cache"]

    def name(self):
        return f"name {self.random.integers(1 << 30)}"

    def space_name(self):
        return ("adapter", self.one())

    def spans(self):
        return [(0, 2, b"digest")]

    def layer(self):
        return int(self.random.integers(2))

    def tokens(self):
        return np.ones((2, 2, 8), np.float32)

    def policy(self):
        return "lru"

    def index(self):
        return "int64"

    def clock(self):
        return lambda: 0.0

    def specs(self):
        return [SPEC, WINDOWED, Alias(0)]

    def blocks(self):
        return [9, 9]
