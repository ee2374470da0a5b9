"""Keys and values as a cache with sealed blocks reads them: the first tokens quantised by the plain twin (KIVI).

`Driver` computes steps of such a cache and compares their attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagecore import AttentionSpec, PagedKVCache
from tests.cache.swaps import poison
from tests.ops import kivi_twin
from tests.reference.dense import dense_attention, limits_of

Array = npt.NDArray[Any]

BLOCK, RESIDUAL = 32, 40
SPEC = AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4, format="kivi2", residual=RESIDUAL)


def numbers(seed, tokens, heads, dim):
    return np.random.default_rng(seed).normal(size=(tokens, heads, dim)).astype(np.float32)


def sealed_after(length: int, sealed: int, residual: int, block_size: int) -> int:
    """Return the sealed tokens of a sequence once `length` tokens are committed."""
    return max(sealed, max(0, length - residual) // block_size * block_size)


def as_read(spec: AttentionSpec, key: Array, value: Array, sealed: int, block_size: int) -> tuple[Array, Array]:
    """Return keys and values [tokens, heads, dim] whose first `sealed` tokens are those of sealed blocks."""
    group = spec.sealing.group_size
    key_format, value_format = spec.format, spec.value_format or spec.format
    keys, values = key.astype(np.float32), value.astype(np.float32)
    for first in range(0, sealed, block_size):
        rows = slice(first, first + block_size)
        codes, scales = kivi_twin.quantize(keys[rows].swapaxes(0, 1), key_format, -2, group)
        keys[rows] = kivi_twin.dequantize(codes, key_format, scales, -2).swapaxes(0, 1)
        codes, scales = kivi_twin.quantize(values[rows], value_format, -1, group)
        values[rows] = kivi_twin.dequantize(codes, value_format, scales)
    return keys, values


def restored(
    spec: AttentionSpec, key: Array, value: Array, sealed: int, length: int, block_size: int
) -> tuple[Array, Array]:
    """Return keys and values that are cut to `length` tokens; those of a sealed block that is cut are quantised."""
    whole = length // block_size * block_size
    if length >= sealed or whole == length:
        return key[:length], value[:length]
    old = as_read(spec, key[:sealed], value[:sealed], sealed, block_size)
    pairs = zip((key, value), old, strict=True)
    left, right = (np.concatenate([side[:whole], read[whole:length]]) for side, read in pairs)
    return left, right


def compacted(
    spec: AttentionSpec, key: Array, value: Array, sealed: int, keep: list[int], block_size: int
) -> tuple[Array, Array, int]:
    """Return the keys and values of tokens that are kept, as they were read, and the tokens in sealed blocks after."""
    keys, values = as_read(spec, key, value, sealed, block_size)
    whole = [list(range(first, first + block_size)) for first in range(0, sealed, block_size)]
    after = sealed_after(len(keep), 0, spec.sealing.residual, block_size)
    while keep[after : after + block_size] in whole:
        after += block_size
    return keys[keep], values[keep], after


class Driver:
    """A cache of one or more layers, and all keys and values of its sequences."""

    def __init__(self, spec=SPEC, layers=1, num_blocks=12, **options):
        self.spec = spec
        self.cache = PagedKVCache(spec, num_layers=layers, block_size=BLOCK, num_blocks=num_blocks, **options)
        self.stored = {}
        self.seed = 0

    def add(self, ids=()):
        sequence = self.cache.add_sequence(ids)
        assert sequence.num_cached_tokens == 0
        self.stored[sequence] = [[np.zeros((0, 2, dim)) for dim in (64, 32)] for _ in range(self.cache.num_layers)]
        return sequence

    def fork(self, parent):
        child = self.cache.fork(parent)
        self.stored[child] = [list(stored) for stored in self.stored[parent]]
        return child

    def truncate(self, sequence, length):
        self.truncate_all([sequence], [length])

    def truncate_all(self, sequences, lengths):
        """Cut sequences; the tokens of a block that is cut are plain again, as the block has them."""
        sealed = [sequence.num_sealed_tokens for sequence in sequences]
        self.cache.truncate(sequences, lengths)
        self.cache.check_invariants()
        for sequence, length, end in zip(sequences, lengths, sealed, strict=True):
            for stored in self.stored[sequence]:
                stored[:] = restored(self.spec, *stored, end, length, BLOCK)

    def compact(self, sequence, keep):
        """Keep some tokens of a sequence, in all groups."""
        before = sequence.num_sealed_tokens
        self.cache.compact(sequence, keep)
        self.cache.check_invariants()
        for stored in self.stored[sequence]:
            *stored[:], sealed = compacted(self.spec, *stored, before, list(keep), BLOCK)
            assert sequence.num_sealed_tokens == sealed

    def step(self, sequence, count, accepted=None):
        """Compute `count` tokens, and compare the attention of every layer."""
        batch = self.cache.prepare([sequence], count)
        poison(self.cache, np.nan)
        start, sealed = sequence.num_computed_tokens, sequence.num_sealed_tokens
        for layer, stored in enumerate(self.stored[sequence]):
            self.seed += 1
            new = [numbers((self.seed, part), count, 2, dim) for part, dim in enumerate((64, 32))]
            stored[:] = [np.concatenate([old[:start], more]) for old, more in zip(stored, new, strict=True)]
            self.cache.write(layer, *new, batch)
            query = numbers((self.seed, 2), count, 4, 64)
            keys, values = as_read(self.spec, *stored, sealed, BLOCK)
            found = self.cache.attend(layer, query, batch)
            expected = dense_attention(query, keys, values, **limits_of(self.spec))
            np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
        self.cache.commit(batch, accepted)
        self.cache.check_invariants()

    def used(self):
        return [len(np.unique(table.numpy())) - 1 for table in map(self.cache.block_table, range(2))]
