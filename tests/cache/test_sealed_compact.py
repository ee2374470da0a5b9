"""Compaction of sequences with sealed blocks: kept tokens move to new blocks, and are sealed again."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pagecore import AttentionSpec, OutOfBlocks, PagedKVCache, ShapeError, SwapSpace, UnsupportedOption, unseal_kv
from pagecore.cache.memory import repack, sealer
from tests.cache.sealing import BLOCK, SPEC, Driver, as_read, compacted, numbers
from tests.cache.swaps import poison
from tests.reference.dense import dense_attention
from tests.together import together

LENGTH = 230  # of which 160 are sealed
KEPT = {
    "sinks, the middle and the newest": [*range(4), *range(70, 150), *range(190, LENGTH)],
    "every second token": range(0, LENGTH, 2),
    "whole blocks": [*range(32), *range(64, 96), *range(128, LENGTH)],
    "the first tokens": range(140),
    "whole first blocks": range(128),
    "a gap in the newest block": [*range(226), 228, 229],
    "whole blocks alone": range(64, 128),
    "all but the newest": range(229),
    "fewer tokens than the residual": [3, 4, 40, 170, 229],
    "one block, in its place": [*range(32), *range(50, 60)],
    "sealed tokens alone": range(1, 100),
    "the newest": range(150, LENGTH),
    "one token": [77],
    "none": [],
}
FORMATS = [{}, {"format": "kivi4", "group_size": 16}, {"value_format": "kivi4", "residual": 0}]


@together("name", KEPT)
def test_steps_read_the_kept_tokens(name):
    driver = Driver(replace(SPEC, **FORMATS[list(KEPT).index(name) % 3]), layers=2, num_blocks=24)
    sequence = driver.add(range(400))
    driver.step(sequence, LENGTH)
    driver.compact(sequence, KEPT[name])
    poison(driver.cache, np.nan)
    assert sequence.num_computed_tokens == len(KEPT[name])
    assert sequence.num_dropped_tokens == LENGTH - len(KEPT[name])
    assert sequence.tokens[: len(KEPT[name])].tolist() == list(KEPT[name])
    for count in (1, 90):
        driver.step(sequence, count)
    driver.cache.remove(sequence)
    driver.cache.clear_prefix_cache()
    assert driver.used() == [0, 0]


def test_random_compactions_with_forks_and_swaps():
    random = np.random.default_rng(0)
    driver = Driver(replace(SPEC, residual=20), num_blocks=[70, 40], max_sequences=4)
    space = SwapSpace(driver.cache, num_blocks=30)
    parent = driver.add(range(600))
    for turn in range(12):
        driver.step(parent, int(random.integers(1, 120)))
        child = driver.fork(parent)
        length = parent.num_computed_tokens
        for each in (parent, child) if turn % 2 else (child,):
            keep = np.flatnonzero(random.random(length) < random.random())
            driver.compact(each, np.union1d(np.arange(int(random.integers(0, length))), keep).tolist())
        driver.step(child, 3)
        driver.cache.swap_out([parent], space)
        driver.step(child, 30)
        driver.cache.swap_in([parent])
        poison(driver.cache, np.nan)
        driver.step(parent, 2)
        driver.cache.remove(child)


def test_parts_of_a_compaction_give_what_the_whole_gives(monkeypatch):
    """Blocks are restored in parts; a new block may need more old blocks than a part has."""
    found = []
    for most in (1, 2, 64):
        monkeypatch.setattr(repack, "plan_chunks", partial(repack.plan_chunks, most=most))
        driver = Driver(num_blocks=24)
        sequence = driver.add()
        driver.step(sequence, LENGTH)
        driver.compact(sequence, range(0, LENGTH, 2))
        tables = [driver.cache._parts.tables.blocks(sequence.row, group) for group in range(2)]
        sealed = [plane.numpy()[tables[0][:2]] for plane in driver.cache.sealed_planes(0)[:4]]
        found.append([*sealed, driver.cache.plane("key", 0).numpy()[tables[1][2:3]]])
        monkeypatch.undo()
    for other in found[:2]:
        for one, same in zip(found[2], other, strict=True):
            np.testing.assert_array_equal(one, same)


def test_sealed_blocks_that_are_kept_whole_are_copied_as_they_are():
    driver = Driver(layers=2, num_blocks=24)
    sequence = driver.add()
    driver.step(sequence, LENGTH)
    before = driver.cache._parts.tables.blocks(sequence.row, 0).copy()
    driver.compact(sequence, [*range(32), *range(64, 96), *range(128, LENGTH)])
    after = driver.cache._parts.tables.blocks(sequence.row, 0)
    assert (sequence.num_sealed_tokens, after[0] == before[0], after[1] == before[1]) == (96, True, False)
    for layer in range(2):
        for plane in driver.cache.sealed_planes(layer)[:4]:
            np.testing.assert_array_equal(plane.numpy()[after[:3]], plane.numpy()[before[[0, 2, 4]]])


@pytest.mark.parametrize(("bits", "once", "twice"), [("kivi2", 0.4, 0.56), ("kivi4", 0.08, 0.115)])
def test_keys_that_are_sealed_twice_have_a_third_more_error(bits, once, twice):
    """Values have the same error: their groups lie within a token, so that they are the same groups again."""
    cache = PagedKVCache(replace(SPEC, format=bits, residual=0), num_blocks=32)
    sequence = cache.add_sequence([])
    batch = cache.prepare([sequence], 640)
    key, value = (
        np.random.default_rng(part).normal(size=(640, 2, dim)).astype("f") for part, dim in enumerate((64, 32))
    )
    cache.write(0, key, value, batch)
    cache.commit(batch)
    keep = np.sort(np.random.default_rng(1).permutation(640)[:320])
    first = errors_of(cache, sequence, key, value)
    cache.compact(sequence, keep)
    second = errors_of(cache, sequence, key[keep], value[keep])
    assert once * 0.9 < first[0] < once < second[0] < twice
    assert abs(second[1] - first[1]) < 0.01 * first[1]


def errors_of(cache, sequence, key, value):
    """Return the relative errors of the sealed keys and values of a sequence."""
    blocks = cache._parts.tables.blocks(sequence.row, 0)
    found = [np.zeros((len(blocks) + 1, BLOCK, *side.shape[1:]), np.float32) for side in (key, value)]
    unseal_kv(cache.sealed_planes(0), *found, [(block, i + 1) for i, block in enumerate(blocks)])
    pairs = [(read[1:].reshape(side.shape), side) for read, side in zip(found, (key, value), strict=True)]
    return [np.linalg.norm(read - side) / np.linalg.norm(side) for read, side in pairs]


def test_shared_blocks_are_not_written():
    driver = Driver(num_blocks=30)
    first = driver.add(range(400))
    driver.step(first, LENGTH)
    known = [list(stored) for stored in driver.stored[first]]
    fork = driver.fork(first)
    driver.compact(first, [*range(2), *range(40, 200)])
    driver.step(first, 80)
    driver.step(fork, 40)
    driver.cache.remove(first)
    assert driver.cache.match_length(range(400)) == fork.num_sealed_tokens == 224
    other = driver.cache.add_sequence(range(170))
    driver.stored[other] = [[side[:160] for side in stored] for stored in known]
    assert other.num_cached_tokens == 160
    driver.step(other, 10)


def test_a_compacted_sequence_publishes_nothing():
    driver = Driver(num_blocks=30)
    sequence = driver.add(range(400))
    driver.step(sequence, LENGTH)
    driver.compact(sequence, [*range(40), *range(60, LENGTH)])
    driver.cache.clear_prefix_cache()
    driver.step(sequence, 90)
    driver.cache.remove(sequence)
    assert driver.cache.match_length(range(400)) == BLOCK


def test_a_compacted_sequence_is_cut_after_the_kept_tokens():
    driver = Driver(num_blocks=30)
    sequence = driver.add(range(400))
    driver.step(sequence, LENGTH)
    driver.compact(sequence, range(0, LENGTH, 2))
    with pytest.raises(UnsupportedOption, match="was compacted to 115 tokens"):
        driver.cache.truncate(sequence, 114)
    driver.step(sequence, 90)
    assert sequence.num_sealed_tokens == 160
    driver.truncate(sequence, 117)
    assert sequence.num_sealed_tokens == 96
    driver.step(sequence, 70)
    driver.truncate(sequence, 0)
    assert sequence.num_dropped_tokens == 0


def test_groups_keep_tokens_of_their_own():
    layers = [AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4), SPEC, replace(SPEC, format="kivi4")]
    cache = PagedKVCache(layers, num_blocks=20)
    sequence = cache.add_sequence(range(300))
    batch = cache.prepare([sequence], LENGTH)
    sides = [[numbers((layer, part), LENGTH, 2, dim) for part, dim in enumerate((64, 32))] for layer in range(3)]
    for layer, new in enumerate(sides):
        cache.write(layer, *new, batch)
    cache.commit(batch)
    keep = [[*range(start, start + 60), *range(200, LENGTH)] for start in (100, 64, 7)]
    cache.compact(sequence, [*keep, keep[1], keep[2]])
    assert sequence.num_sealed_tokens == 32
    cache.check_invariants()
    newest = [numbers((9, part), 1, 2, dim) for part, dim in enumerate((64, 32))]
    with cache.prepare([sequence], 1) as batch:
        for layer, whole in enumerate(sides):
            cache.write(layer, *newest, batch)
            held = [side[keep[0]] for side in whole]
            if layer:
                *held, sealed = compacted(layers[layer], *whole, 160, keep[layer], BLOCK)
                held = as_read(layers[layer], *held, sealed, BLOCK)
            query = numbers(4, 1, 4, 64)
            found = cache.attend(layer, query, batch)
            both = [np.concatenate(pair) for pair in zip(held, newest, strict=True)]
            np.testing.assert_allclose(found, dense_attention(query, *both), rtol=0, atol=3e-5)
        cache.commit(batch)
    with pytest.raises(ShapeError, match="other positions for group 3 than for group 1"):
        cache.compact(sequence, [[0, 1], [0, 1], [0, 1], [0, 2], [0, 1]])


def test_sealed_blocks_stay_sealed_among_the_newest_tokens(monkeypatch):
    """They do where all blocks before them are sealed, so that their keys are not quantised a second time."""
    driver = Driver(num_blocks=24)
    sequence = driver.add()
    driver.step(sequence, LENGTH)
    before = driver.cache._parts.tables.blocks(sequence.row, 0).copy()
    monkeypatch.setattr(repack, "unseal_kv", None)
    driver.compact(sequence, range(64, 128))
    after = driver.cache._parts.tables.blocks(sequence.row, 0)
    assert sequence.num_sealed_tokens == sequence.num_computed_tokens == 64
    for plane in driver.cache.sealed_planes(0)[:4]:
        np.testing.assert_array_equal(plane.numpy()[after], plane.numpy()[before[2:4]])
    driver.step(sequence, 3)


def test_tokens_of_the_tail_that_do_not_move_need_no_block():
    driver = Driver(num_blocks=[30, 6], prefix_cache=False)
    sequence = driver.add()
    for _ in range(10):
        driver.step(sequence, 23)
    driver.step(driver.add(), 30)
    blocks = partial(driver.cache._parts.tables.blocks, sequence.row)
    before = [blocks(group).copy() for group in range(2)]
    assert driver.cache._parts.tables.pools[1].num_free == 1
    driver.compact(sequence, [*range(226), 228, 229])
    assert [np.flatnonzero(blocks(group) != before[group]).tolist() for group in range(2)] == [[], [7]]
    before = [blocks(group).copy() for group in range(2)]
    driver.step(driver.add(), 30)
    assert driver.cache._parts.tables.pools[1].num_free == 0
    driver.compact(sequence, range(220))
    for group in range(2):
        np.testing.assert_array_equal(blocks(group), before[group][:7])
    driver.step(sequence, 1)


def test_short_blocks_of_other_groups_are_found_before_anything_is_restored(monkeypatch):
    layers = [AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4), SPEC]
    cache = PagedKVCache(layers, num_blocks=[11, 30, 14], prefix_cache=False)
    sequence = cache.add_sequence([])
    cache.commit(cache.prepare([sequence], LENGTH))
    cache.fork(sequence)
    free = tuple(pool.num_free for pool in cache._parts.tables.pools)
    monkeypatch.setattr(repack, "unseal_kv", None)
    with pytest.raises(OutOfBlocks, match="4 blocks are needed and 2 are free in group 0") as raised:
        cache.compact(sequence, range(0, LENGTH, 2))
    assert (raised.value.requested, raised.value.available) == ((4, 4, 2), free) == ((4, 4, 2), (2, 21, 10))
    cache.check_invariants()


def test_short_blocks_change_nothing():
    driver = Driver(num_blocks=[14, 6], prefix_cache=False)
    sequence = driver.add(range(LENGTH))
    for count in (128, 70, 32):
        driver.step(sequence, count)
    driver.step(driver.add(), 1)
    tables = [driver.cache.block_table(group).numpy().copy() for group in range(2)]
    message = r"2 blocks are needed and 1 are free in group 1; kept tokens of sealed blocks move to new blocks"
    with pytest.raises(OutOfBlocks, match=message) as raised:
        driver.cache.compact(sequence, range(0, LENGTH, 2))
    assert (raised.value.requested, raised.value.available) == ((2, 2), (4, 1))
    for group, before in enumerate(tables):
        np.testing.assert_array_equal(driver.cache.block_table(group).numpy(), before)
    driver.cache.check_invariants()
    driver.step(sequence, 1)


def test_cached_blocks_are_evicted_for_kept_tokens():
    driver = Driver(num_blocks=[13, 12])
    other = driver.add(range(500, 660))
    driver.step(other, 140)
    driver.cache.remove(other)
    sequence = driver.add(range(300))
    driver.step(sequence, LENGTH)
    assert driver.cache.stats().num_evictable_blocks == 4
    driver.compact(sequence, range(0, LENGTH, 2))
    assert driver.cache.stats().num_evicted_blocks > 0
    driver.step(sequence, 1)


@pytest.mark.parametrize("name", ["unseal_kv", "write_kv", "seal_kv", "copy_blocks"])
def test_a_compaction_that_fails_changes_nothing(monkeypatch, name):
    driver = Driver(layers=2, num_blocks=24)
    sequence = driver.add(range(400))
    driver.step(sequence, LENGTH)
    calls, works, used = [], getattr(repack, name), driver.used()

    def fail(*arrays, **options):
        calls.append(works(*arrays, **options))
        if len(calls) == 2 or name == "copy_blocks":
            raise MemoryError

    keep = [*range(64, 96), *range(100, 200)]
    with monkeypatch.context() as patch:
        patch.setattr(repack, name, fail)
        with pytest.raises(MemoryError):
            driver.cache.compact(sequence, keep)
    driver.cache.check_invariants()
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens, driver.used()) == (LENGTH, 160, used)
    driver.step(sequence, 1)
    driver.compact(sequence, keep)
    driver.step(sequence, 1)


def test_a_cache_that_changes_while_tokens_are_repacked(monkeypatch):
    """Code of the caller can run there, a finaliser for example."""
    driver = Driver(num_blocks=30)
    sequence, other = driver.add(range(400)), driver.add()
    driver.step(other, 100)
    driver.step(sequence, LENGTH)
    repacks = sealer.repack

    def change_within(*arguments):
        repacks(*arguments)
        monkeypatch.setattr(sealer, "repack", repacks)
        driver.cache.reorder([other], [sequence])

    monkeypatch.setattr(sealer, "repack", change_within)
    driver.compact(sequence, range(0, LENGTH, 2))
    assert other.num_computed_tokens == LENGTH
    driver.step(sequence, 20)


def test_a_cache_without_bytes_moves_to_new_blocks():
    cache = PagedKVCache(SPEC, num_blocks=24, device="none")
    sequence = cache.add_sequence([])
    cache.commit(cache.prepare([sequence], LENGTH))
    before = cache._parts.tables.blocks(sequence.row, 0).copy()
    cache.compact(sequence, range(0, LENGTH, 2))
    cache.check_invariants()
    assert sequence.num_sealed_tokens == 64
    assert not set(cache._parts.tables.blocks(sequence.row, 0)[:2]) & set(before)


def test_parts_need_few_old_blocks_and_copy_sealed_ones_alone():
    """A block of the tail is sealed here, after the blocks before it: it has no codes yet."""
    ids = [np.arange(first, first + 4, dtype=np.int32) for first in (10, 20, 30)]
    keep = np.array([0, 1, 2, 3, 8, 9, 10, 11, 12, 14, 15], np.int32)
    for num_sealed, copied in ((16, [[10, 30], [12, 31]]), (8, [[10, 30]]), (0, [])):
        kept = repack.KeptTokens(keep, ids[0], ids[1], num_sealed, 0, ids[2][:2], 2, ids[2][2:3])
        moves, chunks = repack.plan_chunks(kept, 4, most=1)
        assert moves.tolist() == copied
        assert [len(chunk.to_tail) // 4 for chunk in chunks] == [2] * (3 - len(copied))
        assert [chunk.copied.tolist() for chunk in chunks[len(chunks) - 1 :]] == (
            [[]] if num_sealed == 16 else [[[23, 1]]]
        )
        assert len(repack.plan_chunks(kept, 4)[1]) == 1


def test_tokens_of_the_tail_are_sealed_when_they_are_compacted():
    """Tokens that arrived as numbers have blocks of the tail, which are released as they are sealed."""
    driver = Driver(num_blocks=20)
    sequence = driver.add(range(300))
    batch = driver.cache.prepare_arrival(sequence, 160, num_sealed_tokens=0)
    new = [numbers(part, 160, 2, dim) for part, dim in enumerate((64, 32))]
    driver.cache.write(0, *new, batch)
    driver.cache.commit(batch)
    driver.stored[sequence] = [new]
    assert (sequence.num_sealed_tokens, driver.used()) == (0, [5, 5])
    driver.compact(sequence, [*range(64), *range(70, 160)])
    assert (sequence.num_sealed_tokens, driver.used()) == (96, [5, 2])
    assert driver.cache.held_from(sequence, 1) == 96
    driver.step(sequence, 60)
