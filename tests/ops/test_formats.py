"""write_kv in every format: the bytes are the twin's in every layout, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import errors, ops
from pagecore.arrays.dtypes.formats import FORMATS
from pagecore.ops.cpu import set_num_threads
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa
from tests.ops.written_cases import ALL, LAYOUTS, Stored, finite_numbers, hard_numbers
from tests.together import together

HEADS = 3


def rows_of(count: int, dim: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Return ``[count, HEADS, dim]`` of hard numbers."""
    return hard_numbers(count * HEADS, dim, dtype, seed).reshape(count, HEADS, dim)


def write(key: Any, value: Any, keys: Stored, values: Stored, slots: Any, **options: Any) -> None:
    if keys.format == "nvfp4_4over6":
        options["format"] = keys.format
    ops.write_kv(key, value, slot_mapping=slots, **keys.arguments("key"), **values.arguments("value"), **options)


@together("format", ALL)
@together("layout", LAYOUTS)
def test_bytes_are_those_of_the_twin_in_every_layout(layout, format):
    key, value = rows_of(40, 64), rows_of(40, 96, seed=1)
    keys, values = Stored(format, layout, 12, 4, HEADS, 64), Stored(format, layout, 12, 4, HEADS, 96)
    slots = np.random.default_rng(2).permutation(48)[:40]
    slots[[3, 17]] = -1
    keys.expect(key, slots)
    values.expect(value, slots)
    write(key, value, keys, values, slots)
    keys.check()
    values.check()


@pytest.mark.slow
@together("format", ALL)
@together("dtype", DTYPES)
@on_every_isa
def test_every_source_dtype_on_every_instruction_set(dtype, format):
    key, value = rows_of(200, 128, dtype), rows_of(200, 32, dtype, seed=1)
    keys, values = Stored(format, "HND", 14, 16, HEADS, 128), Stored(format, "NHD", 14, 16, HEADS, 32)
    slots = np.arange(7, 207)
    keys.expect(key, slots)
    values.expect(value, slots)
    write(key, value, keys, values, slots)
    keys.check()
    values.check()


@pytest.mark.slow
@together(("format", "factor"), [("fp4_block16", None), ("mxfp8", None), ("nvfp4", 0.25), ("nvfp4", 2.0**-12)])
@together("dtype", DTYPES)
@on_every_isa
def test_finite_rows_with_one_slot_a_block_and_in_runs(dtype, format, factor):
    """Rows without NaN and infinity, whose codes are computed in words; all heads of a single token are one batch."""
    slots = np.concatenate([np.arange(6), np.arange(2, 16) * 4 + np.arange(14) % 4, [-1], np.arange(65, 71)])
    for layout in ("HND", "NHD"):
        sides = []
        for dim, seed in ((96, 0), (160, 1)):
            rows = finite_numbers(len(slots) * HEADS, dim, dtype, seed).reshape(-1, HEADS, dim)
            if factor is not None:
                rows = (rows * factor).astype(rows.dtype)
            stored = Stored(format, layout, 19, 4, HEADS, dim, factor)
            stored.expect(rows, slots)
            sides.append((rows, stored))
        (key, keys), (value, values) = sides
        write(key, value, keys, values, slots)
        keys.check()
        values.check()


@together("format", ["float8_e4m3fn", "float8_e5m2", "float8_token", "int8_token", "int4_token"])
@together("dim", [2, 6, 8, 34, 100, 130])
@on_every_isa
def test_rows_of_any_length_are_written_completely(dim, format):
    key = rows_of(30, dim)
    keys, values = Stored(format, "padded", 9, 4, HEADS, dim), Stored(format, "padded", 9, 4, HEADS, dim)
    for cache in (keys, values):
        cache.expect(key, range(30))
    write(key, key, keys, values, np.arange(30))
    keys.check()
    values.check()


@pytest.mark.slow
@together("format", ["fp4_block16", "nvfp4", "nvfp4_4over6", "mxfp8"])
@together("dim", [32, 160, 288, 8224])
@on_every_isa
def test_rows_with_any_number_of_groups(dim, format):
    key = rows_of(30, dim)
    keys, values = Stored(format, "NHD", 9, 4, HEADS, dim), Stored(format, "HND", 9, 4, HEADS, dim)
    for cache in (keys, values):
        cache.expect(key, range(30))
    write(key, key, keys, values, np.arange(30))
    keys.check()
    values.check()


