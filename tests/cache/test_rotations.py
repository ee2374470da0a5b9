"""Layers with rotated keys and values store what other layers store of rotated rows, and attend alike.

`hadamard` itself has its tests in tests/ops; here a cache with rotations and a twin without them, which is given
rotated rows and queries, keep the same bytes through every operation.
"""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, PagedKVCache, Plane, SwapSpace, TensorParallel, hadamard, merge_attention
from pagecore.errors import UnsupportedOption
from tests.cache.caches import Planes, normal
from tests.cache.rotated import DIM, FORMATS, HEADS, SIDES, V_DIM, Pair, rotated, spec_of
from tests.ops.cases import DTYPES
from tests.reference.dense import dense_attention
from tests.reference.hadamard import with_outliers
from tests.together import together


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_operation_keeps_the_bytes_of_a_twin_that_is_given_rotated_rows(format, sides):
    pair = Pair(spec_of(**FORMATS[format]), sides)
    spaces = tuple(SwapSpace(cache, num_blocks=20) for cache in (pair.own, pair.twin))
    first = pair.both("add_sequence", range(60))
    for count in (33, 1, 2):
        pair.step(first, count=count)
    pair.check()
    second = pair.both("fork", first)
    pair.step(first, second)
    pair.step(second, count=3, return_lse=True)
    pair.both("truncate", second, 30)
    pair.step(first, second, count=2)
    pair.check()
    for i, cache in enumerate((pair.own, pair.twin)):
        cache.swap_out([first[i]], spaces[i])
    third = pair.both("add_sequence", range(200, 230))
    pair.step(third, count=9)
    for i, cache in enumerate((pair.own, pair.twin)):
        cache.swap_in([first[i]])
    pair.step(first, third, softcap=8.0)
    pair.both("compact", third, [0, 3, 4, 8, 9])
    pair.step(third)
    pair.both("remove", second)
    pair.both("remove", first)
    again = pair.both("add_sequence", range(60))
    assert again[0].num_cached_tokens == again[1].num_cached_tokens > 0
    pair.step(again, third)
    pair.check()


@together("sides", SIDES)
@pytest.mark.parametrize("limits", [{"window": 7}, {"chunk": 6}, {"window": 5, "sink_tokens": 3}], ids=str)
def test_windows_chunks_and_sinks(limits, sides):
    pair = Pair(spec_of(format="int8_token", sinks=[0.5, -1.0, 0.0, 2.0], softcap=20.0, **limits), sides)
    sequence = pair.both("add_sequence", range(40))
    for count in (13, 1, 1, 5):
        pair.step(sequence, count=count)
    pair.check()


@together("dtype", DTYPES)
@together("sides", SIDES)
def test_rows_and_results_have_the_dtype_of_the_caller(sides, dtype):
    pair = Pair(spec_of(format="int8_token"), sides)
    sequence = pair.both("add_sequence", range(20))
    pair.step(sequence, count=9, dtype=dtype, return_lse=True)
    pair.step(sequence, dtype=dtype)
    pair.check()


def test_a_step_that_has_been_planned_and_a_reused_batch():
    pair = Pair(spec_of(format="int4_token"), "both")
    batches = [cache.make_batch(2, 8) for cache in (pair.own, pair.twin)]
    sequences = pair.both("add_sequence", range(30))
    held: set[int] = set()
    for count in (8, 1, 3, 1):
        for i, cache in enumerate((pair.own, pair.twin)):
            cache.prepare([sequences[i]], count, out=batches[i])
        key, value, query = pair.new(8, HEADS, DIM), pair.new(8, HEADS, V_DIM), pair.new(8, 4, DIM)
        out = np.full((8, 4, V_DIM), np.nan, np.float32)
        for layer in range(2):
            pair.own.write(layer, key, value, batches[0])
            pair.twin.write(layer, hadamard(key), hadamard(value), batches[1])
            assert pair.own.attend(layer, query, batches[0], out=out) is out
            expected = hadamard(pair.twin.attend(layer, hadamard(query), batches[1]))
            np.testing.assert_array_equal(out, expected)  # padding, too
            assert not out[count:].any()
        pair.both("commit", tuple(batches))
        free = [array for arrays in batches[0]._scratch._free.values() for array in arrays]
        held |= {array.pointer for array in free}
        assert len(free) == 3  # keys, values and queries
    assert len(held) == 3  # later steps allocate none
    pair.check()


