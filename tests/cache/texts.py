"""Caches next to plain texts, whose keys depend on all tokens before them, for compaction."""

from __future__ import annotations

import zlib

import numpy as np

from pagecore import AttentionSpec
from tests.cache.caches import make

SPARSE = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, key_bounds=True, label_channels=[[1, 5], [0, 7]])
OTHER = AttentionSpec(2, 8, v_head_dim=4, dtype="float16", num_query_heads=2)
HEADS, DIM = 2, 8


def key_of(text, layer):
    """Return the key of the last token of a text in a layer, ``[heads, dim]``: a function of all of the text."""
    seed = zlib.crc32(np.asarray([layer, *text], np.int64).tobytes())
    return (np.random.default_rng(seed).integers(-100, 100, (HEADS, DIM)) / 4).astype(np.float32)


class Texts:
    """A cache and the plain twin of its sequences: the whole text of each, and the positions that are kept.

    `put` and `get` copy arrays to the device of the cache and from there.
    """

    def __init__(self, cache, put=np.asarray, get=np.asarray):
        self.cache, self.put, self.get = cache, put, get
        self.text, self.kept = {}, {}

    def add(self, ids):
        sequence = self.cache.add_sequence(ids)
        self.text[sequence], self.kept[sequence] = list(ids), list(range(sequence.num_cached_tokens))
        return sequence

    def fork(self, parent):
        child = self.cache.fork(parent)
        self.text[child], self.kept[child] = list(self.text[parent]), list(self.kept[parent])
        return child

    def append(self, sequence, ids):
        self.cache.append_tokens([sequence], [ids])
        self.text[sequence] += ids

    def waiting(self, sequence):
        return sequence.num_tokens - sequence.num_computed_tokens

    def step(self, sequences, counts, accepted=None):
        batch = self.cache.prepare(sequences, counts)
        positions = []
        for sequence, count in zip(sequences, counts, strict=True):
            first = len(self.text[sequence]) - self.waiting(sequence)
            positions.append(list(range(first, first + count)))
        flat = [place for places in positions for place in places]
        assert self.get(batch.positions)[: len(flat)].tolist() == flat
        texts = [self.text[s][: p + 1] for s, places in zip(sequences, positions, strict=True) for p in places]
        assert self.get(batch.token_ids)[: len(flat)].tolist() == [text[-1] for text in texts]
        for layer in range(self.cache.num_layers):
            key = np.array([key_of(text, layer) for text in texts], np.float32).reshape(-1, HEADS, DIM)
            value = -key[..., : self.cache.value(layer).shape[3]]
            self.cache.write(layer, self.put(key), self.put(np.ascontiguousarray(value)), batch)
        self.cache.commit(batch, accepted)
        for i, (sequence, places) in enumerate(zip(sequences, positions, strict=True)):
            kept = places if accepted is None else places[: accepted[i]]
            self.kept[sequence] += kept
            if len(kept) < len(places):
                del self.text[sequence][places[0] + len(kept) :]

    def compact(self, sequence, keep):
        self.cache.compact(sequence, keep)
        self.kept[sequence] = [self.kept[sequence][i] for i in keep]

    def check(self):
        self.cache.check_invariants()
        for sequence, kept in self.kept.items():
            assert sequence.num_computed_tokens == len(kept)
            end = len(self.text[sequence]) - self.waiting(sequence)
            assert sequence.num_dropped_tokens == end - len(kept)
            ids = [self.text[sequence][p] for p in kept] + self.text[sequence][end:]
            assert sequence.tokens.tolist() == ids
            if not sequence.is_swapped:
                self.check_planes(sequence, kept)

    def check_planes(self, sequence, kept):
        size = self.cache.block_size
        for layer in range(self.cache.num_layers):
            table = self.cache._parts.tables.blocks(sequence.row, self.cache._parts.layers[layer].group)
            key, value = self.get(self.cache.key(layer)), self.get(self.cache.value(layer))
            expected = np.array([key_of(self.text[sequence][: p + 1], layer) for p in kept]).reshape(-1, HEADS, DIM)
            slots = [(table[i // size], i % size) for i in range(len(kept))]
            assert np.array_equal([key[slot] for slot in slots], expected) or not kept
            assert all(
                np.array_equal(value[slot], -row[:, : value.shape[3]])
                for slot, row in zip(slots, expected, strict=True)
            )
            self.check_summaries(layer, slots, expected)

    def check_summaries(self, layer, slots, expected):
        spec = self.cache._parts.layers[layer].spec
        if not spec.key_bounds:
            return
        low, high, label = (self.get(self.cache.plane(name, layer)) for name in ("key_min", "key_max", "label"))
        for (block, offset), row in zip(slots, expected, strict=True):
            assert (low[block] <= row).all()
            assert (row <= high[block]).all()
            assert np.array_equal(label[block, offset], np.take_along_axis(row, np.array(spec.label_channels), axis=1))


def prefilled(count=8, **options):
    texts = Texts(make(**{"layers": [SPARSE, SPARSE], **options}))
    sequence = texts.add(list(range(count)))
    texts.step([sequence], [count])
    return texts, sequence
