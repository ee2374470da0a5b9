"""merge_attention_parts: any number of parts for each token, in rows of equal or of different numbers of parts."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from tests.ops.cases import DTYPES, Shape, assert_lse_close, assert_output_close, make_case, snapshot
from tests.reference import attention as reference
from tests.together import together

CU_PARTS = [0, 3, 3, 4, 9, 9, 12]


def parts(dtype="float32", shape=(6, 3, 4, 20), seed=0):
    rng = np.random.default_rng(seed)
    outs = rng.standard_normal(shape).astype(DTYPES[dtype])
    return outs, (3 * rng.standard_normal(shape[:-1])).astype(np.float32)


def check(outs, lses, cu_parts=None):
    given = outs.astype(np.float64), lses.astype(np.float64), cu_parts
    expected = reference.merge_parts(*given)
    magnitude = reference.merge_parts(np.abs(given[0]), *given[1:])[0]
    out, lse = np.full(expected[0].shape, 7, outs.dtype), np.full(expected[1].shape, 7, np.float32)
    ops.merge_attention_parts(outs, lses, cu_parts, out=out, lse=lse)
    assert_output_close(out, expected[0], magnitude)
    assert_lse_close(lse, expected[1], "float32")


@together("dtype", DTYPES)
@together("shape", [(6, 3, 4, 20), (1, 1, 1, 1), (3, 8, 2, 128), (0, 4, 2, 8), (5, 0, 3, 8), (2, 600, 3, 33)])
def test_parts_are_joined_by_their_weights(dtype, shape):
    check(*parts(dtype, shape))


@together("dtype", DTYPES)
@together("index", [np.int32, np.int64])
def test_tokens_may_have_different_numbers_of_parts(dtype, index):
    outs, lses = parts(dtype, (13, 4, 40))
    check(outs, lses, np.asarray(CU_PARTS, index))
    check(outs, lses, np.repeat(np.asarray(CU_PARTS, index), 2)[::2])


def test_a_list_of_parts_and_no_tokens_at_all():
    outs, lses = parts("float16", (12, 2, 8))
    check(outs, lses, CU_PARTS)
    for cu_parts in ([0], np.zeros(1, np.int64)):
        out, lse = ops.merge_attention_parts(outs, lses, cu_parts)
        assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


@together("dtype", DTYPES)
@together("shape", [(7, 4, 64), (5, 3, 33)])
def test_two_parts_have_the_bits_of_merge_attention(dtype, shape):
    tokens, heads, dim = shape
    outs, lses = parts(dtype, (tokens, 2, heads, dim))
    expected = ops.merge_attention(outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1])
    packed = outs.reshape(-1, heads, dim), lses.reshape(-1, heads), np.arange(tokens + 1) * 2
    for given in ((outs, lses), packed):
        for got, wanted in zip(ops.merge_attention_parts(*given), expected, strict=True):
            assert got.tobytes() == wanted.tobytes()


@together("dtype", DTYPES)
def test_two_parts_have_the_bits_of_merge_attention_for_zeros_of_either_sign(dtype):
    outs, lses = parts(dtype, (4, 2, 4, 20))
    outs[:] = np.where(np.arange(20) % 3 == 0, -0.0, outs * (np.arange(20) % 3)).astype(outs.dtype)
    lses[1, 0], lses[2, 1], lses[3] = -np.inf, np.inf, -np.inf
    both = ops.merge_attention(outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1])
    for got, wanted in zip(ops.merge_attention_parts(outs, lses), both, strict=True):
        assert got.tobytes() == wanted.tobytes()
    assert both[0][1].tobytes() == outs[1, 1].tobytes()
    assert both[0][2].tobytes() == outs[2, 0].tobytes()
    assert not np.signbit(both[0][3].astype(np.float32)).any()


def test_attention_over_four_parts_is_attention_over_the_union():
    case = make_case(Shape(seq_lens=(100, 100), query_lens=(3, 1)), causal=False)
    expected = case.expect()
    key, value = (cache[case.block_table[:, :7]].reshape(2, -1, 2, 64) for cache in (case.key_cache, case.value_cache))
    results = []
    for part in (slice(0, 1), slice(1, 40), slice(40, 99), slice(99, 100)):
        k, v = (np.ascontiguousarray(array[:, part]) for array in (key, value))
        where = np.asarray([[0], [1]], np.int32), [k.shape[1]] * 2
        options = {"cu_query_lens": [0, 3, 4], "causal": False, "return_lse": True}
        results.append(ops.paged_attention(case.query, k, v, *where, **options))
    outs, lses = (np.stack(arrays, axis=1) for arrays in zip(*results, strict=True))
    out, lse = ops.merge_attention_parts(outs, lses)
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], "float32")


@together("without_keys", [-np.inf, np.inf])
@together("dtype", DTYPES)
def test_parts_without_keys_are_ignored_with_any_output(dtype, without_keys):
    outs, lses = parts(dtype)
    lses[:, 1], outs[:, 1] = without_keys, np.nan
    got = ops.merge_attention_parts(outs, lses)
    expected = ops.merge_attention(outs[:, 0], lses[:, 0], outs[:, 2], lses[:, 2])
    for array, wanted in zip(got, expected, strict=True):
        assert array.tobytes() == wanted.tobytes()
    lses[2], outs[2] = [[without_keys], [-np.inf], [np.inf]], np.nan
    out, lse = ops.merge_attention_parts(outs, lses)
    assert (out[2] == 0).all()
    assert np.isneginf(lse[2]).all()
    assert np.isfinite(out.astype(np.float32)).all()


def test_nan_and_a_weight_of_zero():
    outs, lses = parts()
    lses[2, 1] = np.nan
    lses[3, 0], outs[3, 0] = lses[3, 1:].min(axis=0) - 1000, np.nan
    out, lse = ops.merge_attention_parts(outs, lses)
    assert np.isnan(out[2]).all()
    assert np.isnan(lse[2]).all()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_huge_and_tiny_weights_neither_overflow_nor_vanish():
    outs, lses = parts()
    for offset in (1e4, -1e4, [[[80.0], [0.0], [-200.0]]]):
        check(outs, lses + np.asarray(offset, np.float32))
    outs[:] = 3e38
    assert np.isfinite(ops.merge_attention_parts(outs, np.zeros_like(lses))[0]).all()


@together("dtype", DTYPES)
def test_parts_and_results_may_be_strided(dtype):
    outs, lses = parts(dtype)
    expected = ops.merge_attention_parts(outs, lses)
    head_major = np.ascontiguousarray(outs.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
    memory = np.full((4, 6, 25), np.nan, outs.dtype)
    out, lse = memory.transpose(1, 0, 2)[:, :, 3:23], np.zeros((4, 6), np.float32).T
    got = ops.merge_attention_parts(head_major[::-1], np.ascontiguousarray(lses.T).T[::-1], out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    np.testing.assert_array_equal(out[::-1].astype(np.float32), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse[::-1], expected[1])
    assert np.isnan(memory[:, :, :3].astype(np.float32)).all()
    assert np.isnan(memory[:, :, 23:].astype(np.float32)).all()


def test_a_mask_leaves_rows_of_the_first_part_as_they_are():
    (outs, lses), mask = parts("float16", (6, 2, 4, 20)), np.asarray([True, False, True, True, False, False])
    given = outs[:, 0].copy(), lses[:, 0].copy(), outs[:, 1].copy(), lses[:, 1]
    given[2][~mask] = np.nan
    joined = ops.merge_attention(*given)
    for mask_like in (mask, mask.tolist(), np.repeat(mask, 3)[::3]):
        out, lse = ops.merge_attention(*given, mask=mask_like)
        for got, both, first in zip((out, lse), joined, given[:2], strict=True):
            assert np.array_equal(got[mask], both[mask])
            assert np.array_equal(got[~mask], first[~mask])
    in_place = ops.merge_attention(*given, mask=mask, out=given[0], lse=given[1])
    assert in_place[0] is given[0]
    np.testing.assert_array_equal(in_place[0], out)
    np.testing.assert_array_equal(in_place[1], lse)


@together("dtype", DTYPES)
@together("shape", [(9, 4, 20), (9, 1, 64), (9, 2, 1)])
def test_tokens_that_a_mask_leaves_out_are_copied_bit_by_bit(dtype, shape):
    (outs, lses), mask = parts(dtype, (shape[0], 2, *shape[1:])), np.arange(9) % 4 == 0
    outs[:, 0, :, ::3], outs[2, 0], outs[3, 0], outs[:, 1] = -0.0, np.nan, -np.inf, np.nan
    lses[:4, 0, 0] = np.inf, -np.inf, -0.0, np.nan
    lses[5:7, 0], lses[1:, 1] = [[np.inf], [-np.inf]], np.inf
    lses[7, 0].view(np.uint32)[:] = 0xFF80_1234  # a signalling NaN with bits of its own
    given = [np.ascontiguousarray(array[:, i]) for i in range(2) for array in (outs, lses)]
    first = [array.copy() for array in given[:2]]
    spaced = np.full((shape[1], 9, shape[2] + 3), 7, outs.dtype).transpose(1, 0, 2)[..., 1:-2]
    for results in ({}, {"out": spaced}, {"out": given[2], "lse": given[3]}, {"out": given[0], "lse": given[1]}):
        got = ops.merge_attention(*given, mask=mask, **results)
        for array, wanted in zip(got, first, strict=True):
            assert array[~mask].tobytes() == wanted[~mask].tobytes()


SHAPE, DTYPE, OPTION = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"outs": np.ones((2, 3, 4, 8))}, DTYPE, "outs"),
        ({"outs": np.ones((6, 4, 8), np.float32)}, SHAPE, r"outs .*\[num_tokens, num_parts, num_heads, head_dim\]"),
        ({"lses": np.ones((2, 3, 4), np.float16)}, DTYPE, "lses is float16; it must be float32"),
        ({"lses": np.ones((2, 3, 5), np.float32)}, SHAPE, "lses .*as outs has"),
        ({"lses": np.ones((2, 4), np.float32)}, SHAPE, r"lses .*\[num_tokens, num_parts, num_heads\]"),
        ({"cu_parts": [0, 3, 6]}, SHAPE, r"outs .*\[num_parts, num_heads, head_dim\] with cu_parts"),
        ({"out": np.ones((2, 4, 9), np.float32)}, SHAPE, "out"),
        ({"out": np.ones((2, 4, 8), np.float16)}, DTYPE, "out is float16"),
        ({"lse": np.ones((3, 4), np.float32)}, SHAPE, "lse"),
        ({"stream": 1}, OPTION, "stream"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, error, message):
    outs, lses = parts(shape=(2, 3, 4, 8))
    arguments = {"outs": outs, "lses": lses, "out": outs[:, 0] * 7, "lse": lses[:, 0] * 7} | change
    unchanged = snapshot(arguments["out"], arguments["lse"])
    with pytest.raises(error, match=message):
        ops.merge_attention_parts(**arguments)
    assert unchanged()


@pytest.mark.parametrize(
    ("cu_parts", "error", "message"),
    [
        ([], SHAPE, "cu_parts is empty; it must have one entry more than there are tokens"),
        ([1, 3], SHAPE, r"cu_parts\[0\] is 1; it must be 0"),
        ([0, 4, 3], SHAPE, r"cu_parts\[2\] is 3 after 4; it must not decrease"),
        ([0, 4, 7], SHAPE, r"cu_parts\[2\] is 7 and outs has 6 parts"),
        ([[0, 6]], SHAPE, r"cu_parts .*\[num_tokens \+ 1\]"),
        ([0.0, 6.0], DTYPE, "cu_parts holds float64"),
    ],
)
def test_wrong_numbers_of_parts_are_refused(cu_parts, error, message):
    outs, lses = parts(shape=(6, 4, 8))
    with pytest.raises(error, match=message):
        ops.merge_attention_parts(outs, lses, cu_parts)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones(2, np.int32), DTYPE, "mask is int32; it must be bool, True where both parts count: pass mask != 0"),
        (np.ones(3, np.bool_), SHAPE, "mask .*as the outputs have"),
        (np.ones((2, 1), np.bool_), SHAPE, r"mask .*\[num_tokens\]"),
        ([True, "x"], DTYPE, "mask"),
    ],
)
def test_a_wrong_mask_is_refused(mask, error, message):
    outs, lses = parts(shape=(2, 2, 4, 8))
    out = outs[:, 0] * 7
    unchanged = snapshot(out)
    with pytest.raises(error, match=message):
        ops.merge_attention(outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1], mask=mask, out=out)
    assert unchanged()


def test_results_in_memory_that_is_read_are_refused():
    outs, lses = parts(shape=(2, 3, 4, 8))
    memory = np.zeros((2, 4, 9), np.float32)
    for changed, message in (
        ({"out": outs[:, 1]}, "out shares memory with outs"),
        ({"lse": lses[:, 1]}, "lse shares memory with lses"),
        ({"lse": outs[:, 1, :, 0]}, "lse shares memory with outs"),
        ({"out": memory[..., :8], "lse": memory[..., 7]}, "lse shares memory with out;"),
    ):
        with pytest.raises(OPTION, match=message):
            ops.merge_attention_parts(outs, lses, **changed)
    cu_parts = np.zeros(3 * 32, np.int32)
    with pytest.raises(OPTION, match="out shares memory with cu_parts"):
        ops.merge_attention_parts(outs[0], lses[0], cu_parts[:3], out=cu_parts.view(np.float32)[:64].reshape(2, 4, 8))
    mask = np.ones(64, np.bool_)
    with pytest.raises(OPTION, match="lse shares memory with mask"):
        ops.merge_attention(
            outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1], mask=mask[:2], lse=mask.view(np.float32)[:8].reshape(2, 4)
        )


def test_a_token_of_many_parts_has_the_bits_of_one_thread():
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((6000, 8, 128)).astype(np.float32)
    lses = rng.standard_normal((6000, 8)).astype(np.float32)
    cu_parts = np.asarray([0, 1, 4000, 4000, 4010, 6000])
    results = []
    for threads in (1, 3, 7):
        pagecore.set_num_threads(threads)
        try:
            results.append([array.tobytes() for array in ops.merge_attention_parts(outs, lses, cu_parts)])
        finally:
            pagecore.set_num_threads(None)
    assert results[0] == results[1] == results[2]
