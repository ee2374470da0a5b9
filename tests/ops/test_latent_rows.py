"""Rows of latent caches: slots, bytes of every format against published bytes and the plain twin, refusals."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np
import pytest

from pagecore import (
    KVLayout,
    KVPool,
    Plane,
    dequantize,
    errors,
    gather_latent,
    quantize,
    write_index,
    write_latent,
)
from tests.ops.instruction_sets import on_every_isa
from tests.reference import latent as reference
from tests.together import together

BF16 = ml_dtypes.bfloat16
ROW_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def example() -> np.ndarray:
    """Return the row whose bytes are published, bfloat16 [576]."""
    i, j = np.arange(512), np.arange(64)
    x = ((37 * i % 256) - 128) / 16 * np.repeat([1, 0.5, 8, 0], 128)
    return np.concatenate([x, ((11 * j % 64) - 32) / 8]).astype(np.float32).astype(BF16)


def stored(format: str, rows: np.ndarray) -> np.ndarray:
    cache = np.full((len(rows), 1, ROW_BYTES[format]), 0xA5, np.uint8)
    write_latent(rows[:, :512], rows[:, 512:], cache, None, np.arange(len(rows)), format=format)
    return cache[:, 0]


def test_worked_example_variants_a4_fp8_ds_mla_bytes():
    row = stored("fp8_ds_mla", example()[None])[0].tobytes()
    parts = {0: "f8f3eee0626e74f8", 128: "00697176f6f1e84c", 256: "f8f3eee0626e74f8", 384: "0000000080808000"}
    parts |= {512: "0000003d0000803c0000803e00000039", 528: "80c028c0a0bf003e"}
    assert {at: row[at : at + len(part) // 2].hex() for at, part in parts.items()} == parts
    assert hashlib.sha256(row).hexdigest() == "6dcf6fd291348d43a91e19de501a074511bbdbae0696bdd911e287fbfe86ea1e"


def test_worked_example_variants_a5_nvfp4_ds_mla_bytes():
    row = stored("nvfp4_ds_mla", example()[None])[0].tobytes()
    parts = {0: "efac52f6ce2965ef", 256: "c8c2ba203c44c7c2"}
    parts |= {320: "3b3a3232535201013a3b323152530101393a3332515201013a3a323252520101"}
    assert {at: row[at : at + len(part) // 2].hex() for at, part in parts.items()} == parts
    assert hashlib.sha256(row).hexdigest() == "82937d673cab79c72604785abe2db0b0eccaedc1da43dfb1af1d4d9a25602cf8"


@together("dim", [2, 3, 7, 8, 15, 16, 45, 512])
@together("stored", [np.float32, BF16, ml_dtypes.float8_e4m3fn])
@on_every_isa
def test_rows_without_a_rotary_part(dim, stored):
    rows = np.random.default_rng(dim).standard_normal((5, dim)).astype(np.float32)
    cache = np.full((3, 4, dim), 7, stored)
    expected = cache.reshape(12, dim).copy()
    expected[[5, 11, 0, 2]] = rows[[0, 2, 3, 4]].astype(stored)
    for rope in (None, np.zeros((5, 0), np.float32)):
        cache[...] = 7
        write_latent(rows, rope, cache, None, [5, -1, 11, 0, 2])
        assert cache.reshape(12, dim).tobytes() == expected.tobytes()
    read = gather_latent(cache, None, [[2, 1]], [6])
    assert read.tolist() == expected[[8, 9, 10, 11, 4, 5]].astype(np.float32).tolist()


def test_rows_of_one_number_without_a_rotary_part_are_refused():
    cache = np.full((2, 2, 1), 7, np.float32)
    with pytest.raises(errors.ShapeError, match="1 latent and 0 rope numbers"):
        write_latent(np.ones((1, 1), np.float32), None, cache, None, [3])
    assert (cache == 7).all()


@together("format", ROW_BYTES)
@together("dtype", [np.float32, BF16, np.float16])
@on_every_isa
def test_packed_rows_equal_the_twin(format, dtype):
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((12, 576)) * 10.0 ** rng.integers(-5, 4, (12, 36)).repeat(16, 1)
    rows[3] = 0
    rows[4] = rng.integers(-24, 25, 576) / 4  # ties
    rows[4, ::16], rows[5] = 6, -0.0
    rows = np.clip(rows, -6e4, 6e4).astype(np.float32).astype(dtype)
    twin = getattr(reference, format)
    for row, got in zip(rows, stored(format, rows), strict=True):
        assert got.tobytes() == twin(row.astype(np.float32))


@together("format", ROW_BYTES)
@on_every_isa
def test_nan_and_infinity_are_read_back(format):
    """A NaN remains NaN, in "nvfp4_ds_mla" with the numbers that share its scale."""
    rows = np.random.default_rng(3).standard_normal((5, 576)).astype(np.float32)
    rows[0, 5], rows[1, 511], rows[2, [16, 31]], rows[3, 40], rows[4, 530] = np.nan, np.inf, -np.inf, np.nan, np.nan
    cache = stored(format, rows)
    for row, got in zip(rows[:4], cache, strict=False):
        assert got.tobytes() == getattr(reference, format)(row)
    group = 16 if format == "nvfp4_ds_mla" else 1
    expected = np.zeros((5, 576), bool)
    for row, column in ((0, 5), (3, 40)):
        expected[row, column // group * group :][:group] = True
    expected[4, 530] = True
    read = gather_latent(np.concatenate([cache[:1], cache])[:, None], None, [[1, 2, 3, 4, 5]], [5])
    assert (np.isnan(read) == expected).all()
    assert np.isinf(read).any() == (format == "fp8_ds_mla")


@on_every_isa
def test_e4m3_codes_are_those_of_the_twin():
    every = np.arange(0, 0x10000, dtype=np.uint16).view(BF16)
    every = np.concatenate([every, np.zeros(-len(every) % 576, BF16)]).reshape(-1, 576)
    cache = np.zeros((len(every), 1, 576), ml_dtypes.float8_e4m3fn)
    write_latent(every[:, :512], every[:, 512:], cache, None, np.arange(len(every)))
    codes = cache.reshape(-1)[:0x10000].view(np.uint8)
    finite = codes[np.isfinite(every.reshape(-1)[:0x10000].astype(np.float32))]
    assert hashlib.sha256(finite.tobytes()).hexdigest() == (
        "618af8c46c8396a777e752830636a8d18d6034207dce6eb9b7c8108230ed3f08"
    )
    some = np.array([0.1, -300, 463.9, 1000, -np.inf, np.nan, -np.nan, 2**-10, 1.5 * 2**-10], np.float32)
    wide = np.resize(some, (1, 576))
    one = np.zeros((1, 1, 576), ml_dtypes.float8_e4m3fn)
    write_latent(wide[:, :512], wide[:, 512:], one, None, [0], scale=1.0)
    assert one.view(np.uint8)[0, 0, :9].tolist() == [reference.e4m3(float(x)) for x in some]


def test_a_scale_that_is_no_power_of_two_is_read():
    row = stored("fp8_ds_mla", example()[None])
    row[:, 512:528] = np.array([0.017857144, 0.0088588167, 0.14285715, 0.001], np.float32).view(np.uint8)
    cache = np.concatenate([np.zeros_like(row), row])[:, None]
    got = gather_latent(cache, None, [[1]], [1])
    assert got[0].tolist() == reference.read_fp8_ds_mla(row[0].tobytes()).tolist()


def test_worked_example_variants_a10_only_named_slots_change():
    rows = np.arange(15, dtype=np.float32).reshape(3, 5) + 1
    cache = np.full((3, 4, 5), -1, np.float32)
    write_latent(rows[:, :3], rows[:, 3:], cache, None, [5, -1, 9])
    expected = np.full((3, 4, 5), -1, np.float32)
    expected[1, 1], expected[2, 1] = rows[0], rows[2]
    assert (cache == expected).all()
    value = cache[..., :3]
    assert (value.ctypes.data, value.strides) == (cache.ctypes.data, cache.strides)
    assert (value[1, 1] == rows[0, :3]).all()


def test_parts_in_planes_of_their_own():
    rows = np.arange(15, dtype=np.float32).reshape(3, 5) + 1
    latent, rope = np.zeros((3, 4, 3), np.float32), np.zeros((3, 4, 2), np.float32)
    write_latent(rows[:, :3], rows[:, 3:], latent, rope, [5, -1, 9])
    assert (latent.reshape(12, 3)[[5, 9]] == rows[[0, 2], :3]).all()
    assert (rope.reshape(12, 2)[[5, 9]] == rows[[0, 2], 3:]).all()
    assert np.count_nonzero(rope) == 4


@together("format", [*ROW_BYTES, "float8_e4m3fn"])
def test_the_later_of_two_tokens_with_one_slot_stays(format):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, 576)).astype(np.float32)
    slots = rng.integers(0, 300, 4000)
    shape = (300, 1, ROW_BYTES.get(format, 576))
    caches = [np.zeros(shape, np.uint8 if format in ROW_BYTES else ml_dtypes.float8_e4m3fn) for _ in range(2)]
    write_latent(rows[:, :512], rows[:, 512:], caches[0], None, slots)
    last = {int(slot): token for token, slot in enumerate(slots)}
    kept = rows[list(last.values())]
    write_latent(kept[:, :512], kept[:, 512:], caches[1], None, list(last))
    assert caches[0].tobytes() == caches[1].tobytes()


def test_worked_example_variants_a6_index_page_bytes():
    t, d = np.arange(64)[:, None], np.arange(128)[None]
    keys = ((((7 * d + 13 * t) % 101) - 50) / 25).astype(np.float32).astype(BF16)
    keys[3] = 0

    class Index:
        planes = (Plane("index_key", (128,), "float8_e4m3fn"), Plane("index_scale", (1,), "float32"))
        window = None

    pool = KVPool(Index(), 1, 2, 64, layout=KVLayout("LBCNHD"))
    planes = [pool.plane(name, 0) for name in ("index_key", "index_scale")]
    write_index(keys, *planes, np.arange(64, 128))
    codes, scales = planes[0].numpy()[1], planes[1].numpy()[1]
    assert planes[0].strides[0] == 8448
    assert [hex(int(scales[i].view(np.uint32)[0])) for i in (0, 3)] == ["0x3c000000", "0x34800000"]
    page = codes.tobytes() + scales.tobytes()
    assert page[:8].hex() == "f8f6f4f1eeeae2ca"
    assert hashlib.sha256(page).hexdigest() == "63e658c7c67a7ca64c4eaafa309b2af4cd01d91a24a2e3ebe895084b91c8f2cf"


@together(
    ("change", "error", "words"),
    [
        ({"slot_mapping": [99]}, errors.InvalidBlock, "slot_mapping[0] is 99"),
        ({"slot_mapping": [1, 2, 3]}, errors.ShapeError, "must not have more"),
        ({"rope": np.zeros((2, 60), np.float32)}, errors.ShapeError, "stores 512 and 64"),
        ({"rope_cache": np.zeros((2, 4, 64), np.uint8)}, errors.UnsupportedOption, "leave it out"),
        ({"rope_cache": np.zeros((2, 4, 0), np.float32)}, errors.ShapeError, "pass None without rope"),
        ({"format": "nvfp4_ds_mla"}, errors.UnsupportedOption, "leave format out"),
        ({"scale": 2.0}, errors.UnsupportedOption, "takes no factor"),
        (
            {"latent_cache": np.zeros((2, 4, 576), np.uint8)},
            errors.ShapeError,
            "view bytes that are float8 codes as float8_e4m3fn",
        ),
        ({"latent_cache": np.zeros((2, 4, 657), np.uint8)[:, :, 1:]}, errors.ShapeError, "multiples of 16"),
        ({"rope": np.zeros((3, 64), np.float32)}, errors.ShapeError, "tokens of latent"),
    ],
)
def test_refusals(change, error, words):
    cache = np.full((2, 4, 656), 7, np.uint8)
    arguments = {"latent": np.zeros((2, 512), np.float32), "rope": np.zeros((2, 64), np.float32)}
    arguments |= {"latent_cache": cache, "rope_cache": None, "slot_mapping": [0]}
    with pytest.raises(error) as raised:
        write_latent(**(arguments | change))
    assert words in str(raised.value)
    assert (cache == 7).all()


def test_a_read_only_cache_is_refused():
    cache = np.zeros((2, 4, 656), np.uint8)
    cache.flags.writeable = False
    with pytest.raises(errors.UnsupportedOption, match="read-only"):
        write_latent(np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32), cache, None, [0])


@together("dtype", ["float32", "float16", "bfloat16"])
@together("format", ROW_BYTES)
@on_every_isa
def test_quantize_and_dequantize_rows(format, dtype):
    rng = np.random.default_rng(2)
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": BF16}[dtype]
    x = np.full((3, 4, 600), np.nan, kind)[..., 12:588]
    x[...] = rng.standard_normal((3, 4, 576)) * 10.0 ** rng.integers(-3, 3, (3, 4, 1))
    codes, scales = quantize(x, format)
    assert (codes.shape, codes.dtype, scales) == ((3, 4, ROW_BYTES[format]), np.uint8, None)
    expected = [getattr(reference, format)(row.astype(np.float32)) for row in x.reshape(12, 576)]
    assert codes.tobytes() == b"".join(expected)
    spread = np.full((3, 4, 700), 7, np.uint8)[..., 3 : 3 + ROW_BYTES[format]]
    spread[...] = codes
    read = np.array([getattr(reference, f"read_{format}")(row) for row in expected]).reshape(3, 4, 576)
    got = dequantize(spread, format, dtype=dtype)
    assert got.dtype == kind
    assert (got == read.astype(np.float32).astype(kind)).all()


@together(
    ("call", "error", "words"),
    [
        (lambda: quantize(np.zeros((2, 512), np.float32), "fp8_ds_mla"), errors.ShapeError, "576"),
        (lambda: quantize(np.zeros((2, 576), np.float32), "fp8_ds_mla", 2.0), errors.UnsupportedOption, "scale out"),
        (lambda: quantize(np.zeros((2, 576), np.int8), "nvfp4_ds_mla"), errors.UnsupportedDtype, "int8"),
        (lambda: dequantize(np.zeros((2, 352), np.uint8), "fp8_ds_mla"), errors.ShapeError, "656"),
        (lambda: dequantize(np.zeros((2, 656), np.int8), "fp8_ds_mla"), errors.UnsupportedDtype, "uint8"),
        (
            lambda: dequantize(np.zeros((2, 656), np.uint8), "fp8_ds_mla", np.zeros((2, 4), np.float32)),
            errors.UnsupportedOption,
            "leave scales out",
        ),
    ],
)
def test_refusals_of_quantize(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)
