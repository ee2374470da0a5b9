"""merge_attention: attention over two parts of the keys merges to attention over all of them."""

from __future__ import annotations

import numpy as np

from pagecore import ops
from tests.ops.cases import DTYPES, Shape, assert_lse_close, assert_output_close, make_case
from tests.reference import attention as reference
from tests.together import together

SINKS = np.asarray([1.5, -2.0, 4.0, 0.0], np.float32)


def parts(dtype="float32", shape=(6, 4, 20), seed=0):
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2)]
    lses = [(3 * rng.standard_normal(shape[:2])).astype(np.float32) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


@together("dtype", DTYPES)
@together("shape", [(6, 4, 20), (1, 1, 1), (3, 8, 128), (0, 4, 8), (5, 3, 33)])
def test_parts_are_joined_by_their_weights(dtype, shape):
    given = parts(dtype, shape)
    expected = reference.merge(*(x.astype(np.float64) for x in given))
    out, lse = ops.merge_attention(*given)
    assert out.dtype == DTYPES[dtype]
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], "float32")


@together("split", [1, 16, 30, 99])
@together("sinks", [None, SINKS])
def test_attention_over_two_parts_is_attention_over_the_union(split, sinks):
    case = make_case(Shape(seq_lens=(100, 100), query_lens=(3, 1)), causal=False)
    case.options["sinks"] = sinks
    expected = case.expect()
    key, value = (cache[case.block_table[:, :7]].reshape(2, -1, 2, 64) for cache in (case.key_cache, case.value_cache))
    results = []
    for part, own_sinks in ((slice(0, split), sinks), (slice(split, 100), None)):
        k, v = np.ascontiguousarray(key[:, part]), np.ascontiguousarray(value[:, part])
        table = np.asarray([[0], [1]], np.int32)
        results += ops.paged_attention(
            case.query,
            k,
            v,
            table,
            [k.shape[1]] * 2,
            cu_query_lens=[0, 3, 4],
            causal=False,
            sinks=own_sinks,
            return_lse=True,
        )
    out, lse = ops.merge_attention(*results)
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], "float32")


@together("without_keys", [-np.inf, np.inf])
@together("dtype", DTYPES)
def test_a_part_without_keys_is_ignored_with_any_output(dtype, without_keys):
    out_a, lse_a, out_b, lse_b = parts(dtype)
    lse_b[:] = without_keys
    out_b[:] = np.nan
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = ops.merge_attention(*given)
        np.testing.assert_array_equal(out.astype(np.float32), out_a.astype(np.float32))
        np.testing.assert_array_equal(lse, lse_a)


@together("without_keys", [(-np.inf, -np.inf), (np.inf, -np.inf), (np.inf, np.inf)])
def test_two_parts_without_keys_give_zero_and_minus_infinity(without_keys):
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[2], lse_b[2] = without_keys
    out_a[2], out_b[2] = np.nan, np.nan
    out, lse = ops.merge_attention(out_a, lse_a, out_b, lse_b)
    assert (out[2] == 0).all()
    assert np.isneginf(lse[2]).all()
    assert np.isfinite(out).all()


@together("without_keys", [-np.inf, np.inf])
def test_nan_remains_nan_next_to_a_part_without_keys(without_keys):
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[2], lse_b[2] = np.nan, without_keys
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = ops.merge_attention(*given)
        assert np.isnan(out[2]).all()
        assert np.isnan(lse[2]).all()
        assert np.isfinite(out[:2]).all()


def test_huge_and_tiny_weights_neither_overflow_nor_vanish():
    out_a, lse_a, out_b, lse_b = parts()
    lse_a += 1e4
    lse_b += 1e4
    expected = reference.merge(*(x.astype(np.float64) for x in (out_a, lse_a, out_b, lse_b)))
    out, lse = ops.merge_attention(out_a, lse_a, out_b, lse_b)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


@together("dtype", DTYPES)
def test_parts_and_results_may_be_strided(dtype):
    given = parts(dtype)
    expected = ops.merge_attention(*given)
    head_major = [
        np.ascontiguousarray(given[0].transpose(1, 0, 2)).transpose(1, 0, 2),
        np.ascontiguousarray(given[1].T).T,
        np.repeat(given[2], 2, axis=0)[::2],
        np.repeat(given[3], 2, axis=1)[:, ::2],
    ]
    memory = np.full((4, 6, 25), np.nan, given[0].dtype)
    out = memory.transpose(1, 0, 2)[:, :, 3:23]
    result, lse = ops.merge_attention(*head_major, out=out)
    assert result is out
    np.testing.assert_array_equal(out.astype(np.float32), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse, expected[1])
    assert np.isnan(memory[:, :, :3].astype(np.float32)).all()
    assert np.isnan(memory[:, :, 23:].astype(np.float32)).all()


@together("which", [0, 2])
def test_the_result_may_take_the_place_of_either_part(which):
    given = list(parts())
    expected = ops.merge_attention(*given)
    result = ops.merge_attention(*given, out=given[which], lse=given[which + 1])
    assert result[0] is given[which]
    assert result[1] is given[which + 1]
    np.testing.assert_array_equal(given[which], expected[0])
    np.testing.assert_array_equal(given[which + 1], expected[1])


def test_rows_whose_second_part_has_no_weight_keep_the_bits_of_the_first():
    out_a, lse_a, out_b, lse_b = parts("float16")
    mask = np.asarray([True, False, True, True, False, False])
    joined = ops.merge_attention(out_a, lse_a, out_b, lse_b)
    out, lse = ops.merge_attention(out_a, lse_a, out_b, np.where(mask[:, None], lse_b, np.float32(-np.inf)))
    for got, both, first in zip((out, lse), joined, (out_a, lse_a), strict=True):
        assert np.array_equal(got[mask], both[mask])
        assert np.array_equal(got[~mask], first[~mask])
