"""PagedKVCache: the arrays of a step, the results of attention, and the statistics."""

import random
import threading

import ml_dtypes
import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    DeviceError,
    NotEnoughMemory,
    OutOfBlocks,
    PagedKVCache,
    Plane,
    SwapSpace,
    UnsupportedOption,
)
from tests.cache.caches import SPEC, WINDOWED, advance, make, normal
from tests.reference.dense import dense_attention


def test_a_step_fills_every_array_and_pads_the_rest():
    cache = make()
    first, second = cache.add_sequence([1, 2, 3, 4, 5]), cache.add_sequence([6, 7])
    batch = cache.make_batch(4, 12)
    advance(cache, [first], 3, out=batch)
    assert cache.prepare([first, second], [2, 1], out=batch) is batch
    assert (batch.num_sequences, batch.num_tokens) == (2, 3)
    null_row = cache.max_sequences
    assert np.asarray(batch.rows).tolist() == [first.row, second.row, null_row, null_row]
    assert np.asarray(batch.query_lens).tolist() == [2, 1, 0, 0]
    assert np.asarray(batch.cu_query_lens).tolist() == [0, 2, 3, 3, 3]
    assert np.asarray(batch.seq_lens).tolist() == [5, 1, 0, 0]
    assert np.asarray(batch.positions).tolist() == [3, 4, 0] + [0] * 9
    assert np.asarray(batch.group(0).slot_mapping).tolist() == [7, 8, 12] + [-1] * 9
    assert np.asarray(batch.group(0).block_table)[first.row, :3].tolist() == [1, 2, 0]
    assert not np.asarray(batch.group(0).block_table)[null_row].any()


def test_a_batch_keeps_its_addresses():
    cache = make()
    sequence = cache.add_sequence(range(8))
    batch = cache.make_batch(4, 8)
    arrays = [batch.rows, batch.positions, batch.seq_lens, batch.group(0).slot_mapping]
    before = [array.pointer for array in arrays]
    for _ in range(3):
        advance(cache, [sequence], 2, out=batch)
    assert [
        array.pointer for array in (batch.rows, batch.positions, batch.seq_lens, batch.group(0).slot_mapping)
    ] == before


@pytest.mark.parametrize("layout", ["layerwise", "blockwise", "BNCHD"])
def test_prefill_in_chunks_then_decode_equals_dense_attention(layout):
    cache = make([SPEC, WINDOWED, Alias(0)], layout=layout)
    sequence = cache.add_sequence(range(11))
    key, value, query = normal(3, 14, 2, 8), normal(3, 14, 2, 8, seed=1), normal(3, 14, 4, 8, seed=2)
    done = 0
    for count in (5, 6, 1, 1, 1):
        batch = cache.prepare([sequence], count)
        new = slice(done, done + count)
        for layer, spec in enumerate((SPEC, WINDOWED, SPEC)):
            source = 0 if layer == 2 else layer
            if layer < 2:
                cache.write(layer, key[layer, new], value[layer, new], batch)
            found = cache.attend(layer, query[layer, new], batch)
            keys, values = key[source, : new.stop], value[source, : new.stop]
            expected = dense_attention(query[layer, new], keys, values, window=spec.window)
            np.testing.assert_allclose(found, expected, atol=1e-5)
        cache.commit(batch)
        done += count


def test_attend_takes_every_option_over_the_spec():
    cache = make(AttentionSpec(2, 8, dtype="float32", num_query_heads=4, sinks=[0.5, 1.0, -1.0, 0.0], softcap=5.0))
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    key, value, query = normal(9, 2, 8), normal(9, 2, 8, seed=1), normal(9, 4, 8, seed=2)
    cache.write(0, key, value, batch)
    sinks = np.array([0.5, 1.0, -1.0, 0.0])
    expected = dense_attention(query, key, value, softcap=5.0, sinks=sinks)
    np.testing.assert_allclose(cache.attend(0, query, batch), expected, atol=1e-5)
    found, lse = cache.attend(0, query, batch, window=3, softcap=0.0, sinks=None, scale=0.7, return_lse=True)
    np.testing.assert_allclose(found, dense_attention(query, key, value, window=3, scale=0.7), atol=1e-5)
    assert lse.shape == (9, 4)


