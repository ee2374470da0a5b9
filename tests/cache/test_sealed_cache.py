"""Caches with sealed blocks: which blocks a commit seals, and what it releases."""

from dataclasses import replace

import numpy as np
import pytest

from pagecore import (
    AttentionSpec,
    InvalidSequence,
    OutOfBlocks,
    PagedKVCache,
    SwapSpace,
    UnsupportedDtype,
    UnsupportedOption,
)
from pagecore.cache.memory import sealer
from pagecore.cache.step import prepare
from tests.cache.sealing import BLOCK, RESIDUAL, SPEC, Driver, numbers, sealed_after
from tests.cache.swaps import poison
from tests.ops import kivi_twin


@pytest.mark.parametrize("count", [1, 7, 32, 33, 150])
def test_commits_seal_the_blocks_that_newer_tokens_follow(count):
    driver, sealed = Driver(layers=2), 0
    sequence = driver.add()
    if count == 1:
        driver.step(sequence, 130)
    while sequence.num_computed_tokens < 200:
        driver.step(sequence, count)
        length = sequence.num_computed_tokens
        sealed = sealed_after(length, sealed, RESIDUAL, BLOCK)
        assert sequence.num_sealed_tokens == sealed
        whole = -(-length // BLOCK)
        assert driver.used() == [whole, whole - sealed // BLOCK]
        assert driver.cache.held_from(sequence, 1) == sealed


@pytest.mark.parametrize(("keys", "values"), [("kivi2", "kivi2"), ("kivi4", "kivi4"), ("kivi4", "kivi2")])
@pytest.mark.parametrize("layout", [None, "LBNHD", "BLHND"])
def test_sealed_planes_have_the_codes_of_kivi(keys, values, layout):
    spec = AttentionSpec(
        2, 64, 32, dtype="bfloat16", num_query_heads=4, format=keys, value_format=values, residual=0, group_size=16
    )
    cache = PagedKVCache(spec, num_layers=2, block_size=BLOCK, num_blocks=6, layout=layout)
    sequence = cache.add_sequence([])
    batch = cache.prepare([sequence], 2 * BLOCK)
    new = [numbers(part, 2 * BLOCK, 2, dim) for part, dim in enumerate((64, 32))]
    cache.write(1, *new, batch)
    newest = [cache.plane(name, 1).numpy().copy() for name in ("key", "value")]
    slots = batch.group(1).slot_mapping.numpy()[::BLOCK] // BLOCK
    cache.commit(batch)
    planes = {name: cache.plane(f"sealed_{name}", 1).numpy() for name in ("key", "value", "key_scale", "value_scale")}
    for index, block in enumerate(slots):
        at = cache.block_table(0).numpy()[sequence.row, index]
        words, scales = kivi_twin.quantize(np.ascontiguousarray(newest[0][block]).swapaxes(0, 1), keys, -2, 16)
        np.testing.assert_array_equal(planes["key"][at].reshape(words.shape), words)
        np.testing.assert_array_equal(planes["key_scale"][at].reshape(scales.shape), scales)
        words, scales = kivi_twin.quantize(np.ascontiguousarray(newest[1][block].swapaxes(0, 1)), values, -1, 16)
        np.testing.assert_array_equal(planes["value"][at].reshape(words.shape), words)
        np.testing.assert_array_equal(planes["value_scale"][at].reshape(scales.shape), scales)


def test_rejected_tokens_are_not_sealed():
    driver = Driver()
    sequence = driver.add()
    driver.step(sequence, 70)
    driver.step(sequence, 10, accepted=[1])
    assert sequence.num_sealed_tokens == 0
    driver.step(sequence, 1)
    assert sequence.num_sealed_tokens == BLOCK


def test_an_abandoned_step_seals_nothing():
    driver = Driver()
    sequence = driver.add()
    driver.step(sequence, 50)
    driver.cache.abandon(driver.cache.prepare([sequence], 100))
    assert (sequence.num_sealed_tokens, driver.used()) == (0, [2, 2])
    driver.step(sequence, 100)


def test_a_commit_whose_quantisation_fails_changes_nothing(monkeypatch):
    driver = Driver()
    sequence = driver.add()
    batch = driver.cache.prepare([sequence], 100)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("pagecore.cache.memory.sealer.seal_kv", fail)
        with pytest.raises(MemoryError):
            driver.cache.commit(batch)
    assert batch.in_flight
    assert sequence.num_computed_tokens == sequence.num_sealed_tokens == 0
    driver.cache.commit(batch)
    assert sequence.num_sealed_tokens == BLOCK


def test_forks_seal_shared_blocks_to_equal_bytes():
    driver = Driver(num_blocks=20)
    parent = driver.add()
    driver.step(parent, 90)
    child = driver.fork(parent)
    for count in (3, 60, 1):
        driver.step(parent, count)
        driver.step(child, count + 4)
    tables = [driver.cache.block_table(0).numpy()[sequence.row] for sequence in (parent, child)]
    assert (tables[0][:2] == tables[1][:2]).all()
    assert tables[0][2] != tables[1][2]


def test_two_forks_seal_a_shared_block_in_one_commit():
    driver = Driver()
    parent = driver.add()
    driver.step(parent, 70)
    child = driver.fork(parent)
    batch = driver.cache.prepare([parent, child], 4)
    rows = [numbers(part, 8, 2, dim) for part, dim in enumerate((64, 32))]
    driver.cache.write(0, *rows, batch)
    driver.cache.commit(batch)
    assert batch.sealed_blocks(0).shape == (1, 2)
    assert parent.num_sealed_tokens == child.num_sealed_tokens == BLOCK
    driver.cache.check_invariants()


def test_shared_lengths_count_sealed_tokens():
    driver = Driver(num_blocks=20)
    first = driver.add(range(150))
    driver.step(first, 100)
    second = driver.cache.fork(first)
    assert driver.cache.shared_length([first, second]) == first.num_sealed_tokens == 32
    assert driver.cache.shared_length([first, second], 1) == 0
    driver.step(first, 50)
    assert driver.cache.shared_length([first, second]) == 32
    assert driver.cache.shared_length([first]) == 96


def test_a_cache_without_bytes_lists_what_its_owner_seals():
    cache = PagedKVCache([AttentionSpec(2, 64), SPEC], block_size=BLOCK, num_blocks=9, device="none")
    sequence = cache.add_sequence([])
    batch = cache.prepare([sequence], 100)
    tail = batch.group(1).slot_mapping.numpy()[::BLOCK] // BLOCK
    sealed = cache.block_table(1).numpy()[sequence.row]
    cache.commit(batch)
    assert batch.sealed_blocks(1).tolist() == [[tail[0], sealed[0]]]
    assert batch.sealed_blocks(0).shape == (0, 2)
    cache.commit(cache.prepare([sequence], 1))


def test_a_reused_batch_lists_the_blocks_that_its_last_commit_sealed():
    cache = PagedKVCache(SPEC, block_size=BLOCK, num_blocks=9, max_tokens_per_sequence=20 * BLOCK, device="none")
    sequence, batch = cache.add_sequence([]), cache.make_batch(1, 10 * BLOCK)
    cache.commit(cache.prepare([sequence], 100, out=batch))
    listed = batch.sealed_blocks(0).tolist()
    assert listed
    assert cache.try_prepare([sequence], 10 * BLOCK, out=batch) is None
    assert batch.sealed_blocks(0).tolist() == listed
    cache.prepare([sequence], 1, out=batch)
    assert batch.sealed_blocks(0).tolist() == []
    cache.commit(batch)
    assert batch.sealed_blocks(0).tolist() == []


def test_prefixes_are_reused_up_to_the_sealed_blocks():
    driver = Driver(num_blocks=20)
    first = driver.add(range(150))
    driver.step(first, 150)
    assert driver.cache.match_length(range(200)) == first.num_sealed_tokens == 96
    second = driver.cache.add_sequence(range(120))
    assert (second.num_cached_tokens, second.num_sealed_tokens, driver.used()) == (96, 96, [5, 2])
    driver.stored[second] = [[side[:96] for side in stored] for stored in driver.stored[first]]
    driver.step(second, 24)
    driver.step(second, 80)


def test_a_removed_sequence_leaves_all_of_its_whole_blocks():
    driver = Driver(num_blocks=20)
    first = driver.add(range(150))
    driver.step(first, 150)
    stored = driver.stored.pop(first)
    driver.cache.remove(first)
    assert (driver.cache.match_length(range(200)), driver.used()) == (128, [0, 0])
    second = driver.cache.add_sequence(range(200))
    driver.stored[second] = [[side[:128] for side in each] for each in stored]
    driver.step(second, 72)


@pytest.mark.parametrize("change", ["swap out", "shorten", "remove"])
def test_a_sequence_that_changes_while_its_removal_seals_blocks(monkeypatch, change):
    """Code of the caller can run there, a finaliser for example."""
    driver = Driver(num_blocks=20)
    cache, space = driver.cache, SwapSpace(driver.cache, num_blocks=8)
    sequence = driver.add(range(150))
    driver.step(sequence, 150)
    seals = sealer.seal_kv

    def change_within(*arrays, **options):
        seals(*arrays, **options)
        monkeypatch.setattr(sealer, "seal_kv", seals)
        if change == "swap out":
            cache.swap_out([sequence], space)
        elif change == "shorten":
            cache.truncate(sequence, 32)
        else:
            cache.remove(sequence)

    monkeypatch.setattr(sealer, "seal_kv", change_within)
    if change == "remove":
        with pytest.raises(InvalidSequence):
            cache.remove(sequence)
    else:
        cache.remove(sequence)
    cache.check_invariants()
    assert driver.used() == [0, 0]
    assert cache.match_length(range(200)) == {"swap out": 96, "shorten": 96, "remove": 128}[change]


def test_sealed_blocks_of_the_caller_are_refused():
    driver = Driver()
    batch = driver.cache.prepare([driver.add()], 1)
    with pytest.raises(UnsupportedOption, match="sealed is given, but the cache passes its own"):
        driver.cache.attend(0, numbers(0, 1, 4, 64), batch, sealed=None)


def test_windows_next_to_sealed_blocks_keep_what_a_prefix_needs():
    layers = [AttentionSpec(2, 64, dtype="float32", num_query_heads=4, window=20), SPEC]
    cache = PagedKVCache(layers, block_size=BLOCK, num_blocks=12)
    with cache.add_sequence(range(150)) as sequence:
        for count in (120, 10, 20):
            batch = cache.prepare([sequence], count)
            for layer, dim in enumerate((64, 32)):
                cache.write(layer, numbers(0, count, 2, 64), numbers(1, count, 2, dim), batch)
            cache.commit(batch)
            assert cache.match_length(range(200)) == sequence.num_sealed_tokens > 0
            assert cache.held_from(sequence, 0) == (sequence.num_sealed_tokens - 19) // BLOCK * BLOCK
    assert cache.match_length(range(200)) == 128


@pytest.mark.parametrize("limits", [{"window": 50}, {"window": 90, "sink_tokens": 40}, {"chunk": 64}])
def test_sealed_blocks_that_leave_a_window_are_released(limits):
    spec = replace(SPEC, **limits)
    assert (spec.tail.window, spec.tail.chunk, spec.tail.sink_tokens) == (RESIDUAL + 1, None, 0)
    driver = Driver(spec, num_blocks=14)
    sequence = driver.add(range(400))
    for count in (150, 1, 40, 60, 33, 1):
        driver.step(sequence, count)
        sealed = sequence.num_sealed_tokens
        first = max(0, sealed - limits.get("window", 1) + 1) // BLOCK * BLOCK
        first = sealed // 64 * 64 if "chunk" in limits else first
        sinks = -(-limits.get("sink_tokens", 0) // BLOCK)
        assert driver.cache.held_from(sequence, 0) == (0 if first <= sinks * BLOCK else first)
        whole = -(-sequence.num_computed_tokens // BLOCK)
        assert driver.used() == [whole - first // BLOCK + min(sinks, first // BLOCK), whole - sealed // BLOCK]
    # A chunk that begins where the sealed tokens end needs none of them.
    assert driver.cache.match_length(range(300)) == sequence.num_sealed_tokens == 224


def test_an_arrival_of_numbers_cannot_seal_blocks_of_a_window():
    cache = PagedKVCache(replace(SPEC, window=50), num_blocks=9)
    sequence = cache.add_sequence(range(150))
    with pytest.raises(
        UnsupportedOption, match=r"group 0 has sealed blocks and a window, so an arrival .* pass num_sealed"
    ):
        cache.prepare_arrival(sequence, 150)
    batch = cache.prepare_arrival(sequence, 150, num_sealed_tokens=96)
    assert (cache.block_table(0).numpy()[sequence.row, :5] > 0).tolist() == [False, True, True, True, True]
    cache.commit(batch)
    assert cache.match_length(range(200)) == 96


def test_sealed_tokens_that_arrive_are_not_limited_by_lookahead():
    cache = PagedKVCache(replace(SPEC, window=200, lookahead=4), num_blocks=9)
    sequence = cache.add_sequence(range(96))
    cache.commit(cache.prepare_arrival(sequence, 96, num_sealed_tokens=96))
    cache.truncate([sequence], 94)
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (94, 64)
    cache.truncate([sequence], 64)
    assert sequence.num_sealed_tokens == 64
    again = cache.add_sequence(range(500, 596))
    cache.commit(cache.prepare_arrival(again, 96, num_sealed_tokens=64))
    cache.truncate([again], 92)
    assert (again.num_computed_tokens, again.num_sealed_tokens) == (92, 64)
    cache.check_invariants()


def test_a_sequence_that_changes_while_its_arrival_is_prepared(monkeypatch):
    """A finaliser can run while the batch of the arrival is allocated."""
    cache = PagedKVCache(SPEC, block_size=BLOCK, num_blocks=9)
    sequence = cache.add_sequence(range(150))
    new_batch = prepare.new_batch

    def change_within(*arguments):
        monkeypatch.setattr(prepare, "new_batch", new_batch)
        cache.commit(cache.prepare([sequence], 32))
        return new_batch(*arguments)

    monkeypatch.setattr(prepare, "new_batch", change_within)
    with pytest.raises(UnsupportedOption, match="has 32 computed tokens, of which 0 are sealed"):
        cache.prepare_arrival(sequence, 96, num_sealed_tokens=96)
    assert (sequence.num_computed_tokens, sequence.num_sealed_tokens) == (32, 0)
    cache.check_invariants()
    cache.commit(cache.prepare_arrival(sequence, 96))
    assert sequence.num_sealed_tokens == 64


def test_swapped_sequences_continue_bit_for_bit():
    driver = Driver(num_blocks=12)
    sequence = driver.add(range(200))
    driver.step(sequence, 110)
    space = SwapSpace(driver.cache, num_blocks=8)
    driver.cache.swap_out([sequence], space)
    driver.cache.clear_prefix_cache()
    poison(driver.cache, np.nan)
    other = driver.add()
    driver.step(other, 33)
    driver.cache.swap_in([sequence])
    assert sequence.num_sealed_tokens == 64
    driver.step(sequence, 60)
    with pytest.raises(UnsupportedDtype, match="int32"):
        SwapSpace(driver.cache, num_blocks=8, dtype="float16")


def test_forks_that_come_back_publish_what_all_of_them_have_sealed():
    driver = Driver(num_blocks=20)
    parent = driver.add(range(200))
    driver.step(parent, 70)
    child = driver.fork(parent)
    driver.step(child, 70)
    assert (parent.num_sealed_tokens, child.num_sealed_tokens) == (0, 96)
    space = SwapSpace(driver.cache, num_blocks=16)
    driver.cache.swap_out([parent, child], space)
    driver.cache.swap_in([parent, child])
    assert driver.cache.match_length(range(200)) == 0
    driver.step(parent, 60)
    driver.step(child, 1)
    driver.cache.swap_out([parent, child], space)
    driver.cache.swap_in([parent, child])
    assert driver.cache.match_length(range(200)) == 96  # the third block is the child's alone
    driver.cache.check_invariants()


def test_a_tail_needs_room_for_residual_and_step_alone():
    driver = Driver(num_blocks=[40, 5])  # 4 blocks: 40 + 31 + 57 tokens
    sequence = driver.add()
    assert driver.cache.max_length == 39 * BLOCK
    assert driver.cache.max_step_tokens == 57
    for _ in range(12):
        driver.step(sequence, 57)
    with pytest.raises(OutOfBlocks, match="in group 1"):
        driver.cache.prepare([sequence], 100)
    assert driver.cache.shortage([sequence], 500, step_tokens=57) == 0


def test_forks_copy_no_block_that_is_not_sealed():
    """The block of the sealed group that two forks share has no bytes yet; that of the tail is copied."""
    driver = Driver(num_blocks=20, prefix_cache=False)
    parent = driver.add()
    driver.step(parent, 70)
    child = driver.fork(parent)
    driver.step(child, 1)
    assert driver.cache.stats().num_copied_blocks == 1
    tables = [driver.cache.block_table(0).numpy()[one.row] for one in (parent, child)]
    assert (tables[0][:3] == tables[1][:3]).tolist() == [True, True, False]
    batch = driver.cache.prepare([child, parent], [1, 1])
    assert [len(pairs) for pairs in batch._step.copied()] == [0, 0]
    driver.cache.abandon(batch)
    driver.step(child, 60)
    driver.step(parent, 60)


def test_a_fork_whose_copies_are_undone_has_its_blocks_again(monkeypatch):
    driver = Driver(num_blocks=20)
    parent = driver.add()
    driver.step(parent, 70)
    child = driver.fork(parent)
    before, stats = driver.cache.block_table(0).numpy().copy(), driver.cache.stats()

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("pagecore.cache.memory.store.copy_blocks", fail)
        with pytest.raises(MemoryError):
            driver.cache.prepare([child], 1)
    np.testing.assert_array_equal(driver.cache.block_table(0).numpy(), before)
    assert driver.cache.stats() == stats
    driver.cache.check_invariants()
