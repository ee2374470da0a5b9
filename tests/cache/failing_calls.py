"""Calls of static caches, and conversions between formats in paged ones, for tests in which memory runs out."""

import zlib
from functools import partial

import numpy as np

from pagecore import AttentionSpec, CrossSpec, PagedKVCache, StateSpec, StaticKVCache, SwapSpace
from pagecore.errors import PagecoreError
from tests.cache.caches import normal
from tests.cache.hybrid_models import CONV, TEMPORAL
from tests.failing_calls import Case

HEADS, DIM = 2, 32
FORMATS = ["float8_e4m3fn", "int8_token", "int4_token", "nvfp4", "mxfp8"]
np.unique(np.zeros(1))  # imports numpy.ma, whose allocations would count as those of the first call that needs it


def spec(format=None, **options):
    return AttentionSpec(HEADS, DIM, dtype="float32", num_query_heads=4, format=format, **options)


CROSS = CrossSpec(HEADS, DIM, dtype="float32", max_tokens=9)
SEALED = spec("kivi2", residual=20)
STATES = [StateSpec((CONV, TEMPORAL), chunk=4, interval=4, checkpoint_format="int8"), spec("int8_token")]


def checksum(array):
    return zlib.crc32(array.tobytes())


def tokens(count, seed, gap=0):
    """Return ``[batch, heads, tokens, dim]``; with a gap, neither heads nor tokens can be merged with the batch."""
    return normal(3, HEADS, count + gap, DIM, seed=(seed, count))[:, :, gap:]


class Static:
    """A static cache of three sequences with four tokens each, and arrays for its next tokens."""

    def __init__(self, count=3, gap=0, format=None):
        self.cache = StaticKVCache([spec(format), spec(format), CROSS], max_batch_size=3, max_length=12)
        self.cache.update(1, tokens(4, 0), tokens(4, 1), 0)
        self.cache.update(2, tokens(5, 0), tokens(5, 1), 0)
        self.new = tokens(count, 2, gap), tokens(count, 3, gap)

    def signature(self):
        arrays = [each for one in (self.cache._own, self.cache._cross) for each in one.named.values()]
        return [self.cache.length(layer) for layer in range(3)], [checksum(array.numpy()) for array in arrays]


class Made:
    """Room for a cache that a call makes."""

    cache = None

    def signature(self):
        return None if self.cache is None else (repr(self.cache), self.cache.nbytes)


