"""The formats "kivi2" and "kivi4": worked example B11, bits of the twin, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from tests.ops import kivi_twin as twin
from tests.ops.cases import DTYPES
from tests.ops.written_cases import hard_numbers
from tests.together import together

FORMATS = tuple(twin.BITS)


def same_bits(got: Any, expected: Any) -> None:
    """Compare bit for bit, except that every NaN is equal."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    width = f"u{expected.itemsize}"
    known = ~np.isnan(expected.astype(np.float32)) if expected.dtype != np.int32 else np.ones(expected.shape, bool)
    got, expected = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    np.testing.assert_array_equal(got.view(width)[known], expected.view(width)[known])
    assert not known.all() or not np.isnan(got.astype(np.float32)).any()


def keys_of_b11() -> Any:
    keys = np.zeros((16, 2), np.float32)
    keys[:4, 0], keys[:4, 1] = [0, 1, 2, 3], [10, -2, 4, 2]
    keys[4:8, 0], keys[4:8, 1] = [4, 4, 4, 5], [4, 5, 6, 7]
    return keys


def test_worked_example_variants_b11_keys_of_kivi():
    keys = keys_of_b11()
    for quantize in (twin.quantize, pagecore.quantize):
        words, scales = quantize(keys, "kivi2", axis=-2, group_size=4)
        assert words.view(np.uint32).tolist() == [[0xC0E4, 0xE463]]
        np.testing.assert_array_equal(scales[:2, 0], np.array([[1, 4], [1 / 3, 1]], np.float32))
        np.testing.assert_array_equal(scales[:2, 1], [[0, -2], [4, 4]])
        np.testing.assert_array_equal(scales[2:], 0)
    read = pagecore.dequantize(words, "kivi2", scales, axis=-2)
    np.testing.assert_array_equal(read[:4, 1], [10, -2, 6, 2])
    np.testing.assert_array_equal(read[8:], 0)


@together("dtype", DTYPES)
def test_worked_example_variants_b11_a_constant_group_reads_back_exactly(dtype):
    x = np.full((32, 32), 0.1, DTYPES[dtype])
    for axis in (-1, -2):
        words, scales = pagecore.quantize(x, "kivi4", axis=axis)
        assert not words.any()
        assert not (scales[..., 0] if axis == -1 else scales[..., 0, :]).any()
        np.testing.assert_array_equal(pagecore.dequantize(words, "kivi4", scales, axis=axis, dtype=dtype), x)


@together("dtype", DTYPES)
@together("axis", [-1, -2])
@together("format", FORMATS)
def test_words_scales_and_numbers_are_the_twins(format, axis, dtype):
    """Hard numbers have infinities, NaN, subnormals and the largest numbers; 80 lanes are two parts of a call."""
    for group in (4, 16, 32, 96):
        x = hard_numbers(2 * 80, 96, dtype).reshape(2, 80, 96)
        if axis == -2:
            x = x.swapaxes(1, 2)
        words, scales = twin.quantize(x, format, axis, group)
        got = pagecore.quantize(x, format, axis=axis, group_size=group)
        same_bits(got[0], words)
        same_bits(got[1], scales)
        numbers = twin.dequantize(words, format, scales, axis)
        same_bits(pagecore.dequantize(got[0], format, got[1], axis=axis), numbers)
        with np.errstate(all="ignore"):
            rounded = numbers.astype(DTYPES[dtype])
        same_bits(pagecore.dequantize(got[0], format, got[1], axis=axis, dtype=dtype), rounded)


@together("format", FORMATS)
def test_errors_are_at_most_half_a_step(format):
    x = np.random.default_rng(0).normal(size=(64, 3, 128)).astype(np.float32)
    for axis in (-1, -2):
        words, scales = pagecore.quantize(x.swapaxes(0, 1), format, axis=axis)
        read = pagecore.dequantize(words, format, scales, axis=axis)
        scale = scales[..., 0] if axis == -1 else scales[..., 0, :]
        step = scale.repeat(32, axis)
        assert (np.abs(read - x.swapaxes(0, 1)) <= step / 2 + 1e-6).all()