@pytest.mark.slow
@together("format", ALL)
def test_many_tokens_on_several_threads(format):
    count, dim = 2000, 128
    rng = np.random.default_rng(0)
    key, value = (rng.normal(size=(count, HEADS, dim)).astype(DTYPES["bfloat16"]) for _ in range(2))
    keys, values = Stored(format, "HND", 140, 16, HEADS, dim), Stored(format, "NHD", 140, 16, HEADS, dim)
    slots = rng.permutation(2240)[:count]
    keys.expect(key, slots)
    values.expect(value, slots)
    before = _cpu_threads(4)
    try:
        write(key, value, keys, values, slots)
    finally:
        set_num_threads(before)
    keys.check()
    values.check()


def _cpu_threads(count: int) -> int:
    from pagecore import num_threads

    before = num_threads()
    set_num_threads(count)
    return before


@together("key_format", ["float32", "float8_e4m3fn", "int8_token"])
def test_key_and_value_may_have_different_formats(key_format):
    key, value = rows_of(30, 32), rows_of(30, 64, seed=1)
    values = Stored("nvfp4", "NHD", 9, 4, HEADS, 64)
    values.expect(value, range(30))
    if key_format == "float32":
        plain = np.zeros((9, 4, HEADS, 32), np.float32)
        ops.write_kv(key, value, plain, slot_mapping=np.arange(30), **values.arguments("value"))
        np.testing.assert_array_equal(plain.reshape(36, HEADS, 32)[:30], key)
    else:
        keys = Stored(key_format, "HND", 9, 4, HEADS, 32)
        keys.expect(key, range(30))
        write(key, value, keys, values, np.arange(30))
        keys.check()
    values.check()


@together("format", ["float8_e4m3fn", "float8_e5m2"])
def test_each_head_has_its_own_given_factor(format):
    key = np.random.default_rng(0).normal(size=(9, HEADS, 16)).astype(np.float32)
    factors = np.array([0.5, 3.0, 0.01], np.float32)
    codes = [np.zeros((3, 4, HEADS, 16), DTYPES.get(format, FORMATS[format].dtype.numpy)) for _ in range(2)]
    ops.write_kv(key, key, *codes, np.arange(9), key_scale=factors, value_scale=2.0)
    for array, given in ((codes[0], factors[:, None]), (codes[1], 2.0)):
        expected, _ = ops.quantize(key / np.float32(given), format)
        np.testing.assert_array_equal(
            array.reshape(12, HEADS, 16)[:9].view(np.uint8), np.asarray(expected).view(np.uint8)
        )


def test_a_scale_plane_of_one_scale_a_row_may_lack_its_last_axis():
    key = rows_of(30, 8)
    keys, values = Stored("int8_token", "HND", 9, 4, HEADS, 8), Stored("int8_token", "NHD", 9, 4, HEADS, 8)
    for cache in (keys, values):
        cache.expect(key, range(30))
    ops.write_kv(
        key,
        key,
        keys.codes,
        values.codes,
        np.arange(30),
        key_scale=keys.plane[..., 0],
        value_scale=values.plane[..., 0],
    )
    keys.check()
    values.check()


def test_of_two_tokens_with_one_slot_the_later_is_stored():
    key = rows_of(30, 32)
    keys, values = Stored("mxfp8", "HND", 3, 4, HEADS, 32), Stored("int4_token", "NHD", 3, 4, HEADS, 32)
    slots = [5] * 29 + [2]
    for cache in (keys, values):
        cache.expect(key, slots)
    write(key, key, keys, values, slots)
    keys.check()
    values.check()


def codes_of(name: str, dim: int = 32) -> Any:
    return np.zeros((6, 4, 2, FORMATS[name].row_codes(dim)), FORMATS[name].dtype.numpy)


def scales_of(name: str, dim: int = 32) -> Any:
    return np.zeros((6, 4, 2, FORMATS[name].row_scales(dim)), FORMATS[name].scale_dtype.numpy)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