class Paged:
    """A paged cache with a sequence of some computed tokens, and a step in flight with more."""

    def __init__(self, layers, *, computed, more=0, **options):
        self.cache = PagedKVCache(layers, num_blocks=12, max_sequences=3, prefix_cache=False, **options)
        self.sequence = self.cache.add_sequence(range(computed + more))
        self.seed = 0
        self.step(computed)
        self.cache.commit(self.batch)
        if more:
            self.step(more)

    def step(self, count):
        self.batch = self.cache.prepare([self.sequence], count)
        for layer in range(self.cache.num_layers):
            if isinstance(self.cache.spec(layer), StateSpec):
                self.write_states(layer)
            else:
                self.cache.write(layer, self.rows(count), self.rows(count), self.batch)

    def rows(self, count):
        self.seed += 1
        return normal(count, HEADS, DIM, seed=self.seed)

    def write_states(self, layer):
        for slots in (self.batch.state_write, self.batch.checkpoint_write):
            for plane in (self.cache.plane(name, layer).numpy() for name in ("conv", "temporal")):
                self.seed += 1
                plane[slots.numpy()[0]] = normal(*plane.shape[1:], seed=self.seed)

    def signature(self):
        """Return what the cache has of the sequence, without the numbers of its blocks."""
        self.cache.check_invariants()
        sequence, stats = self.sequence, self.cache.stats()
        free = stats.num_free_blocks, stats.num_free_states, stats.num_free_checkpoints
        lengths = sequence.num_computed_tokens, sequence.num_sealed_tokens, sequence.num_dropped_tokens
        return free, lengths, sequence.is_swapped, sequence.tokens.tolist(), self.content()

    def content(self):
        """Return checksums of the computed tokens in each plane of each pool, and of the states."""
        if self.sequence.is_swapped:
            self.cache.swap_in(self.sequence)
        parts, sequence, size = self.cache._parts, self.sequence, self.cache.block_size
        found = [[], []]
        for number, (group, pool) in enumerate(zip(parts.groups, parts.store.pools, strict=True)):
            blocks = self.cache.block_table(number).numpy()[sequence.row]
            is_sealed = parts.seals_blocks and not group.is_tail
            begin = sequence.num_sealed_tokens if group.is_tail else 0
            end = sequence.num_sealed_tokens if is_sealed else sequence.num_computed_tokens
            for plane in (plane.numpy() for plane in pool.planes()):
                rows = [plane[blocks[at // size]] if is_sealed else plane[blocks[at // size], at % size]
                        for at in range(begin, end)]  # fmt: skip
                found[0].append([checksum(row) for row in rows])
        if parts.state.states is not None:
            kept = self.cache.checkpoint(sequence)
            slots = (parts.store.states, self.cache.state_slot(sequence)), (parts.store.checkpoints, kept and kept[0])
            found[1] = [[checksum(plane.numpy()[slot or 0]) for plane in pool.planes()] for pool, slot in slots]
        return found


class Written(Paged):
    """A step in flight, keys and values to write, and all bytes of the pools."""

    def __init__(self, layer):
        super().__init__(layer, computed=9, more=5, block_size=4, scrub=True)
        self.new = self.rows(5), self.rows(5)

    def write(self):
        self.cache.write(0, *self.new, self.batch)

    def signature(self):
        return [checksum(plane.numpy()) for pool in self.cache._parts.store.pools for plane in pool.planes()]


class Swapped(Paged):
    """A sequence with a format, and a swap space in which it may be."""

    def __init__(self, layers, *, is_out, **options):
        super().__init__(layers, computed=9, block_size=4, **options)
        states = {"num_states": 4} if isinstance(layers, list) else {}
        self.space = SwapSpace(self.cache, num_blocks=12, **states)
        if is_out:
            self.cache.swap_out(self.sequence, self.space)


class Forks:
    """Three sequences that share blocks in a swap space, and of which the prefix cache has nothing."""

    def __init__(self, namespace=None, **options):
        self.cache = PagedKVCache(spec(**options), block_size=4, num_blocks=40)
        first = self.cache.add_sequence(range(18), namespace=namespace)
        self.cache.commit(self.cache.prepare([first], 18))
        self.sequences = [first, self.cache.fork(first), self.cache.fork(first)]
        for seed, sequence in enumerate(self.sequences):
            self.cache.append_tokens(sequence, range(100 * seed, 100 * seed + 10))
        self.cache.commit(self.cache.prepare(self.sequences, 10))
        self.space = SwapSpace(self.cache, num_blocks=40)
        self.cache.swap_out(self.sequences, self.space)
        self.cache.clear_prefix_cache()

    def signature(self):
        try:
            self.cache.check_invariants()
            for sequence in self.sequences:
                if sequence.is_swapped:
                    self.cache.swap_in(sequence)
            for sequence in self.sequences:
                self.cache.remove(sequence)
            self.cache.check_invariants()
            self.cache.clear_prefix_cache()
            assert self.cache.stats().num_used_blocks == 0
        except PagecoreError as error:
            raise AssertionError(str(error)) from error


def make(state):
    layers = [spec("int8_token"), CROSS]
    state.cache = StaticKVCache(layers, max_batch_size=3, max_length=12)


def update(state, layer=1, position=4):
    state.cache.update(layer, *state.new, position)


def overwrite(state):
    """Write the tokens of the cache itself to other places, which takes copies."""
    state.cache.update(1, state.cache.key(1)[:, :, :3], state.cache.value(1)[:, :, :3], 1)


CASES = {
    "static: make": Case(Made, make),
    "static: update": Case(Static, update),
    "static: update of one token": Case(partial(Static, 1), update),
    "static: update of strided arrays": Case(partial(Static, 3, 2), update),
    "static: update of the cache's own arrays": Case(Static, overwrite),
    "static: update of an encoder output": Case(partial(Static, 7), partial(update, layer=2, position=0)),
    "static: reset": Case(Static, lambda state: state.cache.reset()),
    "commit that seals": Case(
        partial(Paged, SEALED, computed=90, more=40), lambda state: state.cache.commit(state.batch)
    ),
    "truncate inside a sealed block": Case(
        partial(Paged, SEALED, computed=90), lambda state: state.cache.truncate(state.sequence, 40)
    ),
    "compact sealed blocks": Case(
        partial(Paged, SEALED, computed=90), lambda state: state.cache.compact(state.sequence, range(0, 90, 2))
    ),
    "commit that quantises states": Case(
        partial(Paged, STATES, computed=4, more=4, block_size=4, num_states=8),
        lambda state: state.cache.commit(state.batch),
    ),
    "write of rotated rows": Case(
        partial(Written, spec("int4_token", key_rotation="hadamard", value_rotation="hadamard")),
        Written.write,
        may_be_done=True,
    ),
    "swap_out of codes and states": Case(
        partial(Swapped, STATES, is_out=False, num_states=8),
        lambda state: state.cache.swap_out(state.sequence, state.space),
    ),
    "swap_in of forks": Case(Forks, lambda state: state.cache.swap_in(state.sequences), checks_itself=True, every=True),
    "swap_in of forks in a namespace": Case(
        partial(Forks, "tenant"), lambda state: state.cache.swap_in(state.sequences), checks_itself=True, every=True
    ),
    "swap_in of forks with a window": Case(
        partial(Forks, window=6), lambda state: state.cache.swap_in(state.sequences), checks_itself=True
    ),
    "swap_in of codes and states": Case(
        partial(Swapped, STATES, is_out=True, num_states=8), lambda state: state.cache.swap_in(state.sequence)
    ),
}
for name in FORMATS:
    CASES[f"static {name}: update"] = Case(partial(Static, format=name), update)
    CASES[f"static {name}: update of strided arrays"] = Case(partial(Static, 3, 2, name), update)
    CASES[f"write of {name}"] = Case(partial(Written, spec(name)), Written.write)
