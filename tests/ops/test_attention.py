"""paged_attention against the float64 oracle: dtypes, layouts, shapes and batches."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from pagecore import ops
from tests.ops.cases import DTYPES, LAYOUTS, Shape, assert_output_close, make_case, snapshot
from tests.reference import attention as reference
from tests.together import together

MIXED = {"seq_lens": (70, 33, 1, 16, 40), "query_lens": (7, 1, 1, 16, 0)}


@together("cache_dtype", DTYPES)
@together("query_dtype", DTYPES)
@together("prefill", [False, True])
def test_every_pair_of_query_and_cache_dtypes_keeps_the_bounds(query_dtype, cache_dtype, prefill):
    lens = MIXED if prefill else {"seq_lens": (70, 33, 1, 130)}
    make_case(Shape(query_dtype=query_dtype, cache_dtype=cache_dtype, **lens)).check()


@together("query_dtype", ["float32", "bfloat16"])
@together("key_dtype", DTYPES)
@together("value_dtype", DTYPES)
@together("prefill", [False, True])
def test_key_and_value_caches_may_differ_in_dtype(query_dtype, key_dtype, value_dtype, prefill):
    lens = MIXED if prefill else {"seq_lens": (70, 33, 1)}
    case = make_case(Shape(query_dtype=query_dtype, cache_dtype=key_dtype, **lens))
    case.value_cache = case.value_cache.astype(DTYPES[value_dtype])
    case.check()


@together("layout", LAYOUTS)
@together("cache_dtype", DTYPES)
@together("block_size", [16, 5])
def test_every_layout_gives_the_same_attention(layout, cache_dtype, block_size):
    make_case(Shape(layout=layout, cache_dtype=cache_dtype, block_size=block_size, **MIXED)).check()


def test_key_and_value_caches_may_have_different_strides():
    case = make_case(Shape(**MIXED))
    case.value_cache = np.asfortranarray(case.value_cache.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)
    assert case.value_cache.strides != case.key_cache.strides
    case.check()


@together("block_size", [1, 2, 3, 5, 8, 16, 64, 100])
@together("window", [None, 20])
def test_every_block_size_around_its_edges(block_size, window):
    edges = sorted({1, block_size - 1, block_size, block_size + 1, 2 * block_size, 11, 99, 0})
    query_lens = [min(n, 1 + i % 3) for i, n in enumerate(edges)]
    make_case(Shape(seq_lens=edges, query_lens=query_lens, block_size=block_size), window=window).check()
    make_case(Shape(seq_lens=edges, block_size=block_size), window=window).check()


@together("seq_len", range(65, 71))
@together("query_len", [2, 3, 4])
@together("dtype", ["float32", "bfloat16"])
def test_a_window_may_leave_a_tile_of_keys_between_one_query_and_the_next(seq_len, query_len, dtype):
    """Some of the rows that are computed together then have no keys in a tile."""
    shape = Shape((seq_len,), (query_len,), heads=(2, 2), query_dtype=dtype, cache_dtype=dtype)
    make_case(shape, window=3).check()


@together("head_dim", [1, 2, 7, 16, 31, 32, 33, 64, 80, 96, 100, 128, 192, 256])
@together("dtype", ["float32", "bfloat16"])
def test_every_head_dim(head_dim, dtype):
    lens = {"seq_lens": (70, 9, 1), "query_lens": (5, 1, 1)}
    make_case(Shape(dims=(head_dim, head_dim), query_dtype=dtype, cache_dtype=dtype, **lens)).check()


@together("dims", [(64, 32), (32, 64), (192, 128), (96, 1), (1, 80), (72, 40), (40, 256), (256, 36)])
@together("dtype", DTYPES)
def test_the_value_head_dim_may_differ_from_the_key_head_dim(dims, dtype):
    lens = {"seq_lens": (70, 9, 1), "query_lens": (5, 1, 1)}
    make_case(Shape(dims=dims, query_dtype=dtype, cache_dtype=dtype, **lens)).check()


@together("num_kv_heads", [1, 2, 3])
@together("group", [1, 2, 3, 4, 5, 6, 7, 8, 16, 20])
def test_every_group_of_query_heads(group, num_kv_heads):
    shape = {"heads": (group * num_kv_heads, num_kv_heads), "dims": (32, 32)}
    make_case(Shape(seq_lens=(70, 33, 1), **shape)).check()
    make_case(Shape(seq_lens=(70, 33, 1), query_lens=(5, 1, 1), **shape)).check()


@together("seq_len", [0, 1, 11, 12, 15, 16, 17, 63, 64, 65, 99, 511, 512, 513, 1763])
@together("query_dtype", ["float32", "bfloat16"])
def test_decode_of_every_length(seq_len, query_dtype):
    make_case(Shape(seq_lens=(seq_len,), query_dtype=query_dtype, cache_dtype=query_dtype)).check()


def test_decode_of_a_long_sequence_next_to_short_ones():
    make_case(Shape(seq_lens=(9999, 1, 0, 40), heads=(8, 2), layout="HND")).check()


@together("seq_len", [1, 11, 16, 17, 64, 65, 99])
def test_prefill_of_every_length(seq_len):
    make_case(Shape(seq_lens=(seq_len,), query_lens=(seq_len,))).check()


def test_prefill_of_a_chunk_of_a_long_sequence():
    make_case(Shape(seq_lens=(1763, 300), query_lens=(130, 300), dims=(32, 32))).check()


@together("causal", [True, False])
def test_a_query_longer_than_its_sequence_attends_to_the_existing_keys(causal):
    make_case(Shape(seq_lens=(3, 0, 17), query_lens=(8, 4, 40)), causal=causal).check()


@together("index_dtype", ["int32", "int64"])
@together("prefill", [False, True])
def test_rows_pick_a_permuted_part_of_a_bigger_table(index_dtype, prefill):
    lens = MIXED if prefill else {"seq_lens": (70, 33, 1)}
    make_case(Shape(index_dtype=index_dtype, shuffle_rows=True, **lens)).check()


def test_a_row_may_be_in_a_batch_twice():
    case = make_case(Shape(seq_lens=(40, 40)))
    case.options["rows"] = [1, 1]
    case.query[1] = case.query[0]
    out = case.run()
    np.testing.assert_array_equal(out[0], out[1])


@together("padding", [1, 9])
def test_rows_past_the_last_query_are_zero_and_minus_infinity(padding):
    case = make_case(Shape(padding=padding, **MIXED))
    case.check()
    out, lse = case.run(return_lse=True)
    assert (out[-padding:] == 0).all()
    assert np.isneginf(lse[-padding:]).all()


def test_a_batch_of_padding_only():
    case = make_case(Shape(seq_lens=(), query_lens=(), padding=3), sinks=np.ones(4, np.float32))
    out, lse = case.run(return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@together("query_lens", [None, ()])
def test_an_empty_batch_gives_empty_results(query_lens):
    case = make_case(Shape(seq_lens=(), query_lens=query_lens))
    out, lse = case.run(return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_a_cache_without_blocks_serves_sequences_without_keys():
    query, cache = np.ones((2, 4, 8), np.float32), np.zeros((0, 16, 2, 8), np.float32)
    out, lse = ops.paged_attention(query, cache, cache, np.zeros((2, 0), np.int32), [0, 0], return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@together("dtype", DTYPES)
def test_a_strided_query_is_read_in_place(dtype):
    case = make_case(Shape(query_dtype=dtype, **MIXED))
    expected = case.expect()[0]
    tokens, heads, dim = case.query.shape
    fused = np.full((heads, 2 * tokens, dim + 5), np.nan, case.query.dtype)
    fused.transpose(1, 0, 2)[::2, :, 5:] = case.query
    case.query = fused.transpose(1, 0, 2)[::2, :, 5:]
    assert_output_close(case.run(), expected)


@together("dtype", DTYPES)
def test_a_strided_out_is_written_in_place_and_nothing_else_is(dtype):
    case = make_case(Shape(query_dtype=dtype, dims=(64, 36), **MIXED))
    tokens = case.query.shape[0]
    memory = np.full((4, tokens + 2, 50), 7, case.query.dtype)
    out = memory.transpose(1, 0, 2)[1:-1, :, 3:39]
    assert case.run(out=out) is out
    assert_output_close(out, case.expect()[0])
    out[:] = 7
    assert (memory == 7).all()


def test_inputs_are_not_changed():
    case = make_case(Shape(**MIXED), sinks=np.ones(4, np.float32))
    unchanged = snapshot(*case.arrays)
    case.run(return_lse=True)
    assert unchanged()


def test_read_only_inputs_are_served():
    case = make_case(Shape(**MIXED), sinks=np.ones(4, np.float32), alibi_slopes=np.ones(4, np.float32))
    for array in (*case.arrays, *(value for value in case.options.values() if isinstance(value, np.ndarray))):
        array.flags.writeable = False
    case.check()


@together("kind", [list, tuple, np.int16, np.uint8, np.uint64, ">i4", "strided"])
def test_lengths_and_tables_may_be_lists_or_any_integers(kind):
    case = make_case(Shape(shuffle_rows=True, **MIXED), causal=False)
    expected = case.expect()[0]
    table = np.where((case.block_table < 0) | (case.block_table > 100), 0, case.block_table)

    def convert(array: Any) -> Any:
        if kind is list or kind is tuple:
            return kind(array.tolist())
        if kind == "strided":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return array.astype(kind)

    out = ops.paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        convert(table),
        convert(case.seq_lens),
        rows=convert(case.options["rows"]),
        cu_query_lens=convert(case.options["cu_query_lens"]),
        causal=False,
    )
    assert_output_close(out, expected)


def test_a_part_of_a_wider_table_is_read_by_its_strides():
    case = make_case(Shape(**MIXED))
    wide = np.full((2 * case.block_table.shape[0], case.block_table.shape[1] + 4), -1, np.int32)
    wide[::2, 1:-3] = case.block_table
    case.block_table = wide[::2, 1:-3]
    case.check()


def test_offsets_past_four_gigabytes_are_written_and_read_right():
    """Block ids near the end of a sparse 12 GiB cache; only touched pages take memory."""
    block_size, heads, dim = 16, 2, 64
    num_blocks = (12 << 30) // (2 * block_size * heads * dim * 4)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 12 << 30, flags=flags), np.float32)
    key_cache, value_cache = memory.reshape(num_blocks, 2, block_size, heads, dim).transpose(1, 0, 2, 3, 4)
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 40, heads, dim)).astype(np.float32)
    table = np.asarray([[num_blocks - 1, num_blocks // 2 + 3, num_blocks - 7]])
    slots = (table[0][:, None] * block_size + np.arange(block_size)).reshape(-1)[:40]

    ops.write_kv(key, value, key_cache, value_cache, slots)
    np.testing.assert_array_equal(key_cache[slots // block_size, slots % block_size], key)
    np.testing.assert_array_equal(value_cache[slots // block_size, slots % block_size], value)

    query = rng.standard_normal((1, 4, dim)).astype(np.float32)
    out = ops.paged_attention(query, key_cache, value_cache, table, [40])
    keys, values = key_cache[table[0]], value_cache[table[0]]  # the oracle would look at whole caches
    assert_output_close(out, reference.paged_attention(query, keys, values, np.arange(3)[None], [40])[0])

    ops.copy_blocks([key_cache, value_cache], [(num_blocks - 1, 5), (num_blocks - 7, num_blocks - 2)])
    np.testing.assert_array_equal(key_cache[5], key_cache[num_blocks - 1])
    np.testing.assert_array_equal(value_cache[num_blocks - 2], value_cache[num_blocks - 7])
