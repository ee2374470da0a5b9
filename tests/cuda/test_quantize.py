"""quantize and dequantize of arrays on a device: the bytes and numbers of the host."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import dequantize, errors, quantize
from pagecore.arrays.dtypes.formats import FORMATS
from tests.cuda.test_write_codes import WRITTEN, numbers
from tests.ops.cases import DTYPES
from tests.ops.written_cases import hard_numbers
from tests.thinning import in_turn


def on_device(cuda, array):
    return None if array is None else cuda.put(array)


@pytest.mark.parametrize("name", WRITTEN)
def test_as_on_the_host(cuda, name):
    dtype = list(DTYPES)[WRITTEN.index(name) % len(DTYPES)]
    x = numbers((3, 5, 2, 64), dtype)
    x[1, 2, 0, 3], x[2, 1, 1, 7] = np.nan, np.inf
    codes, scales = quantize(x, name)
    got, got_scales = quantize(cuda.put(x), name)
    assert cuda.get(got).tobytes() == codes.tobytes()
    if scales is not None:
        assert cuda.get(got_scales).tobytes() == scales.tobytes()
    read = dequantize(cuda.put(codes), name.removesuffix("_4over6"), on_device(cuda, scales), dtype=dtype)
    expected = dequantize(codes, name.removesuffix("_4over6"), scales, dtype=dtype)
    np.testing.assert_array_equal(cuda.get(read).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", [name for name in WRITTEN if FORMATS[name.removesuffix("_4over6")].group])
def test_signs_of_numbers_that_infinity_makes_zero(cuda, name):
    x = np.zeros((8, 32), np.float32)
    x[:, 1::3], x[:, 2::3] = -(2.0 ** np.arange(-24, -16, dtype=np.float32))[:, None], -0.0
    x[:, ::16] = np.inf
    for dtype in DTYPES.values():
        codes, scales = quantize(x.astype(dtype), name)
        got, got_scales = quantize(cuda.put(x.astype(dtype)), name)
        assert cuda.get(got).tobytes() == codes.tobytes()
        assert cuda.get(got_scales).tobytes() == scales.tobytes()


@pytest.mark.parametrize("shape", [(32,), (0, 2, 32), (2, 3, 4, 2, 32)])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_token", "mxfp8"])
def test_axes_in_any_order(cuda, name, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    if len(shape) == 5:
        x = x.transpose(1, 3, 0, 2, 4)
    codes, scales = quantize(x, name)
    got, got_scales = quantize(cuda.put(x), name)
    assert cuda.get(got).tobytes() == codes.tobytes()
    read = dequantize(got, name, got_scales)
    np.testing.assert_array_equal(cuda.get(read), dequantize(codes, name, scales))


def test_factors_of_heads(cuda):
    x, factors = numbers((6, 3, 32)), np.array([0.5, 3, 0.01], np.float32)
    codes, _ = quantize(x, "float8_e5m2", factors)
    for given in (factors, cuda.put(factors)):
        got, _ = quantize(cuda.put(x), "float8_e5m2", given)
        assert cuda.get(got).tobytes() == codes.tobytes()
        read = dequantize(got, "float8_e5m2", scale=given)
        np.testing.assert_array_equal(cuda.get(read), dequantize(codes, "float8_e5m2", scale=factors))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_rows_of_latents(cuda, name):
    x = np.random.default_rng(0).standard_normal((2, 5, 576)).astype(np.float32)
    codes, _ = quantize(x, name)
    got, _ = quantize(cuda.put(x), name)
    assert cuda.get(got).tobytes() == codes.tobytes()
    np.testing.assert_array_equal(cuda.get(dequantize(got, name)), dequantize(codes, name))
    with pytest.raises(errors.ShapeError, match="multiples of 16 bytes"):
        dequantize(cuda.put(np.zeros((3, codes.shape[-1] + 1), np.uint8)[:, :-1]), name)


def test_scales_on_the_host_are_refused(cuda):
    codes, scales = quantize(numbers((4, 2, 32)), "int8_token")
    with pytest.raises(errors.DeviceError, match="scales is on cpu"):
        dequantize(cuda.put(codes), "int8_token", scales)
    with pytest.raises(errors.UnsupportedOption, match="global scale of nvfp4 must be above 0"):
        quantize(cuda.put(numbers((4, 2, 32))), "nvfp4", -1.0)
    assert set(FORMATS) < set(WRITTEN)


HARD = hard_numbers(2 * 80, 96, "float32").reshape(2, 80, 96)  # infinities, NaN, subnormals, the largest numbers
SEALED = in_turn([4, 16, 24, 32, 96], over=[[("kivi2", -1), ("kivi4", -2), ("kivi4", -1), ("kivi2", -2)], DTYPES])


@pytest.mark.parametrize(("group", "format", "dtype"), SEALED)
def test_sealed_formats_as_on_the_host(cuda, group, format, dtype):
    """Groups within a word, that share words, and of one chunk or several; 80 lanes, which no warp divides."""
    name, axis = format
    with np.errstate(all="ignore"):
        x = HARD.astype(DTYPES[dtype])
    x = x.swapaxes(1, 2) if axis == -2 else x
    codes, scales = quantize(x, name, axis=axis, group_size=group)
    got, got_scales = quantize(cuda.put(x), name, axis=axis, group_size=group)
    assert cuda.get(got).tobytes() == codes.tobytes()
    assert cuda.get(got_scales).tobytes() == scales.tobytes()
    for target in DTYPES:
        read = cuda.get(dequantize(got, name, got_scales, axis=axis, dtype=target))
        expected = dequantize(codes, name, scales, axis=axis, dtype=target)
        np.testing.assert_array_equal(read.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("axis", [-1, -2])
def test_sealed_formats_of_any_strides(cuda, axis):
    """Arrays of one launch and of several; rows whose numbers are not adjacent; no numbers at all."""
    x = np.random.default_rng(1).normal(size=(32, 2, 32, 32)).astype(np.float16)
    swapped = x.reshape(2, 2, 4, 4, 32, 32).transpose(3, 1, 0, 2, 4, 5)
    for view in (x[::2], x.transpose(2, 1, 0, 3), x.transpose(0, 1, 3, 2), x[::-1, 1:], x[0, 0], x[:0], swapped):
        codes, scales = quantize(view, "kivi2", axis=axis)
        got, got_scales = quantize(cuda.put(view), "kivi2", axis=axis)
        assert cuda.get(got).tobytes() == codes.tobytes()
        assert cuda.get(got_scales).tobytes() == scales.tobytes()
        wide = np.zeros((*codes.shape, 2), np.int32)
        wide[..., 0] = codes
        read = dequantize(cuda.put(wide)[..., 0], "kivi2", cuda.put(np.asfortranarray(scales)), axis=axis)
        np.testing.assert_array_equal(cuda.get(read), dequantize(codes, "kivi2", scales, axis=axis))


def test_a_row_of_one_axis_in_a_sealed_format(cuda):
    x = np.random.default_rng(2).normal(size=96).astype(np.float32)
    here, (codes, scales) = quantize(x, "kivi4"), quantize(cuda.put(x), "kivi4")
    np.testing.assert_array_equal(cuda.get(codes), here[0])
    np.testing.assert_array_equal(cuda.get(dequantize(codes, "kivi4", scales)), dequantize(here[0], "kivi4", here[1]))


def test_leading_axes_that_do_not_follow_each_other(cuda):
    """Blocks of three matrices, which have fewer tasks than a block of threads."""
    x = np.random.default_rng(3).normal(size=(3, 2, 16, 8)).astype(np.float32)
    codes, scales = (each.swapaxes(0, 1) for each in quantize(x, "kivi2", axis=-2, group_size=16))
    read = dequantize(cuda.put(codes), "kivi2", cuda.put(scales), axis=-2)
    np.testing.assert_array_equal(cuda.get(read), dequantize(codes, "kivi2", scales, axis=-2))
