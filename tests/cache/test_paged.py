"""PagedKVCache: what a step, a sequence and a refusal do."""

import threading

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    DeviceError,
    InvalidSequence,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    PagedKVCache,
    ShapeError,
    UnsupportedDtype,
    UnsupportedOption,
)
from tests.reference.dense import dense_attention

SPEC = AttentionSpec(2, 8, dtype="float32", num_query_heads=4)
WINDOWED = AttentionSpec(2, 8, dtype="float32", num_query_heads=4, window=6)


def make(layers=SPEC, **options):
    return PagedKVCache(layers, **{"block_size": 4, "num_blocks": 17, "max_sequences": 4} | options)


def advance(cache, sequences, counts, **options):
    batch = cache.prepare(sequences, counts, **options)
    cache.commit(batch)
    return batch


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_worked_example_2_sequences_take_blocks_as_they_grow():
    cache = make()
    seven = cache.add_sequence(range(7))
    advance(cache, [seven], 7)
    assert seven.capacity == 8
    assert cache.num_available == 14
    three = cache.add_sequence(range(3))
    advance(cache, [three], 3)
    assert three.capacity == 4
    advance(cache, [three], 1)
    assert three.capacity == 4
    advance(cache, [three], 1)
    assert three.capacity == 8


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


def test_forks_share_blocks_until_one_of_them_writes():
    cache = make()
    parent = cache.add_sequence(range(6))
    batch = cache.prepare([parent], 6)
    key = normal(6, 2, 8)
    cache.write(0, key, key, batch)
    cache.commit(batch)
    child = cache.fork(parent, id="child")
    assert cache.num_available == 14
    assert child.tokens.tolist() == parent.tokens.tolist()
    batch = cache.prepare([parent, child], 1)
    assert cache.num_available == 13
    assert cache.stats().num_copied_blocks == 1
    new = normal(2, 2, 8, seed=3)
    cache.write(0, new, new, batch)
    query = normal(2, 4, 8, seed=4)
    found = cache.attend(0, query, batch)
    for i in range(2):
        own = np.concatenate([key, new[i : i + 1]])
        np.testing.assert_allclose(found[i], dense_attention(query[i : i + 1], own, own)[0], atol=1e-5)
    cache.commit(batch)
    cache.check_invariants()


def test_rejected_tokens_keep_their_capacity():
    cache = make()
    sequence = cache.add_sequence(range(4))
    advance(cache, [sequence], 4)
    batch = cache.prepare([sequence], 9)
    cache.commit(batch, accepted=[1])
    assert sequence.num_computed_tokens == 5
    assert sequence.capacity == 16
    free = cache.num_available
    advance(cache, [sequence], 9)
    assert cache.num_available == free


def test_an_abandoned_step_leaves_no_trace():
    cache = make([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(10))
    advance(cache, [sequence], 5)
    before = (cache.stats(), sequence.capacity)
    batch = cache.prepare([sequence], 5)
    assert cache.stats() != before[0]
    cache.abandon(batch)
    assert (cache.stats(), sequence.capacity) == before
    assert sequence.num_computed_tokens == 5
    assert np.asarray(cache.prepare([sequence], 5).positions)[0] == 5


def test_a_window_gives_back_what_no_query_sees():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 4], max_tokens_per_sequence=64)
    sequence = cache.add_sequence(range(40))
    for _ in range(40):
        advance(cache, [sequence], 1)
    stats = cache.stats()
    assert stats.num_used_blocks == 10 + 2
    table = np.asarray(cache.prepare([sequence], 0).group(1).block_table)[sequence.row]
    assert (table[:8] == 0).all()
    assert (table[8:10] > 0).all()


