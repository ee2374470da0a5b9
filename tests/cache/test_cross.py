"""Cross attention: encoder tokens are taken once, shared by forks and digests, and seen by every query."""

import numpy as np
import pytest

from pagecore import (
    Alias,
    AttentionSpec,
    CrossSpec,
    InvalidSequence,
    NotEnoughMemory,
    OutOfBlocks,
    PagedKVCache,
    ShapeError,
    TensorParallel,
    UnsupportedDtype,
    UnsupportedOption,
    available_isas,
    dequantize,
    quantize,
    set_isa,
)
from tests.cache.caches import SPEC, normal
from tests.cache.cross_caches import CROSS, attention, encode, expect_seen, make


def test_worked_example_variants_f1_cross_attention():
    layers = [AttentionSpec(2, 8, dtype="float32"), CrossSpec(2, 8, dtype="float32", max_tokens=1500)]
    cache = PagedKVCache(layers, block_size=16, num_blocks=[40, 95], max_sequences=4)
    sequence = cache.add_sequence(range(448), cross_tokens=1500, cross_digest=b"clip")
    keys, values = normal(1500, 2, 8, seed=1), normal(1500, 2, 8, seed=2)
    batch = cache.prepare([sequence], 448)
    assert batch.cross.num_tokens == 1500
    assert len(set(np.asarray(batch.group(1).slot_mapping).tolist())) == 1500
    assert np.count_nonzero(cache.block_map(1).holders) == 94, "taken once"
    assert np.count_nonzero(cache.block_map(0).holders) == 28
    cache.write(1, keys, values, batch)
    query = normal(448, 4, 8, seed=3)
    found = cache.attend(1, query, batch)
    np.testing.assert_allclose(found, attention(query, keys, values), rtol=0, atol=2e-6)
    cache.commit(batch)
    child = cache.fork(sequence)
    cache.append_tokens([sequence, child], [1, 2])
    expect_seen(cache, [sequence, child], [(keys, values)] * 2)
    held = cache.block_map(1)
    assert np.count_nonzero(held.holders == 2) == 94, "never grown, shared by forks"
    assert not held.cached.any(), "never in the prefix tree"
    cache.check_invariants()
    cache.remove(sequence)
    cache.remove(child)
    assert np.count_nonzero(cache.block_map(1).holders) == 0, "freed with the last sequence"
    assert cache.block_map(0).cached.any(), "the decoder's own blocks stay in the tree"


@pytest.fixture(params=available_isas())
def each_isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(None)