GOOD = {
    "key": np.ones((3, 2, 32), np.float32),
    "value": np.ones((3, 2, 32), np.float32),
    "key_cache": codes_of("int8_token"),
    "value_cache": codes_of("nvfp4"),
    "key_scale": scales_of("int8_token"),
    "value_scale": scales_of("nvfp4"),
    "slot_mapping": [1, 2, 3],
}
SHARED = np.zeros((6, 4, 2, 36), np.uint8)
SHAPE, DTYPE, OPTION, DEVICE = errors.ShapeError, errors.UnsupportedDtype, errors.UnsupportedOption, errors.DeviceError

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"key_scale": None}, OPTION, "key_cache is int8 and key_scale is not an array.*float32 for int8_token"),
    ({"key_scale": 0.5}, OPTION, "key_cache is int8 and key_scale is not an array"),
    ({"value_scale": [0.5, 0.5]}, OPTION, "value_cache is uint8.*int4_token or uint8 for fp4_block16"),
    ({"key_scale": scales_of("int8_token")[:5]}, SHAPE, r"key_scale has shape \(5, 4, 2, 1\).*\(6, 4, 2, 1\)"),
    ({"key_scale": scales_of("int8_token")[:, :3]}, SHAPE, "key_scale has shape"),
    ({"key_scale": np.zeros((6, 4, 2, 2), np.float32)}, SHAPE, "key_scale has shape.*same pool"),
    ({"value_scale": scales_of("nvfp4")[..., 0]}, SHAPE, r"value_scale has shape \(6, 4, 2\).*\(6, 4, 2, 2\)"),
    ({"value_scale": np.zeros((6, 4, 2, 4), np.float32)[..., ::2]}, SHAPE, "value_scale"),
    ({"value_scale": np.zeros((6, 4, 2, 4), np.uint8)[..., ::2]}, SHAPE, "value_scale.*last axis"),
    ({"key_scale": np.zeros((6, 4, 2, 1), np.float16)}, DTYPE, "key_cache is int8 and key_scale float16; use.*'mxfp8'"),
    ({"key_cache": np.zeros((6, 4, 2, 32), np.float32)}, OPTION, "key_cache is float32, which stores no scales"),
    ({"key_cache": codes_of("float8_e5m2")}, DTYPE, "key_cache is float8_e5m2 and key_scale float32"),
    ({"key_cache": np.zeros((6, 4, 2, 16), np.int8)}, SHAPE, "key.*head_dim of key_cache"),
    ({"value_cache": np.zeros((6, 4, 2, 12), np.uint8)}, SHAPE, "head_dim of 24.*multiple of 16"),
    ({"key_scale": read_only(scales_of("int8_token"))}, OPTION, "key_scale is read-only"),
    ({"value_cache": read_only(codes_of("nvfp4"))}, OPTION, "value_cache is read-only"),
    ({"key_scale": np.broadcast_to(np.zeros((1, 1, 1, 1), np.float32), (6, 4, 2, 1))}, (SHAPE, OPTION), "key_scale"),
    ({"value_cache": SHARED[..., :16], "value_scale": SHARED[..., 15:17]}, OPTION, "value_scale shares memory"),
    ({"key_global_scale": 2.0}, OPTION, "key_global_scale is 2.0 .* not nvfp4.* scales are float8_e4m3fn"),
    ({"value_global_scale": 0.0}, OPTION, "value_global_scale is 0.0.*above 0"),
    ({"value_global_scale": -1.0}, OPTION, "value_global_scale is -1.0"),
    ({"value_global_scale": float("nan")}, OPTION, "value_global_scale is nan"),
    ({"value_global_scale": "1"}, OPTION, "value_global_scale is '1'"),
    ({"format": "int8"}, OPTION, "format is 'int8'; use one of float8_e4m3fn"),
    ({"format": 8}, OPTION, "format is 8; use one of"),
    ({"format": "int8_token"}, OPTION, "format is 'int8_token' and value_cache has format 'nvfp4'"),
    (
        {"format": "nvfp4_4over6", "value_cache": codes_of("int8_token"), "value_scale": scales_of("int8_token")},
        OPTION,
        "format is 'nvfp4_4over6' and key_cache has format 'int8_token'",
    ),
    ({"slot_mapping": [1, 2, 24]}, errors.InvalidBlock, "24"),
]


@together(("change", "error", "message"), REFUSED)
def test_write_kv_refuses_with_nothing_written(change, error, message):
    arguments = GOOD | change
    arrays = [each for each in arguments.values() if isinstance(each, np.ndarray) and each.dtype != object]
    before = [each.tobytes() for each in arrays]
    with pytest.raises(error, match=message):
        ops.write_kv(**arguments)
    assert [each.tobytes() for each in arrays] == before


def test_interleaved_codes_and_scales_of_one_buffer_do_not_overlap():
    key = rows_of(30, 32)
    page = np.zeros((9, 4, HEADS, 2, 18), np.uint8)
    expected = Stored("fp4_block16", "NHD", 9, 4, HEADS, 32)
    expected.expect(key, range(30))
    ops.write_kv(
        key,
        key,
        page[..., 0, :16],
        page[..., 1, :16],
        np.arange(30),
        key_scale=page[..., 0, 16:],
        value_scale=page[..., 1, 16:],
    )
    for side in range(2):
        np.testing.assert_array_equal(page[:7, :, :, side, :16], expected.expected_codes[:7])
        np.testing.assert_array_equal(page[:7, :, :, side, 16:], expected.expected_scales[:7])