def test_truncate_below_a_released_window_is_refused_and_to_zero_is_not():
    cache = make([SPEC, WINDOWED])
    sequence = cache.add_sequence(range(30))
    advance(cache, [sequence], 30)
    before = cache.stats()
    with pytest.raises(UnsupportedOption, match="window of 6"):
        cache.truncate(sequence, 20)
    assert cache.stats() == before
    cache.truncate(sequence, 29)
    cache.truncate(sequence, 0)
    assert cache.stats().num_used_blocks == 0


def test_taking_blocks_is_all_or_nothing_over_groups():
    cache = make([SPEC, WINDOWED], num_blocks=[17, 3], max_tokens_per_sequence=64)
    sequence = cache.add_sequence(range(20))
    before = cache.stats()
    with pytest.raises(OutOfBlocks) as caught:
        cache.prepare([sequence], 20)
    assert (caught.value.requested, caught.value.available) == ((5, 5), (16, 2))
    assert cache.try_prepare([sequence], 20) is None
    assert cache.shortage([sequence], 20) == 3
    assert cache.stats() == before
    advance(cache, [sequence], 8)


def test_ids_may_come_after_their_step():
    cache = make()
    sequences = [cache.add_sequence([1, 2]), cache.add_sequence([3])]
    advance(cache, sequences, [2, 1])
    batch = cache.prepare(sequences, 1)
    assert sequences[0].num_tokens == 2
    cache.append_tokens(sequences, np.array([7, 8]))
    cache.commit(batch)
    assert sequences[0].num_computed_tokens == 3
    cache.append_tokens(sequences, [[9, 10], []])
    assert sequences[0].tokens.tolist() == [1, 2, 7, 9, 10]
    assert sequences[1].tokens.tolist() == [3, 8]


def test_reorder_lets_beams_become_their_parents():
    cache = make()
    beams = [cache.add_sequence([i] * 5, id=i) for i in range(3)]
    advance(cache, beams, 5)
    cache.reorder(beams, [beams[2], beams[0], beams[0]])
    assert [beam.tokens[0] for beam in beams] == [2, 0, 0]
    assert cache.stats().num_used_blocks == 4
    cache.check_invariants()


def test_a_sequence_is_a_context_manager():
    cache = make()
    with cache.add_sequence(range(5)) as sequence:
        advance(cache, [sequence], 5)
        assert cache.num_available == 14
    assert cache.num_available == 16
    with pytest.raises(InvalidSequence, match="removed"):
        _ = sequence.capacity
    with cache.add_sequence(range(5)) as sequence:
        cache.remove(sequence)


def test_a_sequence_may_be_removed_while_its_step_is_in_flight():
    cache = make()
    stays, goes = cache.add_sequence(range(4)), cache.add_sequence(range(4))
    batch = cache.prepare([stays, goes], 4)
    cache.remove(goes)
    newcomer = cache.add_sequence(range(2))
    cache.commit(batch)
    assert stays.num_computed_tokens == 4
    assert newcomer.num_computed_tokens == 0
    cache.check_invariants()


