"""hadamard on the host: the matrices of Sylvester, on every instruction set with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pagecore
from pagecore import dequantize, hadamard, quantize
from pagecore.errors import DeviceError, PagecoreError, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import ISAS, instruction_set, on_every_isa
from tests.reference import hadamard as reference

DIMS = [8, 16, 24, 32, 40, 64, 80, 96, 128, 192, 256, 384, 512]
# Bounds of a rounding to the dtype, and of float32 sums of up to 256 numbers.
ROUNDING = {"float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return reference.with_outliers(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[dtype])


def assert_close(found: np.ndarray, rows: np.ndarray, dtype: str) -> None:
    expected = reference.hadamard(rows)
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    assert (np.abs(found.astype(np.float64) - expected) <= ROUNDING[dtype] * np.abs(expected) + 1e-6 * norms).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_multiplied_by_the_matrices_of_sylvester(dim, dtype):
    rows = numbers(5, 3, dim, dtype=dtype)
    results = {}
    for isa in ISAS:
        with instruction_set(isa):
            out = np.full(rows.shape, np.nan, rows.dtype)
            assert hadamard(rows, out=out) is out
            results[isa] = out
    first = results[ISAS[0]]
    assert_close(first, rows, dtype)
    assert all(each.tobytes() == first.tobytes() for each in results.values())
    assert hadamard(rows).tobytes() == first.tobytes()


@on_every_isa
def test_scores_stay_the_same_in_float64():
    query, key = (numbers(40, 192, seed=seed).astype(np.float64) for seed in (1, 2))
    rotated = [reference.hadamard(each) for each in (query, key)]
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, query @ key.T, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(reference.hadamard(rotated[1]), key, rtol=1e-12, atol=1e-12)
    found = [hadamard(each.astype(np.float32)).astype(np.float64) for each in (query, key)]
    np.testing.assert_allclose(found[0] @ found[1].T, query @ key.T, rtol=1e-5, atol=1e-3)


@on_every_isa
def test_a_block_of_one_number_becomes_multiples_of_a_row_of_the_matrix():
    for dim in (8, 64, 256):
        np.testing.assert_array_equal(np.abs(hadamard(np.eye(dim, dtype=np.float32))), np.float32(dim**-0.5))
        whole = hadamard(np.full((1, dim), dim**-0.5, np.float32))[0]
        np.testing.assert_allclose(whole, np.eye(dim)[0], atol=1e-7)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_any_strides_are_read_and_written_in_place(dtype):
    held = numbers(6, 4, 9, 80, dtype=dtype)
    views: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "heads of a fused projection": lambda x: x[:, 1:3, 2:7],
        "every second token": lambda x: x[::2, 0],
        "heads before tokens": lambda x: x[0].transpose(1, 0, 2),
        "backwards": lambda x: x[::-1, 3],
        "one row": lambda x: x[2, 2, 5],
        "four axes that do not merge": lambda x: x[:, ::2, 1::3],
        "one token": lambda x: x[:1, :1],
    }
    for name, find in views.items():
        view = find(held)
        expected = hadamard(np.ascontiguousarray(view))
        assert hadamard(view).tobytes() == expected.tobytes(), name
        room = np.full((*view.shape[:-1], 96), 7, view.dtype)
        hadamard(view, out=room[..., :80])
        assert room[..., :80].tobytes() == expected.tobytes(), name
        assert (room[..., 80:] == 7).all(), name
        own = held.copy()
        place, untouched = find(own), np.ones(own.shape, bool)
        assert hadamard(place, out=place) is place
        assert place.tobytes() == expected.tobytes(), name
        find(untouched)[...] = False
        assert own[untouched].tobytes() == held[untouched].tobytes(), name


def test_rows_that_do_not_begin_at_a_multiple_of_a_vector():
    held = numbers(700)
    for first in range(1, 9):
        rows = held[first : first + 640].reshape(5, 128)
        assert hadamard(rows).tobytes() == hadamard(rows.copy()).tobytes()


def test_many_rows_are_shared_among_threads_with_the_same_bits():
    rows = numbers(4096, 8, 128, dtype="bfloat16")
    before = pagecore.num_threads()
    try:
        pagecore.set_num_threads(1)
        alone = hadamard(rows)
        pagecore.set_num_threads(4)
        assert hadamard(rows).tobytes() == alone.tobytes()
    finally:
        pagecore.set_num_threads(before)


@on_every_isa
def test_a_block_with_a_number_that_is_not_finite_has_no_finite_number():
    rows = numbers(2, 4, 96)
    rows[0, 1, 40], rows[1, 2, 90] = np.nan, np.inf
    with np.errstate(all="ignore"):
        found = np.isfinite(hadamard(rows)).reshape(2, 4, 3, 32)
    assert not found[0, 1, 1].any()
    assert not found[1, 2, 2].any()
    assert found.sum() == (24 - 2) * 32


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64), (2, 0)])
def test_arrays_without_rows(shape):
    rows = np.zeros(shape, np.float32)
    if shape[-1] == 0:
        with pytest.raises(ShapeError, match="multiple of 8"):
            hadamard(rows)
    else:
        assert hadamard(rows).shape == shape


@pytest.mark.parametrize(
    ("rows", "options", "error", "message"),
    [
        (np.ones((2, 12), np.float32), {}, ShapeError, r"x has shape \(2, 12\).*multiple of 8.*pad"),
        (np.ones((2, 4), np.float32), {}, ShapeError, "multiple of 8"),
        (np.array(1, np.float32), {}, ShapeError, "no axes"),
        (np.ones((2, 16)), {}, UnsupportedDtype, "x is float64"),
        (np.ones((2, 16), np.int32), {}, UnsupportedDtype, "x is int32"),
        (np.ones((16, 16), np.float32)[:, ::2], {}, ShapeError, "contiguous"),
        (np.ones((2, 16), np.float32), {"out": np.ones((2, 8), np.float32)}, ShapeError, "out has shape"),
        (np.ones((2, 16), np.float32), {"out": np.ones((2, 16), np.float16)}, UnsupportedDtype, "out is float16"),
        (np.ones((2, 16), np.float32), {"stream": 0}, UnsupportedOption, "stream"),
        ([[1.0] * 8], {}, PagecoreError, "x"),
    ],
    ids=str,
)
def test_misuse_is_refused_by_name(rows, options, error, message):
    with pytest.raises(error, match=message):
        hadamard(rows, **options)


def test_results_that_overlap_the_rows_are_refused_before_anything_is_written():
    held = numbers(6, 64)
    before = held.copy()
    for out in (held[1:5], held[::-1][1:5], held[3:7]):
        with pytest.raises((UnsupportedOption, ShapeError)):
            hadamard(held[:4], out=out)
    fixed = np.zeros((4, 64), np.float32)
    fixed.setflags(write=False)
    with pytest.raises((UnsupportedOption, DeviceError), match="read-only"):
        hadamard(held[:4], out=fixed)
    np.testing.assert_array_equal(held, before)


# ---- what it is for

# Bounds of the error of rotated keys with 5 outlier channels of 128, relative to their norm, and of its gain. The
# groups of 16 of "nvfp4" keep an outlier to themselves.
ERRORS = {
    "int8_token": (0.006, 0.33),
    "int4_token": (0.09, 0.42),
    "fp4_block16": (0.115, 0.75),
    "nvfp4_4over6": (0.09, 1.0),
}


@pytest.mark.parametrize("format", ERRORS)
def test_a_rotation_spreads_outlier_channels(format):
    key = numbers(512, 128)

    def error(rows: np.ndarray) -> float:
        codes, scales = quantize(rows, format)
        return float(np.linalg.norm(dequantize(codes, format, scales) - rows) / np.linalg.norm(rows))

    plain, rotated = error(key), error(hadamard(key))
    print(f"{format}: error of keys {plain:.4f}, rotated {rotated:.4f}")
    most, gain = ERRORS[format]
    assert rotated < most
    assert rotated < gain * plain