def test_attend_takes_queries_and_returns_outputs_in_float8():
    cache = make(AttentionSpec(2, 8, dtype="bfloat16", num_query_heads=4))
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    key, value, query = (
        normal(9, heads, 8, seed=heads).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for heads in (2, 1, 4)
    )
    value = np.repeat(value, 2, axis=1)
    cache.write(0, key.astype(ml_dtypes.bfloat16), value.astype(ml_dtypes.bfloat16), batch)
    codes = query.astype(ml_dtypes.float8_e4m3fn)
    factors = np.array([0.5, 2.0], np.float32)
    expected = dense_attention(query * factors.repeat(2)[:, None], key, value)
    found = cache.attend(0, codes, batch, query_scale=factors)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=0.05)
    narrow = cache.attend(0, codes, batch, query_scale=factors, output_scale=0.25)
    assert narrow.dtype == codes.dtype
    np.testing.assert_allclose(narrow.astype(np.float32) * 0.25, expected, atol=0.05, rtol=1 / 16)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_taking_blocks_is_all_or_nothing_over_groups(prefix_cache):
    sizes = {"num_blocks": np.array([17, 3]), "max_tokens_per_sequence": 64}
    cache = make([SPEC, WINDOWED], prefix_cache=prefix_cache, **sizes)
    sequence = cache.add_sequence(range(20))
    before = cache.stats()
    with pytest.raises(OutOfBlocks, match=r"5 .* 2 are free in group 1; remove a sequence, swap one out") as caught:
        cache.prepare([sequence], 20)
    assert (caught.value.requested, caught.value.available) == ((5, 5), (16, 2))
    assert cache.try_prepare([sequence], 20) is None
    assert cache.shortage([sequence], 20) == 3
    assert cache.stats() == before
    advance(cache, [sequence], 8)


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**70])
def test_a_window_beyond_every_length_keeps_every_block(window):
    cache = make(AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=window))
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    key, value, query = normal(9, 2, 8), normal(9, 2, 8), normal(9, 4, 8)
    cache.write(0, key, value, batch)
    assert np.isfinite(cache.attend(0, query, batch)).all()
    cache.commit(batch)
    assert (sequence.num_computed_tokens, batch.in_flight) == (9, False)
    assert cache.stats().num_used_blocks == 3


def test_a_cache_without_bytes_does_everything_except_hold_key_and_value():
    cache = make(device="none")
    sequence = cache.add_sequence(range(9))
    batch = advance(cache, [sequence], 9)
    assert np.asarray(batch.group(0).slot_mapping).tolist() == list(range(4, 13))
    assert cache.nbytes == 0
    batch = cache.prepare([sequence], 1)
    for use in (
        lambda: cache.key(0),
        lambda: cache.value(0),
        lambda: cache.write(0, normal(9, 2, 8), normal(9, 2, 8), batch),
        lambda: cache.attend(0, normal(9, 4, 8), batch),
    ):
        with pytest.raises(DeviceError, match="none"):
            use()


@pytest.mark.parametrize(
    "options",
    [{"sinks": [0.5] * 4}, {"label_channels": [[0, 3]] * 2}, {"format": "float8_e4m3fn", "key_scale": [1, 2]}],
)
def test_a_cache_without_bytes_takes_options_that_are_arrays(options):
    cache = make(AttentionSpec(2, 8, num_query_heads=4, **options), device="none")
    advance(cache, [cache.add_sequence(range(9))], 9)
    assert cache.stats().num_used_blocks == 3


def test_fragmentation_counts_slots_without_a_token():
    cache = make()
    parent = cache.add_sequence(range(6))
    advance(cache, [parent], 6)
    assert cache.stats().fragmentation == 2 / 8
    child = cache.fork(parent)
    assert cache.stats().fragmentation == 2 / 8
    advance(cache, [child], 1)
    assert cache.stats().fragmentation == 3 / 12
    assert cache.stats().utilization == 3 / 16