def first_values(cache, sequence):
    """The first number of each computed token's value in layer 0."""
    values = cache.value(0).numpy()
    blocks = cache.make_batch().group(0).block_table.numpy()[sequence.row]
    return [values[blocks[at // 4], at % 4, 0, 0].item() for at in range(sequence.num_computed_tokens)]


def write_full(cache, batch, number):
    filled = np.full((batch.num_tokens, 2, 8), number, np.float32)
    cache.write(0, filled, filled, batch)


@pytest.mark.parametrize("layers", [SPEC, [SPEC, WINDOWED]], ids=["one group", "two groups"])
def test_a_step_writes_nothing_for_a_sequence_that_was_removed_in_flight(layers):
    cache = make(layers)
    stays, goes, last = (cache.add_sequence(range(6)) for _ in range(3))
    late = cache.prepare([stays, goes, last], [3, 5, 2])
    cache.remove(goes)
    newcomer = cache.add_sequence(range(8))
    batch = cache.prepare([newcomer], 8)
    write_full(cache, batch, 7.0)
    cache.commit(batch)
    assert np.asarray(late.group(0).slot_mapping)[3:8].tolist() == [-1] * 5
    write_full(cache, late, 1.0)
    cache.commit(late)
    assert first_values(cache, newcomer) == [7.0] * 8
    assert first_values(cache, stays) == [1.0] * 3
    assert first_values(cache, last) == [1.0] * 2


def test_a_write_after_abandon_finds_nothing_to_overwrite():
    cache = make()
    failed = cache.prepare([cache.add_sequence(range(4))], 4)
    cache.abandon(failed)
    newcomer = cache.add_sequence(range(4))
    batch = cache.prepare([newcomer], 4)
    write_full(cache, batch, 7.0)
    cache.commit(batch)
    write_full(cache, failed, 1.0)
    assert first_values(cache, newcomer) == [7.0] * 4


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


def test_a_cache_without_bytes_does_all_but_hold_key_and_value():
    cache = make(device="none")
    sequence = cache.add_sequence(range(9))
    batch = advance(cache, [sequence], 9)
    assert np.asarray(batch.group(0).slot_mapping).tolist() == list(range(4, 13))
    assert cache.nbytes == 0
    for use in (
        lambda: cache.key(0),
        lambda: cache.value(0),
        lambda: cache.write(0, normal(9, 2, 8), normal(9, 2, 8), batch),
        lambda: cache.attend(0, normal(9, 4, 8), batch),
    ):
        with pytest.raises(DeviceError, match="none"):
            use()


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


def test_memory_is_shared_out_over_groups():
    cache = PagedKVCache([SPEC, SPEC, WINDOWED], block_size=4, memory=3 * 512 * 10)
    assert cache.num_blocks == (10, 10)
    assert cache.nbytes == 3 * 512 * 10
    with pytest.raises(NotEnoughMemory, match="3072"):
        PagedKVCache([SPEC, SPEC, WINDOWED], block_size=4, memory=3 * 512 * 2 - 1)


def test_layers_of_one_group_may_differ_in_what_only_attention_sees():
    cache = make([AttentionSpec(2, 8, softcap=s) for s in (0.0, 30.0)] + [AttentionSpec(2, 8, window=4), Alias(1)])
    assert cache.num_groups == 2
    assert [cache.group_of(layer) for layer in range(4)] == [0, 0, 1, 0]
    assert cache.key(3).pointer == cache.key(1).pointer


def test_int32_slots_where_asked_for():
    cache = make(index_dtype="int32")
    sequence = cache.add_sequence(range(5))
    batch = advance(cache, [sequence], 5)
    assert batch.group(0).slot_mapping.dtype == "int32"
    with pytest.raises(UnsupportedOption, match="int32"):
        make(index_dtype="int32", device="none", num_blocks=2**29 + 1, max_tokens_per_sequence=64)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefix_cache": True}, UnsupportedOption),
        ({"parallel": 2}, UnsupportedOption),
        ({"device": "cuda"}, DeviceError),
        ({"device": "tpu"}, DeviceError),
        ({"index_dtype": "uint8"}, UnsupportedOption),
        ({"layout": "rowwise"}, UnsupportedOption),
        ({"num_blocks": None}, ShapeError),
        ({"memory": "1GiB"}, ShapeError),
        ({"num_blocks": 1}, ShapeError),
        ({"num_blocks": [17, 17]}, ShapeError),
        ({"block_size": 0}, ShapeError),
        ({"max_sequences": 0}, ShapeError),
        ({"max_tokens_per_sequence": 0}, ShapeError),
        ({"num_blocks": None, "memory": 100}, NotEnoughMemory),
        ({"layers": []}, ShapeError),
        ({"layers": [Alias(0)]}, ShapeError),
        ({"layers": [SPEC, Alias(1)]}, ShapeError),
        ({"layers": ["llama"]}, UnsupportedOption),
        ({"layers": [SPEC, SPEC], "num_layers": 3}, ShapeError),
        ({"num_layers": 0}, ShapeError),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, error):
    with pytest.raises(error):
        make(**options)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([[1, 2]], ShapeError),
        ([1.5], UnsupportedDtype),
        ([2**31], ShapeError),
        (range(65), ShapeError),
        (5, ShapeError),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens, error):
    cache = make()
    with pytest.raises(error):
        cache.add_sequence(tokens)
    assert cache.num_sequences == 0
    cache.check_invariants()


def test_a_step_that_cannot_be_is_refused_and_changes_nothing():
    cache, other = make(), make()
    first, second, foreign = cache.add_sequence(range(20)), cache.add_sequence(range(20)), other.add_sequence([1])
    gone = cache.add_sequence([1])
    cache.remove(gone)
    batch = cache.make_batch(2, 8)
    before = cache.stats()
    for sequences, counts, error in (
        ([first, first], 1, InvalidSequence),
        ([first, foreign], 1, InvalidSequence),
        ([first, gone], 1, InvalidSequence),
        ([first, "second"], 1, InvalidSequence),
        ([first, None], 1, InvalidSequence),
        ([first], -1, ShapeError),
        ([first], [1, 2], ShapeError),
        ([first], 1.5, UnsupportedDtype),
        ([first], [1.5], UnsupportedDtype),
        ([first], None, UnsupportedDtype),
        ([first], 2**40, ShapeError),
        ([first, second], [5, 4], ShapeError),
        ([first], np.ones((1, 1), int), ShapeError),
    ):
        with pytest.raises(error):
            cache.prepare(sequences, counts, out=batch)
        assert cache.stats() == before
    with pytest.raises(ShapeError):
        cache.prepare([first], 65)
    with pytest.raises(InvalidSequence, match="batch"):
        cache.prepare([first], 1, out=other.make_batch())
    with pytest.raises(InvalidSequence, match="batch"):
        cache.commit("batch")
    assert cache.stats() == before


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (None, UnsupportedDtype),
        (["a", "b"], UnsupportedDtype),
        ([[1], [2, 3]], ShapeError),
        (object(), UnsupportedDtype),
        ({1, 2}, UnsupportedDtype),
        (float("nan"), UnsupportedDtype),
        ([-1, 3], ShapeError),
        (2**31 - 1, ShapeError),
        (2**70, ShapeError),
        ([2**70, 1], ShapeError),
        (np.array(["2020"], "M8[D]"), UnsupportedDtype),
    ],
    ids=repr,
)
def test_counts_that_cannot_be_are_refused_before_a_batch_is_made_for_them(counts, error):
    cache = make()
    sequences = [cache.add_sequence(range(5)) for _ in range(2)]
    before = cache.stats()
    for use in (cache.prepare, cache.try_prepare, cache.shortage):
        with pytest.raises(error, match=r"count|token"):
            use(sequences, counts)
    assert cache.stats() == before


