"""merge_attention_parts, and merge_attention with a mask, on a CUDA device, against a float64 merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from tests.cuda.kit import Kit
from tests.cuda.memory import calls_of, spaced
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close
from tests.reference import attention as reference

CU_PARTS = [0, 3, 3, 4, 10, 10, 12]


def parts(dtype: str = "float32", shape: tuple[int, ...] = (6, 3, 4, 20), seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape).astype(DTYPES[dtype]), (3 * rng.standard_normal(shape[:-1])).astype(np.float32)


def merged(cuda: Kit, outs: Any, lses: Any, *cu_parts: Any, **results: Any) -> tuple[Any, Any]:
    out, lse = pagecore.merge_attention_parts(cuda.put(outs), cuda.put(lses), *cu_parts, **results)
    return cuda.get(out), cuda.get(lse)


def check(cuda: Kit, outs: Any, lses: Any, cu_parts: Any = None) -> None:
    wide, weights = outs.astype(np.float64), lses.astype(np.float64)
    expected = reference.merge_parts(wide, weights, cu_parts)
    magnitude = reference.merge_parts(np.abs(wide), weights, cu_parts)[0]
    results = {"out": cuda.empty(expected[0].shape, outs.dtype), "lse": cuda.empty(expected[1].shape)}
    given = () if cu_parts is None else (cuda.put(np.asarray(cu_parts)),)
    out, lse = merged(cuda, outs, lses, *given, **results)
    assert_output_close(out, expected[0], magnitude)
    assert_lse_close(lse, expected[1], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 64, 192, 520])
def test_parts_are_merged_by_their_weights(cuda, head_dim, dtype):
    check(cuda, *parts(dtype, (3, 5, 2, head_dim)))


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (0, 3, 4, 8), (4, 0, 3, 8), (3, 2, 0, 8), (2, 70, 3, 16)])
def test_any_number_of_rows_and_parts(cuda, shape):
    check(cuda, *parts("bfloat16", shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_tokens_may_have_different_numbers_of_parts(cuda, dtype, index):
    outs, lses = parts(dtype, (13, 4, 40))
    check(cuda, outs, lses, np.asarray(CU_PARTS, index))
    check(cuda, outs, lses, np.repeat(np.asarray(CU_PARTS, index), 2)[::2])
    on_host = merged(cuda, outs, lses, CU_PARTS)
    for got, expected in zip(on_host, merged(cuda, outs, lses, cuda.put(np.asarray(CU_PARTS, index))), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_parts_have_the_bits_of_merge_attention(cuda, dtype):
    outs, lses = parts(dtype, (7, 2, 4, 48))
    halves = [cuda.put(np.ascontiguousarray(array[:, i])) for i in range(2) for array in (outs, lses)]
    for got, expected in zip(merged(cuda, outs, lses), pagecore.merge_attention(*halves), strict=True):
        assert got.tobytes() == cuda.get(expected).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_parts_have_the_bits_of_merge_attention_for_zeros_of_either_sign(cuda, dtype):
    outs, lses = parts(dtype, (4, 2, 4, 20))
    outs[:] = np.where(np.arange(20) % 3 == 0, -0.0, outs * (np.arange(20) % 3)).astype(outs.dtype)
    lses[1, 0], lses[2, 1], lses[3] = -np.inf, np.inf, -np.inf
    halves = [cuda.put(np.ascontiguousarray(array[:, i])) for i in range(2) for array in (outs, lses)]
    both = [cuda.get(array) for array in pagecore.merge_attention(*halves)]
    for got, wanted in zip(merged(cuda, outs, lses), both, strict=True):
        assert got.tobytes() == wanted.tobytes()
    assert both[0][1].tobytes() == outs[1, 1].tobytes()
    assert both[0][2].tobytes() == outs[2, 0].tobytes()
    assert not np.signbit(both[0][3].astype(np.float32)).any()


@pytest.mark.parametrize("without_keys", [-np.inf, np.inf])
def test_parts_without_keys_are_ignored_and_nan_remains(cuda, without_keys):
    outs, lses = parts("float16")
    lses[:, 1], outs[:, 1] = without_keys, np.nan
    expected = merged(cuda, outs[:, ::2], lses[:, ::2])
    for got, wanted in zip(merged(cuda, outs, lses), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    lses[2], outs[2], lses[3, 0] = [[without_keys], [-np.inf], [np.inf]], np.nan, np.nan
    out, lse = merged(cuda, outs, lses)
    assert (out[2] == 0).all()
    assert np.isneginf(lse[2]).all()
    assert np.isnan(out[3].astype(np.float32)).all()
    assert np.isnan(lse[3]).all()


def test_huge_and_tiny_weights_neither_overflow_nor_vanish(cuda):
    outs, lses = parts()
    for offset in (1e4, -1e4, [[[80.0], [0.0], [-200.0]]]):
        check(cuda, outs, lses + np.asarray(offset, np.float32))
    outs[:] = 3e38
    assert np.isfinite(merged(cuda, outs, np.zeros_like(lses))[0]).all()


@pytest.mark.parametrize("shift", [0, 3, 8])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_and_results_may_be_strided(cuda, axis, shift):
    outs, lses = parts("float16", (6, 3, 4, 32))
    expected = merged(cuda, outs, lses)
    out = cuda.put(np.full((4, 6, 48), np.nan, outs.dtype).transpose(1, 0, 2))
    inner, lse = out[:, :, shift : shift + 32], cuda.put(np.zeros((4, 6), np.float32).T)
    merged(cuda, spaced(outs, axis), np.ascontiguousarray(lses.T).T, out=inner, lse=lse)
    got = cuda.get(out).astype(np.float32)
    np.testing.assert_array_equal(got[..., shift : shift + 32], expected[0].astype(np.float32))
    np.testing.assert_array_equal(cuda.get(lse), expected[1])
    assert np.isnan(got[..., :shift]).all()
    assert np.isnan(got[..., shift + 32 :]).all()


def test_wrong_numbers_of_parts_are_refused_or_clamped(cuda):
    outs, lses = parts(shape=(6, 4, 8))
    with pytest.raises(errors.ShapeError, match=r"cu_parts\[1\] is 7 and outs has 6 parts"):
        merged(cuda, outs, lses, [0, 7])
    wrong = cuda.put(np.asarray([-3, 4, 2, 99], np.int64))
    expected = merged(cuda, outs, lses, [0, 4, 4, 6])
    expected[0][2], expected[1][2] = (array[0] for array in merged(cuda, outs[2:], lses[2:], [0, 4]))
    for got, wanted in zip(merged(cuda, outs, lses, wrong), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    try:
        pagecore.debug(True)
        with pytest.raises(errors.ShapeError, match=r"cu_parts\[0\] is -3; it must be 0"):
            merged(cuda, outs, lses, wrong)
    finally:
        pagecore.debug(False)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_mask_leaves_rows_of_the_first_part_as_they_are(cuda, on_device):
    (outs, lses), mask = parts("float16", (6, 2, 4, 20)), np.asarray([True, False, True, True, False, False])
    outs[~mask, 1] = np.nan
    given = [cuda.put(np.ascontiguousarray(array[:, i])) for i in range(2) for array in (outs, lses)]
    joined = [cuda.get(array) for array in pagecore.merge_attention(*given)]
    given_mask = cuda.put(np.repeat(mask, 3)[::3]) if on_device else mask
    got = pagecore.merge_attention(*given, mask=given_mask, out=given[0], lse=given[1])
    for result, both, first in zip(map(cuda.get, got), joined, (outs[:, 0], lses[:, 0]), strict=True):
        np.testing.assert_array_equal(result[mask], both[mask])
        np.testing.assert_array_equal(result[~mask], first[~mask])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 4, 20), (9, 2, 3)])
def test_tokens_that_a_mask_leaves_out_are_copied_bit_by_bit(cuda, dtype, shape):
    (outs, lses), mask = parts(dtype, (shape[0], 2, *shape[1:])), np.arange(9) % 4 == 0
    outs[:, 0, :, ::3], outs[2, 0], outs[3, 0], outs[:, 1] = -0.0, np.nan, -np.inf, np.nan
    lses[:4, 0, 0] = np.inf, -np.inf, -0.0, np.nan
    lses[5:7, 0], lses[1:, 1] = [[np.inf], [-np.inf]], np.inf
    lses[7, 0].view(np.uint32)[:] = 0xFF80_1234  # a signalling NaN with bits of its own
    given = [cuda.put(np.ascontiguousarray(array[:, i])) for i in range(2) for array in (outs, lses)]
    for results in ({}, {"out": given[2], "lse": given[3]}, {"out": given[0], "lse": given[1]}):
        got = pagecore.merge_attention(*given, mask=mask, **results)
        for array, first in zip(map(cuda.get, got), (outs[:, 0], lses[:, 0]), strict=True):
            assert array[~mask].tobytes() == first[~mask].tobytes()


def test_a_warm_merge_is_one_launch_and_nothing_else(cuda):
    """A graph can capture the call: it allocates nothing, copies nothing and does not synchronize."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    outs, lses = (cuda.put(array) for array in parts(shape=(12, 4, 20)))
    where = cuda.put(np.asarray(CU_PARTS, np.int32))
    results = {"out": cuda.empty((6, 4, 20)), "lse": cuda.empty((6, 4))}
    assert calls_of(cuda, lambda: pagecore.merge_attention_parts(outs, lses, where, **results)) == {"launches": 1}