def test_the_result_may_be_the_query():
    pair = Pair(AttentionSpec(HEADS, DIM, dtype="float32", num_query_heads=4), "both", layers=1)
    sequence = pair.own.add_sequence(range(9))
    with pair.own.prepare([sequence], 9) as batch:
        pair.own.write(0, pair.new(9, HEADS, DIM), pair.new(9, HEADS, DIM), batch)
        query = pair.new(9, 4, DIM)
        expected = pair.own.attend(0, query.copy(), batch)
        assert pair.own.attend(0, query, batch, out=query) is query
        np.testing.assert_array_equal(query, expected)
        pair.own.commit(batch)


def test_trees_of_drafts():
    pair = Pair(spec_of(format="int8_token"), "both")
    sequences = pair.both("add_sequence", range(30))
    pair.step(sequences, count=6)
    parents = [[-1, 0, 0, 1, 2]]
    batches = [cache.prepare([sequences[i]], 5, parents=parents) for i, cache in enumerate((pair.own, pair.twin))]
    key, value, query = pair.new(5, HEADS, DIM), pair.new(5, HEADS, V_DIM), pair.new(5, 4, DIM)
    for layer in range(2):
        pair.own.write(layer, key, value, batches[0])
        pair.twin.write(layer, hadamard(key), hadamard(value), batches[1])
        found = pair.own.attend(layer, query, batches[0])
        np.testing.assert_array_equal(found, hadamard(pair.twin.attend(layer, hadamard(query), batches[1])))
    for i, cache in enumerate((pair.own, pair.twin)):
        cache.commit(batches[i], accepted_path=[[0, 2, 4]])
    pair.step(sequences)
    pair.check()


