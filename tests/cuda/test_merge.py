"""merge_attention on a CUDA device, against a float64 merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from tests.cuda.kit import Kit
from tests.cuda.memory import calls_of, spaced
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close
from tests.reference import attention as reference


def parts(dtype: str = "float32", shape: tuple[int, int, int] = (6, 4, 20), seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2)]
    lses = [(3 * rng.standard_normal(shape[:2])).astype(np.float32) for _ in range(2)]
    return [outs[0], lses[0], outs[1], lses[1]]


def merged(cuda: Kit, given: Any, **results: Any) -> tuple[Any, Any]:
    out, lse = pagecore.merge_attention(*(cuda.put(array) for array in given), **results)
    return cuda.get(out), cuda.get(lse)


def check(cuda: Kit, given: Any) -> None:
    expected = reference.merge(*(x.astype(np.float64) for x in given))
    results = {"out": cuda.empty(given[0].shape, given[0].dtype), "lse": cuda.empty(given[1].shape)}
    out, lse = merged(cuda, given, **results)
    magnitude = reference.merge(np.abs(given[0].astype(np.float64)), given[1], np.abs(given[2].astype(float)), given[3])
    assert_output_close(out, expected[0], magnitude[0] if out.shape[-1] < 16 else None)
    assert_lse_close(lse, expected[1], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 8, 20, 33, 64, 80, 128, 192, 256, 520])
def test_parts_are_merged_by_their_weights(cuda, head_dim, dtype):
    check(cuda, parts(dtype, (5, 3, head_dim)))


@pytest.mark.parametrize("shape", [(1, 1, 64), (0, 4, 8), (3, 0, 8), (70, 9, 16)])
def test_any_number_of_rows(cuda, shape):
    check(cuda, parts("bfloat16", shape))


@pytest.mark.parametrize("without_keys", [-np.inf, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_without_keys_changes_nothing_whatever_its_output_holds(cuda, dtype, without_keys):
    out_a, lse_a, out_b, lse_b = parts(dtype)
    lse_b[:] = without_keys
    out_b[:] = np.nan
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = merged(cuda, given)
        np.testing.assert_array_equal(out.astype(np.float32), out_a.astype(np.float32))
        np.testing.assert_array_equal(lse, lse_a)


@pytest.mark.parametrize("without_keys", [(-np.inf, -np.inf), (np.inf, -np.inf), (np.inf, np.inf)])
def test_two_parts_without_keys_give_zero_and_minus_infinity(cuda, without_keys):
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[2], lse_b[2] = without_keys
    out_a[2], out_b[2] = np.nan, np.nan
    out, lse = merged(cuda, (out_a, lse_a, out_b, lse_b))
    assert (out[2] == 0).all()
    assert np.isneginf(lse[2]).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("without_keys", [-np.inf, np.inf])
def test_nan_remains_nan_next_to_a_part_without_keys(cuda, without_keys):
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[2], lse_b[2] = np.nan, without_keys
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        out, lse = merged(cuda, given)
        assert np.isnan(out[2]).all()
        assert np.isnan(lse[2]).all()
        assert np.isfinite(out[:2]).all()


def test_huge_and_tiny_weights_neither_overflow_nor_vanish(cuda):
    out_a, lse_a, out_b, lse_b = parts()
    for offset in (1e4, -1e4):
        check(cuda, (out_a, lse_a + np.float32(offset), out_b, lse_b + np.float32(offset)))
    check(cuda, (out_a, lse_a + np.float32(80), out_b, lse_b))
    check(cuda, (out_a, lse_a - np.float32(200), out_b, lse_b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_parts_and_results_may_be_strided(cuda, shift, dtype):
    given = parts(dtype, (6, 4, 32))
    expected = merged(cuda, given)
    spread = [
        np.ascontiguousarray(given[0].transpose(1, 0, 2)).transpose(1, 0, 2),
        np.ascontiguousarray(given[1].T).T,
        np.repeat(given[2], 2, axis=0)[::2][::-1][::1],
        np.repeat(given[3], 2, axis=1)[:, ::2],
    ]
    spread[2] = spread[2][::-1]
    memory = np.full((4, 6, 48), np.nan, given[0].dtype)
    out = cuda.put(memory.transpose(1, 0, 2))
    lse = cuda.put(np.zeros((4, 6), np.float32).T)
    inner = out[:, :, shift : shift + 32]
    result, weights = pagecore.merge_attention(*(cuda.put(array) for array in spread), out=inner, lse=lse)
    assert result is inner
    assert weights is lse
    got = cuda.get(out).astype(np.float32)
    np.testing.assert_array_equal(got[..., shift : shift + 32], expected[0].astype(np.float32))
    np.testing.assert_array_equal(cuda.get(lse), expected[1])
    assert np.isnan(got[..., :shift]).all()
    assert np.isnan(got[..., shift + 32 :]).all()


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_stride_may_be_odd(cuda, axis, which):
    given = parts("float16", (6, 4, 32))
    expected = merged(cuda, given)
    given[which] = spaced(given[which], axis)
    out, lse = merged(cuda, given)
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("head_dim", [5, 64, 600])
def test_the_results_may_overwrite_either_part(cuda, head_dim, which, seed):
    """A row takes one lane, several lanes, or several rounds of a warp."""
    cuda.runtime.seed = seed
    given = parts("float16", (7, 5, head_dim))
    expected = merged(cuda, given)
    device = [cuda.put(array) for array in given]
    out, lse = pagecore.merge_attention(*device, out=device[which], lse=device[3 - which])
    assert out is device[which]
    assert lse is device[3 - which]
    np.testing.assert_array_equal(cuda.get(out), expected[0])
    np.testing.assert_array_equal(cuda.get(lse), expected[1])


def test_a_warm_merge_is_one_launch_and_nothing_else(cuda):
    """A graph can capture the call: it allocates nothing, copies nothing and does not synchronize."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    given = [cuda.put(array) for array in parts()]
    out, lse = cuda.empty((6, 4, 20)), cuda.empty((6, 4))
    assert calls_of(cuda, lambda: pagecore.merge_attention(*given, out=out, lse=lse)) == {"launches": 1}
