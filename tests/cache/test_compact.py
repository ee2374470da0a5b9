"""PagedKVCache.compact: the kept tokens, their positions, and what stays shared."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import OutOfBlocks, PagedKVCache, paged_attention
from pagecore.cache import SwapSpace
from tests.cache.caches import SPEC, make, normal
from tests.cache.texts import OTHER, SPARSE, Texts, key_of, prefilled
from tests.faults import is_full


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


def test_cached_blocks_are_evicted_for_room():
    texts, old = prefilled(12, num_blocks=8, layers=[SPEC])
    texts.cache.remove(old)
    del texts.text[old], texts.kept[old]
    sequence = texts.add([9, *range(15)])
    texts.step([sequence], [16])
    texts.compact(sequence, [1, 2, 9, 12, 13])
    texts.check()
    assert texts.cache.stats().num_evicted_blocks > 0


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
