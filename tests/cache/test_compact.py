"""PagedKVCache.compact: the kept tokens, their positions, and what stays shared."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    KVPool,
    OutOfBlocks,
    PagedKVCache,
    Plane,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
    paged_attention,
)
from pagecore.cache import SwapSpace
from pagecore.cache.lifecycle.slot_moves import moves_of
from tests.cache.caches import SPEC, WINDOWED, Planes, advance, make, normal
from tests.faults import is_full

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


def test_worked_example_variants_e3_snapkv_compacts_to_the_kept_tokens():
    texts, sequence = prefilled()
    free = texts.cache.num_available
    texts.compact(sequence, [0, 1, 2, 6, 7])
    texts.check()
    assert (sequence.num_computed_tokens, sequence.num_dropped_tokens) == (5, 3)
    assert texts.cache.num_available == free
    texts.append(sequence, [50])
    texts.step([sequence], [1])  # position 8
    texts.check()
    texts.compact(sequence, [0, 4, 5])
    texts.check()
    assert texts.cache.num_available == free + 1


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "LCBHND"])
@pytest.mark.parametrize(
    "keep", [[], [0], [7], [3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [1, 2, 3, 5, 6, 7], list(range(8))], ids=str
)
@pytest.mark.parametrize("count", [8, 10])
def test_any_kept_tokens_in_any_layout(layout, keep, count):
    texts, sequence = prefilled(count, layout=layout, layers=[SPEC, OTHER, SPEC])
    texts.compact(sequence, keep)
    texts.check()
    texts.append(sequence, [90, 91, 92])
    texts.step([sequence], [3])
    texts.check()


def test_bounds_are_renewed_exactly():
    texts, sequence = prefilled(11)
    texts.compact(sequence, [1, 4, 6, 7, 8, 10])
    table = texts.cache.make_batch().group(0).block_table.numpy()[sequence.row]
    for layer in range(2):
        for block, some in ((table[0], [1, 4, 6, 7]), (table[1], [8, 10])):
            keys = np.array([key_of(range(p + 1), layer) for p in some])
            assert np.array_equal(texts.cache.plane("key_min", layer).numpy()[block], keys.min(axis=0))
            assert np.array_equal(texts.cache.plane("key_max", layer).numpy()[block], keys.max(axis=0))


def test_attention_after_compaction_equals_attention_over_the_kept_tokens():
    cache = make(SPEC)
    sequence = cache.add_sequence(range(30))
    key, value, query = normal(31, 2, 8), normal(31, 2, 8, seed=1), normal(31, 4, 8, seed=2)
    batch = cache.prepare([sequence], 30)
    cache.write(0, key[:30], value[:30], batch)
    cache.commit(batch)
    keep = [0, 1, 5, 9, 10, 11, 20, 28, 29]
    cache.compact(sequence, keep)
    cache.append_tokens(sequence, [1])
    batch = cache.prepare([sequence], 1)
    cache.write(0, key[30:], value[30:], batch)
    got = cache.attend(0, query[30:], batch)
    cache.commit(batch)
    some = [*keep, 30]
    blocks = np.zeros((2, 3, 4, 2, 8), np.float32)
    blocks.reshape(2, 12, 2, 8)[:, :10] = [key[some], value[some]]
    expected = paged_attention(query[30:], blocks[0], blocks[1], [[0, 1, 2]], [10])
    assert np.allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_published_blocks_are_left_alone_and_found_again():
    texts, sequence = prefilled(12)
    texts.compact(sequence, [0, 1, 2, 3, 5, 8, 9])
    texts.check()
    again = texts.add([*range(12), 7])
    assert again.num_cached_tokens == 12
    texts.check()
    texts.append(sequence, [60, 61, 62, 63, 64])
    texts.step([sequence, again], [5, 1])
    texts.check()
    cache = texts.cache
    assert (
        cache.add_sequence([0, 1, 2, 3, 5, 8, 9, 60, 61]).num_cached_tokens == 4
    )  # compacted blocks are not published


def test_a_fork_keeps_what_its_parent_drops():
    texts, sequence = prefilled(10, prefix_cache=False)
    child = texts.fork(sequence)
    texts.compact(sequence, [0, 3, 4, 9])
    texts.check()
    other = texts.fork(sequence)
    for each in (child, sequence, other):
        texts.append(each, [70 + each.row])
    texts.step([child, sequence, other], [1, 1, 1])
    texts.check()


def test_reorder_copies_the_offset_of_positions():
    texts, sequence = prefilled(8, prefix_cache=False)
    other = texts.add([1, 2, 3])
    texts.compact(sequence, [0, 7])
    texts.cache.reorder([other, sequence], [sequence, sequence])
    texts.text[other], texts.kept[other] = list(texts.text[sequence]), list(texts.kept[sequence])
    texts.check()
    assert other.num_dropped_tokens == 6


def test_truncate_refuses_lengths_inside_the_compacted_tokens():
    texts, sequence = prefilled(8)
    texts.compact(sequence, [0, 2, 5])
    texts.append(sequence, [9, 9])
    texts.step([sequence], [2])
    with pytest.raises(UnsupportedOption, match="compacted to 3 tokens"):
        texts.cache.truncate(sequence, 2)
    texts.cache.truncate(sequence, 4)
    del texts.text[sequence][9:], texts.kept[sequence][4:]
    texts.check()
    texts.cache.truncate(sequence, 0)
    assert sequence.num_dropped_tokens == 0
    texts.text[sequence], texts.kept[sequence] = [], []
    texts.append(sequence, [4, 4, 4, 4, 4])
    texts.step([sequence], [5])
    texts.check()
    assert texts.cache.add_sequence([4] * 6).num_cached_tokens == 4


def test_lists_of_groups_may_differ():
    cache = make([SPEC, OTHER])
    sequence = cache.add_sequence(range(8))
    batch = cache.prepare([sequence], 8)
    key = np.repeat(np.arange(8, dtype=np.float32), 16).reshape(8, 2, 8)
    for layer in range(2):
        cache.write(layer, key, key[..., : cache.value(layer).shape[3]], batch)
    cache.commit(batch)
    cache.compact(sequence, [[0, 1, 6], [2, 5, 7]])
    cache.check_invariants()
    assert sequence.tokens.tolist() == [0, 1, 6]
    for layer, keep in enumerate(([0, 1, 6], [2, 5, 7])):
        block = cache.make_batch().group(layer).block_table.numpy()[sequence.row, 0]
        assert cache.key(layer).numpy()[block, :3, 0, 0].tolist() == keep


def test_shared_blocks_without_room_for_a_copy_raise_and_change_nothing():
    texts, sequence = prefilled(12, num_blocks=5, prefix_cache=False, layers=[SPEC])
    texts.fork(sequence)
    texts.add([1])
    texts.step([list(texts.kept)[2]], [1])
    with pytest.raises(OutOfBlocks):
        texts.cache.compact(sequence, [1, 2, 3])
    texts.check()


def test_cached_blocks_are_evicted_for_room():
    texts, old = prefilled(12, num_blocks=8, layers=[SPEC])
    texts.cache.remove(old)
    del texts.text[old], texts.kept[old]
    sequence = texts.add([9, *range(15)])
    texts.step([sequence], [16])
    texts.compact(sequence, [1, 2, 9, 12, 13])
    texts.check()
    assert texts.cache.stats().num_evicted_blocks > 0


REFUSED = {
    "descending": ([3, 2], ShapeError, "must ascend"),
    "twice": ([3, 3], ShapeError, "must ascend"),
    "past the end": ([0, 8], ShapeError, "give 0 to 7"),
    "negative": ([-1, 2], ShapeError, "give 0 to 7"),
    "a number": (3, ShapeError, "list of positions"),
    "groups": ([[1], [2]], ShapeError, "one list|one for all groups"),
    "floats": ([0.5], UnsupportedDtype, "kept position"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_lists_change_nothing(name):
    keep, kind, message = REFUSED[name]
    texts, sequence = prefilled()
    with pytest.raises(kind, match=message):
        texts.cache.compact(sequence, keep)
    texts.check()


def test_a_sequence_without_computed_tokens_keeps_none():
    sequence = (cache := make([SPEC])).add_sequence(range(8))
    with pytest.raises(ShapeError, match="0 computed tokens: give an empty list"):
        cache.compact(sequence, [0])
    cache.compact(sequence, [])


def test_groups_must_keep_equal_numbers():
    cache = make([SPEC, OTHER])
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    with pytest.raises(ShapeError, match="equal numbers"):
        cache.compact(sequence, [[1, 2], [3]])


def test_sequences_in_flight_or_swapped_out_are_refused():
    texts, sequence = prefilled()
    texts.append(sequence, [1])
    batch = texts.cache.prepare([sequence], 1)
    with pytest.raises(InvalidSequence, match="in flight"):
        texts.cache.compact(sequence, [0])
    texts.cache.abandon(batch)
    texts.check()
    space = SwapSpace(texts.cache, num_blocks=9)
    texts.cache.swap_out(sequence, space)
    with pytest.raises(InvalidSequence, match="swapped out"):
        texts.cache.compact(sequence, [0])
    texts.cache.swap_in(sequence)
    texts.check()


def test_caches_that_cannot_be_compacted_are_refused():
    for options, message in (
        ({"layers": [SPEC, WINDOWED]}, "group 1 has a window of 6"),
        ({"layers": [SPEC], "scrub": True}, "scrub"),
        ({"layers": [Planes(Plane("page", (8,), "float32", per="block"))]}, "page per block"),
    ):
        cache = make(**options)
        sequence = cache.add_sequence(range(8))
        advance(cache, [sequence], 8)
        with pytest.raises(UnsupportedOption, match=message):
            cache.compact(sequence, [0, 5])
        cache.check_invariants()


def test_bounds_of_quantised_keys_are_not_renewed():
    spec = AttentionSpec(2, 16, format="float8_token", key_bounds=True)
    with pytest.raises(UnsupportedOption, match="in a format"):
        moves_of(KVPool(spec, 1, 4))


def walk(seed, steps, **options):
    """Drive random operations, and compare every sequence with its text after each."""
    rng = np.random.default_rng(seed)
    texts = Texts(PagedKVCache([SPARSE, SPARSE], block_size=4, num_blocks=40, max_sequences=5, **options))
    space = SwapSpace(texts.cache, num_blocks=60)
    for _ in range(steps):
        live = list(texts.kept)
        idle = [sequence for sequence in live if not sequence.is_swapped]
        action = rng.choice(["add", "step", "compact", "compact", "fork", "remove", "truncate", "swap"])
        chosen = idle[rng.integers(len(idle))] if idle else None
        try:
            if action == "add" and len(live) < 5:
                texts.add(rng.integers(0, 2, rng.integers(1, 14)).tolist())
            elif action == "step" and idle:
                some = [each for each in idle if rng.random() < 0.7]
                for each in some:
                    if texts.waiting(each) == 0:
                        texts.append(each, rng.integers(0, 2, 3).tolist())
                counts = [int(rng.integers(1, texts.waiting(each) + 1)) for each in some]
                accepted = [int(rng.integers(0, count + 1)) for count in counts] if rng.random() < 0.2 else None
                if some:
                    texts.step(some, counts, accepted)
            elif action == "compact" and chosen is not None:
                length = chosen.num_computed_tokens
                head = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else 0
                keep = [*range(head), *(head + np.flatnonzero(rng.random(length - head) < rng.random())).tolist()]
                texts.compact(chosen, keep)
            elif action == "fork" and chosen is not None and len(live) < 5:
                texts.fork(chosen)
            elif action == "remove" and live and rng.random() < 0.3:
                gone = live[rng.integers(len(live))]
                texts.cache.remove(gone)
                del texts.text[gone], texts.kept[gone]
            elif action == "truncate" and chosen is not None and chosen.num_dropped_tokens == 0:
                length = int(rng.integers(0, chosen.num_tokens + 1))
                texts.cache.truncate(chosen, length)
                del texts.text[chosen][length:], texts.kept[chosen][length:]
            elif action == "swap" and live:
                each = live[rng.integers(len(live))]
                texts.cache.swap_in(each) if each.is_swapped else texts.cache.swap_out(each, space)
        except OutOfBlocks:
            pass
        texts.check()
        space.check_invariants()


@pytest.mark.parametrize("seed", range(12 if is_full() else 6))
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_random_operations_agree_with_plain_texts(seed, prefix_cache):
    walk(seed, 150 if is_full() else 80, prefix_cache=prefix_cache)