@together("axis", [-1, -2])
def test_arrays_have_any_strides(axis):
    x = np.random.default_rng(1).normal(size=(32, 3, 32, 32)).astype(np.float16)
    for view in (x[::2], x.transpose(2, 1, 0, 3), x.transpose(0, 1, 3, 2), x[::-1, 1:]):
        words, scales = pagecore.quantize(view, "kivi2", axis=axis)
        expected = twin.quantize(view, "kivi2", axis)
        same_bits(words, expected[0])
        same_bits(scales, expected[1])
        wide = np.zeros((*words.shape, 2), np.int32)
        wide[..., 0] = words
        read = pagecore.dequantize(wide[..., 0], "kivi2", np.asfortranarray(scales), axis=axis)
        same_bits(read, twin.dequantize(expected[0], "kivi2", expected[1], axis))


def test_groups_are_shared_among_threads():
    x = np.random.default_rng(2).normal(size=(64, 64, 128)).astype(np.float32)
    for axis in (-1, -2):
        words, scales = pagecore.quantize(x, "kivi4", axis=axis)
        expected = twin.quantize(x, "kivi4", axis)
        np.testing.assert_array_equal(words, expected[0])
        np.testing.assert_array_equal(scales, expected[1])


X = np.ones((3, 32, 64), np.float32)
WORDS, SCALES = pagecore.quantize(X, "kivi2", axis=-2)
SHAPE, DTYPE, OPTION = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption


@together(
    ("arguments", "options", "error", "message"),
    [
        ((X, "kivi2"), {"axis": 1}, OPTION, "axis is 1; use -1 .*values.*or -2 .*keys"),
        ((X, "kivi2"), {"group_size": 0}, SHAPE, "group_size is 0"),
        ((X, "kivi2"), {"group_size": 24}, SHAPE, "multiple of 24 along axis -1"),
        ((X[:, :24], "kivi2"), {"axis": -2, "group_size": 8}, SHAPE, "of 16, the codes of a word"),
        ((X[0, 0], "kivi2"), {"axis": -2}, SHAPE, r"must be \[..., T, D\]"),
        ((X, "kivi4", 0.5), {}, OPTION, "'kivi4' computes its scales"),
        ((X.astype(np.int8), "kivi4"), {}, DTYPE, "x is int8"),
        ((X, "int8_token"), {"axis": -2}, OPTION, "axis is -2 and format is 'int8_token'; only kivi2 and kivi4"),
        ((X, "mxfp8"), {"group_size": 32}, OPTION, "group_size is 32"),
    ],
)
def test_quantize_refuses(arguments, options, error, message):
    with pytest.raises(error, match=message):
        pagecore.quantize(*arguments, **options)


@together(
    ("arguments", "error", "message"),
    [
        ({"codes": WORDS.view(np.uint8)}, DTYPE, "codes is uint8; the codes of 'kivi2' are words of int32"),
        ({"scales": None}, OPTION, "'kivi2' stores scales"),
        ({"scales": SCALES[:, :, 0]}, SHAPE, r"need \[3, groups, 2, 64\] with groups that divide 32"),
        ({"axis": -1}, SHAPE, r"need \[3, 2, groups, 2\] with groups that divide 1024"),
        ({"scales": np.repeat(SCALES, 3, 1)}, SHAPE, "groups that divide 32"),
        ({"scale": 2.0}, OPTION, "leave scale out"),
        ({"format": "mxfp8"}, OPTION, "axis is -2"),
    ],
)
def test_dequantize_refuses(arguments, error, message):
    given = {"codes": WORDS, "format": "kivi2", "scales": SCALES, "axis": -2} | arguments
    with pytest.raises(error, match=message):
        pagecore.dequantize(**given)


def test_writes_of_tokens_name_what_takes_these_formats():
    cache = np.zeros((2, 4, 3, 64), np.float32)
    with pytest.raises(OPTION, match=r"'kivi4', .*: use AttentionSpec.*seal_kv.*float8_e4m3fn"):
        pagecore.write_kv(X[:, :3], X[:, :3], cache, cache.copy(), [4, 5, 6], format="kivi4")