@pytest.mark.parametrize("layer", [-1, 2, 2**70, "0", None, 0.0])
def test_a_layer_that_is_not_there_is_refused_by_cache_and_batch_alike(layer):
    cache = make(num_layers=2)
    batch = cache.make_batch()
    for use in (cache.key, cache.group_of, batch.group):
        with pytest.raises(ShapeError, match=r"layer is .*; the cache has layers 0 to 1"):
            use(layer)
        use(np.int64(1))


@pytest.mark.parametrize("device", ["cpu", "none"])
@pytest.mark.parametrize("layout", ["rowwise", "", 5, []])
def test_a_layout_that_is_none_is_refused_with_and_without_bytes(device, layout):
    with pytest.raises(UnsupportedOption, match="layout is"):
        make(device=device, layout=layout)


@pytest.mark.parametrize("name", [float("nan"), (1, "a"), frozenset([1]), b"x", "", object()], ids=repr)
def test_any_hashable_names_a_sequence(name):
    cache = make()
    with cache.add_sequence([1, 2], id=name) as sequence:
        assert sequence.id is name
        cache.check_invariants()
        with pytest.raises(InvalidSequence, match="is in the cache"):
            cache.add_sequence([1], id=name)
    assert cache.num_sequences == 0


def test_sequences_may_come_from_an_iterator():
    cache = make()
    beams = [cache.add_sequence([i] * 5) for i in range(2)]
    assert cache.shortage(iter(beams), 5) == 0
    cache.commit(cache.prepare(iter(beams), 5))
    cache.reorder(iter(beams), reversed(beams))
    assert [beam.tokens[0] for beam in beams] == [1, 0]
    for use in (lambda: cache.prepare(beams[:1] * 2, 1), lambda: cache.reorder(beams[:1] * 2, beams)):
        with pytest.raises(InvalidSequence, match="sequence 0 is listed twice"):
            use()