@pytest.mark.parametrize("count", [1, 5, 33])
@pytest.mark.usefixtures("each_isa")
def test_every_instruction_set_attends_to_all_encoder_tokens(count):
    layers = [AttentionSpec(2, 64, num_query_heads=8), CrossSpec(2, 64, num_query_heads=8)]
    cache = PagedKVCache(layers, num_blocks=40, max_sequences=4)
    lengths, stored = (3, 77, 160), []
    sequences = [cache.add_sequence(range(count), cross_tokens=length) for length in lengths]
    keys, values = normal(sum(lengths), 2, 64, seed=1), normal(sum(lengths), 2, 64, seed=2)
    cache.plane("key", 1).numpy()[:] = np.nan
    cache.plane("value", 1).numpy()[:] = np.nan
    batch = cache.prepare(sequences, count)
    cache.write(1, keys, values, batch)
    query = normal(count * 3, 8, 64, seed=3)
    found = cache.attend(1, query, batch)
    table = np.asarray(cache.block_table(1))
    for i, length in enumerate(lengths):
        blocks = table[sequences[i].cross_row][: -(-length // 16)]
        key, value = (cache.plane(plane, 1).numpy()[blocks].reshape(-1, 2, 64)[:length] for plane in ("key", "value"))
        stored.append((key.astype(np.float32), value.astype(np.float32)))
        rows = slice(i * count, (i + 1) * count)
        expected = attention(query[rows], *stored[-1])
        assert np.linalg.norm(found[rows] - expected) < 1e-2 * np.linalg.norm(expected)
        start = sum(lengths[:i])
        np.testing.assert_allclose(stored[-1][0], keys[start : start + length], rtol=2**-8)


@pytest.mark.parametrize("format", ["float8_e4m3fn", "int8_token", "int4_token", "mxfp8"])
def test_formats_store_encoder_tokens(format):
    cross = CrossSpec(2, 32, dtype="float32", num_query_heads=4, format=format)
    cache = PagedKVCache([AttentionSpec(2, 32, dtype="float32", num_query_heads=4), cross], num_blocks=9)
    sequence = cache.add_sequence(range(3), cross_tokens=50)
    keys, values = normal(50, 2, 32, seed=1), normal(50, 2, 32, seed=2)
    batch = cache.prepare([sequence], 3)
    cache.write(1, keys, values, batch)
    query = normal(3, 4, 32, seed=3)
    codes = [quantize(each, format, 1.0 if format == "float8_e4m3fn" else None) for each in (keys, values)]
    rounded = [np.asarray(dequantize(*(code[0], format, code[1]))) for code in codes]
    expected = attention(query, *rounded)
    assert np.linalg.norm(cache.attend(1, query, batch) - expected) < 1e-3 * np.linalg.norm(expected)


def test_a_sequence_without_an_encoder_input_attends_to_nothing_next_to_others():
    cache = make()
    plain = cache.add_sequence(range(9), cross_tokens=0)
    assert (plain.num_cross_tokens, plain.is_cross_written) == (0, True)
    batch = cache.prepare([plain], 9)
    assert batch.cross.num_tokens == 0
    assert not np.asarray(cache.attend(1, normal(9, 4, 8), batch)).any()
    seen = cache.add_sequence(range(3), cross_tokens=7)
    other = cache.add_sequence([5], cross_tokens=0)
    both = cache.prepare([other, seen], [1, 3])  # while the step of the first is in flight
    assert np.asarray(both.cross.new_lens).tolist() == [0, 7]
    keys, values = normal(7, 2, 8, seed=1), normal(7, 2, 8, seed=2)
    cache.write(1, keys, values, both)
    query = normal(4, 4, 8, seed=3)
    found = np.asarray(cache.attend(1, query, both))
    assert not found[0].any()
    np.testing.assert_allclose(found[1:], attention(query[1:], keys, values), rtol=0, atol=2e-6)
    cache.commit(both)
    cache.commit(batch)
    assert np.count_nonzero(cache.block_map(1).holders) == 2
    cache.check_invariants()


def test_abandon_takes_the_encoder_blocks_back():
    cache = make()
    sequence = cache.add_sequence(range(5), cross_tokens=9)
    before = cache.stats()
    batch = cache.prepare([sequence], 5)
    assert cache.stats().num_used_blocks == before.num_used_blocks + 2 + 3
    cache.abandon(batch)
    cache.check_invariants()
    assert cache.stats() == before
    assert np.asarray(batch.group(1).slot_mapping).tolist() == [-1] * 9
    assert not sequence.is_cross_written
    expect = encode(cache, sequence, 5, 1)
    expect_seen(cache, [sequence], [expect])


def test_a_collected_batch_gives_the_blocks_back():
    cache = make()
    sequence = cache.add_sequence(range(5), cross_tokens=9)
    batch = cache.prepare([sequence], 5)
    del batch
    cache.check_invariants()
    assert cache.stats().num_used_blocks == 0


@pytest.mark.parametrize(("num_blocks", "short"), [([17, 3], 1), ([2, 9], 0)])
def test_blocks_of_all_groups_are_taken_or_none(num_blocks, short):
    cache = make(num_blocks=num_blocks, max_tokens_per_sequence=64)
    other = cache.add_sequence(range(2), cross_tokens=4)
    cache.commit(cache.prepare([other], 2))
    before = cache.stats()
    sequence = cache.add_sequence(range(8), cross_tokens=8)
    assert cache.shortage([sequence], 8) == (2 if short == 0 else 1)
    with pytest.raises(OutOfBlocks) as raised:
        cache.prepare([sequence], 8)
    assert "group 1" in str(raised.value) if short else True
    assert raised.value.requested if short else True
    assert cache.try_prepare([sequence], 8) is None
    cache.check_invariants()
    assert cache.stats().num_used_blocks == before.num_used_blocks
    cache.remove(other)
    assert cache.shortage([sequence], 8) == max(0, 3 - num_blocks[0])


def test_a_batch_is_reused_and_has_room_for_encoder_tokens_only_if_asked():
    cache = make()
    sequence = cache.add_sequence(range(5), cross_tokens=9)
    small = cache.make_batch(2, 5)
    with pytest.raises(ShapeError, match=r"writes 9 encoder tokens; the batch has room for 0.*max_cross_tokens"):
        cache.prepare([sequence], 5, small)
    cache.check_invariants()
    assert cache.stats().num_used_blocks == 0
    batch = cache.make_batch(2, 5, 20)
    cache.prepare([sequence], 4, batch)
    keys, values = normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    with pytest.raises(ShapeError, match="8 encoder tokens; the step writes 9"):
        cache.write(1, keys[:8], values[:8], batch)
    cache.write(1, keys, values, batch)
    cache.commit(batch)
    for used in (batch, small):
        cache.append_tokens([sequence], [3])
        cache.prepare([sequence], 1, used)
        assert np.asarray(used.group(1).slot_mapping).tolist() == [-1] * used.cross.max_tokens
        query = normal(5, 4, 8, seed=3)
        found = cache.attend(1, query, used)
        np.testing.assert_allclose(found[:1], attention(query[:1], keys, values), rtol=0, atol=2e-6)
        assert not found[1:].any(), "padding gives 0"
        cache.commit(used)
    cache.check_invariants()


def test_reordered_beams_attend_to_the_output_of_their_parent():
    cache = make(num_blocks=[30, 30])
    one, two = (cache.add_sequence(range(3), cross_tokens=length) for length in (5, 11))
    stored = [encode(cache, each, 3, seed) for seed, each in ((1, one), (5, two))]
    for each in (one, two):
        cache.append_tokens(each, [1])
    expect_seen(cache, [one, two], stored)
    third = cache.fork(two)
    cache.reorder([one, two, third], [two, two, one])
    cache.check_invariants()
    cache.append_tokens([one, two, third], [4, 5, 6])
    expect_seen(cache, [one, two, third], [stored[1], stored[1], stored[0]])
    cache.reorder([third], [one])
    cache.check_invariants()
    assert np.count_nonzero(cache.block_map(1).holders) == 3, "the first output has no holder any more"


def test_truncate_keeps_the_encoder_output():
    cache = make()
    sequence = cache.add_sequence(range(6), cross_tokens=5)
    stored = encode(cache, sequence, 6, 1)
    cache.truncate(sequence, 0)
    cache.append_tokens([sequence], [[1, 2, 3]])
    expect_seen(cache, [sequence], [stored], count=3)


def test_groups_of_cross_attention_come_last_whatever_the_order_of_layers():
    other = CrossSpec(1, 16, dtype="float32")
    cache = make([CROSS, SPEC, other, Alias(0), CROSS], num_blocks=[17, 9, 9])
    assert [cache.group_of(layer) for layer in range(5)] == [1, 0, 2, 1, 1]
    assert cache.num_blocks == (17, 9, 9)
    assert cache.block_table(2).shape == (5, 8)
    sequence = cache.add_sequence(range(2), cross_tokens=5)
    assert cache.held_from(sequence, 2) == 0
    batch = cache.prepare([sequence], 2)
    assert batch.copied_blocks(2).shape == (0, 2)


def test_stats_and_maps_count_encoder_tokens():
    cache = make()
    sequence = cache.add_sequence(range(4), cross_tokens=6)
    encode(cache, sequence, 4, 1)
    stats = cache.stats()
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_free_blocks) == (24, 3, 21)
    assert stats.fragmentation == 2 / 12
    held = cache.block_map(1)
    assert held.num_tokens[held.holders > 0].tolist() == [4, 2]
    assert cache.num_available == 6
    assert "8" not in repr(cache).split("groups")[0]


def test_ranks_hold_their_heads_of_encoder_tokens():
    cache = make([AttentionSpec(4, 8, dtype="float32", num_query_heads=8), CrossSpec(4, 8, dtype="float32")],
                 parallel=TensorParallel(1, 2))  # fmt: skip
    assert cache.key(1).shape[2] == 2
    assert cache.spec(1).num_kv_heads == 2


def test_scrubbed_caches_zero_the_blocks_of_an_encoder_output():
    cache = make(scrub=True)
    first = cache.add_sequence(range(3), cross_tokens=32, namespace="a")
    encode(cache, first, 3, 1)
    cache.remove(first)
    assert cache.key(1).numpy().any()
    second = cache.add_sequence(range(3), cross_tokens=32, namespace="b")
    batch = cache.prepare([second], 3)
    assert not cache.key(1).numpy()[1:].any()
    cache.abandon(batch)


def test_bad_arguments_are_refused_by_name():
    cache, plain = make([SPEC, CrossSpec(2, 8, dtype="float32", max_tokens=20)]), PagedKVCache(SPEC, num_blocks=5)
    before = cache.stats()
    for options, error, text in (
        ({"cross_tokens": 21}, ShapeError, "cross_tokens is 21; .* serve 20"),
        ({"cross_tokens": -1}, ShapeError, "cross_tokens"),
        ({"cross_tokens": 0, "cross_digest": b"a"}, UnsupportedOption, "cross_digest is given with cross_tokens=0"),
        ({"cross_digest": b"a"}, UnsupportedOption, "without cross_tokens"),
        ({"cross_tokens": 5, "cross_digest": "a"}, UnsupportedDtype, "cross_digest is a str"),
        ({"cross_tokens": 5, "cross_digest": True}, UnsupportedDtype, "cross_digest is a bool"),
    ):
        with pytest.raises(error, match=text):
            cache.add_sequence([1], **options)
        assert cache.stats() == before
    with pytest.raises(UnsupportedOption, match=r"no cross-attention layers.* namespace=\(namespace, cross_digest\)"):
        plain.add_sequence([1], cross_digest=b"a")
    with pytest.raises(UnsupportedOption, match="no cross-attention layers"):
        plain.add_sequence([1], cross_tokens=5)
    with pytest.raises(UnsupportedOption, match="no cross-attention layers"):
        plain.set_cross_tokens(plain.add_sequence([1]), 5)
    with pytest.raises(UnsupportedOption, match="max_cross_tokens is 5"):
        plain.make_batch(1, 1, 5)
    cache.add_sequence([1], cross_tokens=5, cross_digest=b"a")
    with pytest.raises(ShapeError, match=r"cross_tokens is 6, but .* has 5 tokens"):
        cache.add_sequence([1], cross_tokens=6, cross_digest=b"a")
    with pytest.raises(UnsupportedOption, match="every layer that attends is a CrossSpec"):
        PagedKVCache(CROSS, num_blocks=5)
    for option in ({"window": 4}, {"chunk": 4}, {"lookahead": 2}, {"key_bounds": True}, {"label_channels": [[0]] * 2}):
        with pytest.raises(UnsupportedOption, match="cross attention sees all encoder tokens"):
            CrossSpec(2, 8, **option)
    cache.check_invariants()


def test_a_sequence_without_new_tokens_does_not_count_the_output_that_it_shares():
    cache = make()
    idle = cache.add_sequence(range(3), cross_tokens=5)
    twin, other = cache.fork(idle), cache.add_sequence(range(3), cross_tokens=4)
    batch = cache.prepare([idle, other, twin], [0, 3, 3])
    assert np.asarray(batch.cross.new_lens).tolist() == [0, 4, 5]
    keys, values = normal(9, 2, 8, seed=1), normal(9, 2, 8, seed=2)
    cache.write(1, keys, values, batch)
    cache.commit(batch)
    cache.append_tokens([other, twin], [1, 2])
    expect_seen(cache, [other, twin], [(keys[:4], values[:4]), (keys[4:], values[4:])])


def test_an_arrival_has_slots_for_its_encoder_tokens():
    cache = make()
    sequence = cache.add_sequence(range(6), cross_tokens=7)
    batch = cache.prepare_arrival(sequence, 5)
    keys, values = normal(7, 2, 8, seed=1), normal(7, 2, 8, seed=2)
    cache.write(1, keys, values, batch)
    with pytest.raises(InvalidSequence, match="has an arrival"):
        cache.attend(1, normal(5, 4, 8), batch)
    cache.commit(batch)
    expect_seen(cache, [sequence], [(keys, values)])


def test_memory_is_divided_by_what_a_sequence_needs():
    layers = [AttentionSpec(2, 8, dtype="float32"), CrossSpec(2, 8, dtype="float32", max_tokens=1500)]
    cache = PagedKVCache(layers, memory="4MiB", max_tokens_per_sequence=448)
    assert cache.num_blocks[1] - 1 >= 94
    # 28 blocks of a decoder's 448 tokens to 94 blocks of 1,500 encoder tokens
    with pytest.raises(NotEnoughMemory, match="with its encoder tokens take"):
        PagedKVCache(layers, memory="150KiB")
    assert abs((cache.num_blocks[1] - 1) / (cache.num_blocks[0] - 1) - 94 / 28) < 0.3