@pytest.mark.parametrize("seed", range(5))
def test_fragmentation_equals_a_count_over_all_slots(seed):
    """Forks of truncated sequences share a block up to different lengths."""
    cache, choice = make(num_blocks=200, max_sequences=40, prefix_cache=False), random.Random(seed)
    for _ in range(30):
        sequences = list(cache.sequences.values())
        if not sequences or choice.random() < 0.3:
            sequence = cache.add_sequence(range(choice.randrange(1, 20)))
            advance(cache, [sequence], choice.randint(1, sequence.num_tokens))
        elif choice.random() < 0.5:
            cache.fork(choice.choice(sequences))
        else:
            sequence = choice.choice(sequences)
            cache.truncate(sequence, choice.randint(0, sequence.num_computed_tokens))
    listed = sorted(cache.sequences.values(), key=lambda sequence: sequence.num_tokens - sequence.num_computed_tokens)
    swapped, flying = listed[0], listed[-1]
    cache.try_swap_out([swapped], SwapSpace(cache, num_blocks=20))
    batch = cache.prepare([flying], [flying.num_tokens - flying.num_computed_tokens])
    filled = {}
    for sequence in listed[1:]:
        blocks = np.asarray(cache.block_table(0))[sequence.row, : -(-sequence.capacity // 4)]
        for i, block in enumerate(blocks.tolist()):
            filled[block] = max(filled.get(block, 0), min(4, max(0, sequence.num_computed_tokens - 4 * i)))
    stats = cache.stats()
    assert stats.fragmentation == (4 * len(filled) - sum(filled.values())) / (4 * len(filled))
    assert (stats.num_sequences, stats.num_swapped_sequences) == (len(listed), 1)
    assert stats.num_tokens == sum(sequence.num_computed_tokens for sequence in listed[1:])
    assert stats.num_swapped_tokens == swapped.num_computed_tokens
    cache.abandon(batch)


def test_a_block_that_the_prefix_cache_has_in_full_has_no_slots_without_a_token():
    cache = make()
    sequence = cache.add_sequence(range(8))
    advance(cache, [sequence], 8)
    cache.truncate(sequence, 5)
    assert cache.stats().num_cached_blocks == 2
    assert cache.stats().fragmentation == 0


def test_memory_is_divided_over_groups():
    # One null block each, and 4 for the first sequence of 16 tokens. A further one has 4 blocks, and 3 of its window.
    cache = PagedKVCache([SPEC, SPEC, WINDOWED], block_size=4, memory=3 * 512 * 10, max_tokens_per_sequence=16)
    assert cache.num_blocks == (10, 9)
    assert cache.nbytes == 512 * (2 * 10 + 9)
    with pytest.raises(NotEnoughMemory, match="3072"):
        PagedKVCache([SPEC, SPEC, WINDOWED], block_size=4, memory=3 * 512 * 2 - 1)


def test_layers_of_one_group_may_differ_in_what_only_attention_sees():
    cache = make([AttentionSpec(2, 8, softcap=s) for s in (0.0, 30.0)] + [AttentionSpec(2, 8, window=4), Alias(1)])
    assert cache.num_groups == 2
    assert [cache.group_of(layer) for layer in range(4)] == [0, 0, 1, 0]
    assert cache.key(3).pointer == cache.key(1).pointer


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_user_defined_spec_needs_only_planes_and_a_window(device):
    class Scaled:
        window = 6
        planes = (Plane("key", (2, 8), "float32"), Plane("value", (2, 8), "float32"), Plane("scale", (2,), "float32"))

    cache = make([SPEC, Scaled()], device=device)
    sequence = cache.add_sequence(range(9))
    batch = cache.prepare([sequence], 9)
    if device == "cpu":
        key, query = normal(9, 2, 8), normal(9, 4, 8, seed=1)
        cache.write(1, key, key, batch)
        np.testing.assert_allclose(cache.attend(1, query, batch), dense_attention(query, key, key, window=6), atol=1e-5)
    cache.commit(batch)
    assert cache.stats().num_used_blocks == 3 + 2


def test_int32_slots_on_request():
    cache = make(index_dtype="int32")
    sequence = cache.add_sequence(range(5))
    batch = advance(cache, [sequence], 5)
    assert batch.group(0).slot_mapping.dtype == "int32"
    with pytest.raises(UnsupportedOption, match="int32"):
        make(index_dtype="int32", device="none", num_blocks=2**29 + 1, max_tokens_per_sequence=64)


def test_threads_may_share_a_cache():
    cache = PagedKVCache(SPEC, block_size=4, num_blocks=200, max_sequences=64, device="none")

    def work():
        for length in range(1, 30):
            with cache.add_sequence(range(length)) as sequence:
                advance(cache, [sequence], length)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.check_invariants()
    assert cache.num_available == 199