def test_a_step_ends_once():
    cache = make()
    sequence = cache.add_sequence(range(8))
    batch = cache.make_batch(1, 4)
    with pytest.raises(InvalidSequence, match="no step in flight"):
        cache.commit(batch)
    cache.prepare([sequence], 4, out=batch)
    for use in (
        lambda: cache.prepare([sequence], 1),
        lambda: cache.prepare([], [], out=batch),
        lambda: cache.fork(sequence),
        lambda: cache.truncate(sequence, 0),
        lambda: cache.reorder([sequence], [sequence]),
    ):
        with pytest.raises(InvalidSequence, match="in flight"):
            use()
    for accepted, error in (
        ([5], ShapeError),
        ([-1], ShapeError),
        ([1, 1], ShapeError),
        (1, ShapeError),
        ([0.5], UnsupportedDtype),
    ):
        with pytest.raises(error, match="accepted"):
            cache.commit(batch, accepted)
    cache.commit(batch)
    with pytest.raises(InvalidSequence, match="no step in flight"):
        cache.abandon(batch)
    assert sequence.num_computed_tokens == 4


def test_names_are_unique_and_rows_are_limited():
    cache = make(max_sequences=2)
    cache.add_sequence([], id="a")
    with pytest.raises(InvalidSequence, match="'a'"):
        cache.add_sequence([], id="a")
    b = cache.add_sequence([])
    with pytest.raises(OutOfRows):
        cache.add_sequence([])
    with pytest.raises(OutOfRows):
        cache.fork(b)
    cache.remove(b)
    cache.add_sequence([])
    assert cache.num_sequences == 2


def test_wrong_layers_and_short_keys_are_refused_before_anything_is_written():
    cache = make()
    sequence = cache.add_sequence(range(4))
    batch = cache.prepare([sequence], 4)
    key = normal(4, 2, 8)
    cache.key(0)[:] = 7.0
    for layer in (1, -1, "0", None):
        with pytest.raises(ShapeError, match="layer"):
            cache.write(layer, key, key, batch)
    with pytest.raises(ShapeError, match="3 tokens"):
        cache.write(0, key[:3], key[:3], batch)
    with pytest.raises(ShapeError):
        cache.write(0, key, key[:3], batch)
    assert (np.asarray(cache.key(0)) == 7.0).all()
    with pytest.raises(ShapeError):
        cache.attend(0, normal(3, 4, 8), batch)


def test_append_refuses_without_appending():
    cache = make()
    first, second = cache.add_sequence([1]), cache.add_sequence([2])
    for sequences, ids, error in (
        ([first, second], [1], ShapeError),
        ([first, second], [[1], [2.5]], UnsupportedDtype),
        ([first, "x"], [1, 2], InvalidSequence),
        ([first, second], [1.0, 2.0], UnsupportedDtype),
    ):
        with pytest.raises(error):
            cache.append_tokens(sequences, ids)
    assert (first.num_tokens, second.num_tokens) == (1, 1)


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