@pytest.mark.parametrize("sides", SIDES)
def test_encoder_outputs(sides):
    spec = CrossSpec(HEADS, DIM, V_DIM, dtype="float32", num_query_heads=4, max_tokens=12, format="int8_token")
    caches = [PagedKVCache([spec_of(), each], num_blocks=20, block_size=4) for each in (rotated(spec, sides), spec)]
    keys, values = SIDES[sides]
    key, value, query = (normal(9, HEADS, DIM), normal(9, HEADS, V_DIM, seed=1), normal(2, 4, DIM, seed=2))
    found = []
    for cache, rotates in zip(caches, (False, True), strict=True):
        sequence = cache.add_sequence(range(4), cross_tokens=9)
        with cache.prepare([sequence], 2) as batch:
            rows = [
                hadamard(x) if rotates and applies else x
                for x, applies in ((key, keys), (value, values), (query, keys))
            ]
            cache.write(1, *rows[:2], batch)
            found.append(cache.attend(1, rows[2], batch))
            cache.commit(batch)
    np.testing.assert_array_equal(found[0], hadamard(found[1]) if values else found[1])
    stored = [
        [cache.plane(plane.name, 1).numpy()[1:3].reshape(8, HEADS, -1) for plane in spec.planes] for cache in caches
    ]
    for mine, other in zip(*stored, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_rows_of_padding_are_ignored_in_a_step_without_encoder_tokens():
    spec = CrossSpec(HEADS, DIM, dtype="float32", num_query_heads=4, max_tokens=9)
    cache = PagedKVCache([spec_of(), rotated(spec, "both")], num_blocks=20, block_size=4)
    sequence, rows = cache.add_sequence(range(4), cross_tokens=9), normal(9, HEADS, DIM)
    with cache.prepare([sequence], 3) as batch:
        cache.write(1, rows, rows, batch)
        cache.commit(batch)
    before = cache.key(1).numpy().copy()
    with cache.prepare([sequence], 1, out=cache.make_batch(1, 4)) as batch:  # without room for encoder tokens
        cache.write(1, -rows, -rows, batch)
        cache.commit(batch)
    np.testing.assert_array_equal(cache.key(1).numpy(), before)


def test_partial_results_merge():
    pair = Pair(spec_of(), "both", layers=1)
    sequence = pair.own.add_sequence(range(12))
    key, value = pair.new(12, HEADS, DIM), pair.new(12, HEADS, V_DIM)
    query = pair.new(1, 4, DIM)
    for count in (11, 1):
        with pair.own.prepare([sequence], count) as batch:
            begin = sequence.num_computed_tokens
            pair.own.write(0, key[begin : begin + count], value[begin : begin + count], batch)
            if count == 1:
                lists = [np.arange(5), np.arange(5, 12)]
                parts = [
                    pair.own.attend(0, query, batch, return_lse=True, indices=np.tile(each, (1, HEADS, 1)))
                    for each in lists
                ]
            pair.own.commit(batch)
    (out_a, lse_a), (out_b, lse_b) = parts
    merged = merge_attention(out_a, lse_a, out_b, lse_b)[0]
    expected = dense_attention(query, key, value)
    assert np.linalg.norm(merged - expected) < 1e-5 * np.linalg.norm(expected)


def test_each_rank_rotates_its_heads():
    whole = rotated(spec_of(format="int4_token"), "both")
    key, value, query = normal(5, HEADS, DIM), normal(5, HEADS, V_DIM, seed=1), normal(5, 4, DIM, seed=2)

    def attended(parallel: TensorParallel | None, heads: slice, queries: slice) -> np.ndarray:
        cache = PagedKVCache(whole, num_blocks=9, parallel=parallel)
        with cache.prepare([cache.add_sequence(range(5))], 5) as batch:
            cache.write(0, key[:, heads], value[:, heads], batch)
            out: np.ndarray = cache.attend(0, query[:, queries], batch)
            cache.commit(batch)
        return out

    every = attended(None, slice(None), slice(None))
    for rank in range(2):
        part = attended(TensorParallel(rank, 2), slice(rank, rank + 1), slice(2 * rank, 2 * rank + 2))
        np.testing.assert_allclose(part, every[:, 2 * rank : 2 * rank + 2], rtol=1e-5, atol=1e-6)


def test_a_spec_of_the_user_may_have_rotations():
    class Rotated(Planes):
        key_rotation = "hadamard"

    planes = Plane("key", (HEADS, DIM), "float32"), Plane("value", (HEADS, V_DIM), "float32")
    cache = PagedKVCache(Rotated(*planes), num_blocks=4)
    key = normal(3, HEADS, DIM)
    with cache.prepare([cache.add_sequence(range(3))], 3) as batch:
        cache.write(0, key, normal(3, HEADS, V_DIM), batch)
        cache.commit(batch)
    np.testing.assert_array_equal(cache.key(0).numpy()[1, :3], hadamard(key))
    Rotated.key_rotation = "fourier"
    with pytest.raises(UnsupportedOption, match="key_rotation is 'fourier'"):
        PagedKVCache(Rotated(*planes), num_blocks=4)


def test_scratch_rows_have_the_size_of_the_batch():
    cache = PagedKVCache(rotated(spec_of(), "both"), num_blocks=9)
    batch, sequence = cache.make_batch(1, 12), cache.add_sequence(range(30))
    for count, extra in ((1, 0), (12, 0), (3, 0), (2, 11)):
        cache.prepare([sequence], count, out=batch)
        rows = count + extra
        cache.write(0, normal(count, HEADS, DIM), normal(count, HEADS, V_DIM), batch)
        assert not cache.attend(0, normal(rows, 4, DIM), batch)[count:].any()
        cache.commit(batch)
        shapes = sorted(array.shape for arrays in batch._scratch._free.values() for array in arrays)
        padded = [(24, 4, DIM)] if extra else []
        assert shapes == [(12, HEADS, DIM), (12, HEADS, V_DIM), (12, 4, DIM), *padded]


# ---- what it is for

# Bounds of the error of attention with rotated keys, over that without: keys with 5 outlier channels of 128.
GAINS = {"int8_token": 0.4, "int4_token": 0.5, "fp4_block16": 0.7, "nvfp4_4over6": 0.95}


def error_of(format: str, **rotations: str) -> float:
    """Return the error of attention relative to that over the numbers themselves, in the step after 512 tokens."""
    random = np.random.default_rng(0)
    key = with_outliers(random.standard_normal((544, 2, 128)).astype(np.float32))
    value = random.standard_normal((544, 2, 128)).astype(np.float32)
    query = random.standard_normal((544, 4, 128)).astype(np.float32)
    spec = AttentionSpec(2, 128, dtype="float32", num_query_heads=4, format=format, **rotations)
    cache = PagedKVCache(spec, num_blocks=40)
    sequence = cache.add_sequence(range(544))
    for begin, end in ((0, 512), (512, 544)):
        with cache.prepare([sequence], end - begin) as batch:
            cache.write(0, key[begin:end], value[begin:end], batch)
            found = cache.attend(0, query[begin:end], batch)
            cache.commit(batch)
    exact = dense_attention(query[512:], key, value)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("format", GAINS)
def test_attention_over_few_bits_has_a_smaller_error_with_rotated_keys(format):
    plain, with_rotation = error_of(format), error_of(format, key_rotation="hadamard")
    print(f"{format}: error of attention {plain:.3f}, {with_rotation:.3f} with rotated keys")
    assert with_rotation < GAINS[format] * plain
