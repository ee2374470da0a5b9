"""float8 queries and outputs of paged_attention on the host, against float64 over the dequantised query."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from pagecore import SealedBlocks
from pagecore.arrays import Tensor, as_tensor
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops import paged_attention, plan_attention
from tests.ops.cases import DTYPES, Case, Shape, assert_lse_close, assert_output_close, make_case, random_mask, snapshot
from tests.ops.float8_cases import (
    E4M3,
    E5M2,
    assert_rounded_once,
    dequantised,
    numbers_near_ties,
    with_float8_query,
)
from tests.ops.format_cases import make_format_case
from tests.ops.sealed_cases import make_sealed_case
from tests.reference import attention as reference

BF16 = DTYPES["bfloat16"]
HALF = {"query_dtype": "bfloat16", "cache_dtype": "bfloat16"}
MIXED = Shape((200, 77, 5, 0, 130), (33, 77, 1, 0, 2), (8, 2), padding=3, **HALF)
# Bounds of numbers before they are rounded to float8: outputs of these cases are below 3.
SLACK = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


def float8_case(shape: Shape = MIXED, dtype: np.dtype = E4M3, **options: object) -> Case:
    case = with_float8_query(make_case(shape, **options), dtype)
    if shape.padding:
        case.query[-shape.padding :] = np.nan
    return case


def poisoned_output(case: Case, dtype: np.dtype) -> np.ndarray:
    return np.full((*case.query.shape[:2], case.value_cache.shape[3]), np.nan, dtype)


@pytest.mark.parametrize("scale", [None, 0.25, np.float32(1.7), [0.5, 2.0], np.array([3.0], np.float32)])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32", "float16"])
def test_a_float8_query_gives_the_attention_of_its_numbers(scale, cache_dtype):
    case = float8_case(replace(MIXED, cache_dtype=cache_dtype))
    out = poisoned_output(case, BF16)
    result, lse = case.run(out=out, query_scale=scale, return_lse=True)
    assert result is out
    expected, expected_lse = dequantised(case, 1.0 if scale is None else scale).expect()
    assert_output_close(out, expected)
    assert_lse_close(lse, expected_lse, "bfloat16")


def test_a_new_output_of_a_float8_query_is_bfloat16_or_float16_over_float16():
    for cache_dtype in ("bfloat16", "float16", "float32"):
        case = float8_case(replace(MIXED, cache_dtype=cache_dtype))
        out = case.run(query_scale=0.5)
        assert out.dtype == (np.float16 if cache_dtype == "float16" else BF16)
        assert_output_close(out, dequantised(case, 0.5).expect()[0])
    half = float8_case(replace(MIXED, cache_dtype="float16"))
    assert replace(half, value_cache=half.value_cache.astype(np.float32)).run().dtype == BF16


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", list(DTYPES))
def test_the_output_of_a_float8_query_has_any_dtype(dtype, out_dtype):
    case = float8_case(replace(MIXED, cache_dtype=out_dtype), dtype, key_scale=[0.5, 2.0])
    out = poisoned_output(case, DTYPES[out_dtype])
    case.run(out=out, query_scale=[2.0, 0.25])
    assert_output_close(out, dequantised(case, [2.0, 0.25]).expect()[0])


def test_every_code_of_a_query_is_converted():
    """One key, whose product with a query picks one number of it: the lse is that number."""
    for dtype in (E4M3, E5M2):
        codes = np.arange(256, dtype=np.uint8).view(dtype)
        query = np.zeros((256, 1, 8), dtype)
        query[:, 0, 5] = codes
        cache = np.zeros((2, 1, 1, 8), np.float32)
        cache[1, 0, 0, 5] = 1.0
        out = np.empty((256, 1, 8), np.float32)
        table = np.ones((256, 1), np.int32)
        _, lse = paged_attention(query, cache, cache, table, [1] * 256, scale=1.0, out=out, return_lse=True)
        want = codes.astype(np.float32)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(lse[finite, 0], want[finite])
        assert np.isnan(lse[np.isnan(want), 0]).all()


@pytest.mark.parametrize("query_dtype", [*DTYPES, "float8_e4m3fn"])
@pytest.mark.parametrize("scale", [None, 0.02, np.array([0.5], np.float32)])
def test_an_output_in_float8_is_rounded_once(query_dtype, scale):
    shape = replace(MIXED, query_dtype="bfloat16" if query_dtype.startswith("float8") else query_dtype)
    case = make_case(replace(shape, cache_dtype=shape.query_dtype))
    case = with_float8_query(case) if query_dtype.startswith("float8") else case
    out = poisoned_output(case, E4M3)
    assert case.run(out=out, output_scale=scale) is out
    expected = dequantised(case).expect()[0]
    assert_rounded_once(out, expected, 1.0 if scale is None else float(np.reshape(scale, ())), SLACK[shape.query_dtype])
    if scale is not None:
        fresh = case.run(output_scale=scale)
        np.testing.assert_array_equal(fresh.view(np.uint8), out.view(np.uint8))


def single_value(values: np.ndarray, dtype: np.dtype = DTYPES["float32"], **more: object) -> np.ndarray:
    """Return the output of calls whose only key has these values, one sequence for each row."""
    cache = np.concatenate([np.zeros_like(values[:1]), values]).astype(dtype)[:, None, None]
    query = np.zeros((len(values), 1, values.shape[1]), dtype)
    table = np.arange(1, len(values) + 1, dtype=np.int32)[:, None]
    return paged_attention(query, np.zeros_like(cache), cache, table, [1] * len(values), **more)[:, 0]


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-100, 2.0**40])
def test_ties_go_to_even_and_large_numbers_saturate(scale):
    numbers = numbers_near_ties()
    numbers = np.pad(numbers, (0, -len(numbers) % 16)).reshape(-1, 16)
    got = single_value(numbers * np.float32(scale), output_scale=scale).astype(np.float32)
    want = np.clip(numbers, -448, 448).astype(E4M3).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_a_row_without_keys_and_padding_are_zero():
    case = float8_case()
    out = poisoned_output(case, E4M3)
    case.run(out=out, output_scale=1e-3)
    assert (out[-3:].view(np.uint8) == 0).all()
    alone = make_case(Shape((0, 3), heads=(2, 1)))
    assert (alone.run(output_scale=0.1)[0].view(np.uint8) == 0).all()


@pytest.mark.parametrize("kind", ["plan", "invariant", "blocks", "indices", "tree", "options"])
def test_every_kind_of_call(kind):
    options: dict[str, object] = {}
    shape = Shape((150, 90, 40), heads=(4, 2), **HALF)
    more: dict[str, object] = {}
    if kind == "options":
        shape = MIXED
        options = {"window": 50, "sinks": np.linspace(-2, 3, 8, dtype=np.float32), "softcap": 20.0}
        options |= {"mask": random_mask(MIXED), "value_scale": [0.7, 1.3]}
    case = float8_case(shape, **options)
    expected = dequantised(case, [0.5, 2.0])
    if kind in ("plan", "invariant"):
        more["plan"] = plan_attention(
            None, case.seq_lens, num_query_heads=4, num_kv_heads=2, batch_invariant=kind == "invariant"
        )
    elif kind == "blocks":
        more["blocks"] = np.tile(np.array([0, 2], np.int32), (3, 2, 1))
    elif kind == "indices":
        more["indices"] = np.tile(np.arange(0, 40, 3, dtype=np.int32), (3, 2, 1))
    elif kind == "tree":
        more["tree_mask"] = np.ones((3, 1), np.uint64)
    wanted = replace(expected, query=expected.query.astype(np.float32)).run(
        **more, out=np.empty((*case.query.shape[:2], 64), np.float32)
    )
    out = poisoned_output(case, E4M3)
    case.run(**more, out=out, query_scale=[0.5, 2.0], output_scale=0.01)
    assert_rounded_once(out, wanted.astype(np.float64), 0.01, SLACK["bfloat16"])


def test_sealed_blocks_and_quantised_caches():
    sealed = make_sealed_case(Shape((150, 90), (4, 1), heads=(4, 2), **HALF))
    plain = with_float8_query(sealed.plain)
    arrays = (dequantised(plain, 0.5).query, sealed.key_numbers, sealed.value_numbers, *plain.arrays[3:])
    expected = reference.paged_attention(*arrays, **plain.options)[0]
    more = {"sealed": SealedBlocks(*sealed.sealed), "query_scale": 0.5}
    assert_output_close(plain.run(**more), expected)
    assert_rounded_once(plain.run(**more, output_scale=0.1), expected, 0.1, SLACK["bfloat16"])
    for name in ("float8_e4m3fn", "float8_token", "nvfp4"):
        stored = make_format_case(name, shape=Shape((150, 90), (4, 1), heads=(4, 2), query_dtype="bfloat16"))
        query = stored.plain.query.astype(np.float32).astype(E4M3)
        scales = {"key_scale": stored.key.scale, "value_scale": stored.value.scale}
        scales |= {"key_global_scale": stored.key.global_scale, "value_global_scale": stored.value.global_scale}
        arrays = (stored.key.codes, stored.value.codes, *stored.plain.arrays[3:])
        factors = np.array([0.5, 2.0]).repeat(2)
        numbers = (query.astype(np.float64) * factors[:, None], stored.key.numbers, stored.value.numbers)
        expected = reference.paged_attention(*numbers, *stored.plain.arrays[3:], **stored.plain.options)[0]
        out = paged_attention(query, *arrays, **stored.plain.options, **scales, query_scale=[0.5, 2.0])
        assert_output_close(out, expected)


def test_strided_queries_and_outputs():
    case = float8_case()
    expected = case.run(query_scale=0.5, output_scale=0.1)
    wide = np.zeros((len(case.query), 11, 130), E4M3)
    wide[:, 1:9, 3:67] = case.query
    out = np.full((len(case.query), 9, 80), np.nan, E4M3)
    before = out.copy()
    replace(case, query=wide[:, 1:9, 3:67]).run(query_scale=0.5, output_scale=0.1, out=out[:, 1:, 5:69])
    np.testing.assert_array_equal(out[:, 1:, 5:69].view(np.uint8), expected.view(np.uint8))
    before[:, 1:, 5:69] = out[:, 1:, 5:69]
    np.testing.assert_array_equal(out.view(np.uint8), before.view(np.uint8))


def test_the_output_may_be_the_float8_query_itself():
    case = float8_case()
    expected = case.run(query_scale=0.5, output_scale=0.1)
    query = case.query.copy()
    out = replace(case, query=query).run(query_scale=0.5, output_scale=0.1, out=query)
    assert out is query
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


REFUSED = [
    ({"query_scale": 0.0}, UnsupportedOption, "query_scale holds 0.0; .*1.18e-38 or more"),
    ({"query_scale": -1.0}, UnsupportedOption, "query_scale holds -1.0"),
    ({"query_scale": np.array([-1.0])}, UnsupportedOption, "query_scale holds -1.0"),
    ({"query_scale": np.array(-1.0)}, UnsupportedOption, "query_scale holds -1.0"),
    ({"query_scale": np.float32(-1)}, UnsupportedOption, "query_scale holds -1.0"),
    ({"query_scale": np.array([1, -2])}, UnsupportedOption, "query_scale holds -2.0"),
    ({"query_scale": np.array([1.0, -2.0])}, UnsupportedOption, "query_scale holds -2.0"),
    ({"query_scale": np.array([1.0, 0.0], np.float32)}, UnsupportedOption, "query_scale holds 0.0"),
    ({"query_scale": np.array([[1.0]])}, ShapeError, "query_scale has shape"),
    ({"query_scale": np.array([True])}, UnsupportedDtype, "query_scale must be numbers"),
    ({"query_scale": float("nan")}, UnsupportedOption, "query_scale is nan"),
    ({"query_scale": np.array([np.nan, 1.0])}, UnsupportedOption, "query_scale holds nan"),
    ({"query_scale": [1.0, float("inf")]}, UnsupportedOption, "query_scale holds inf"),
    ({"query_scale": [1.0, 2.0, 3.0]}, ShapeError, r"query_scale has shape \(3,\); it must be \[2\]"),
    ({"query_scale": True}, UnsupportedOption, "query_scale is True"),
    ({"query_scale": "1"}, UnsupportedDtype, "query_scale must be numbers"),
    ({"output_scale": 0.0}, UnsupportedOption, "output_scale holds 0.0"),
    ({"query_scale": 1e20, "scale": 1e20}, UnsupportedOption, "scale times query_scale is .*; it must be finite"),
    ({"query_scale": [1e20, 1e20], "scale": -1e20}, UnsupportedOption, "scale times query_scale is -"),
    (
        {"query_scale": [1.0, 1e20], "key_scale": [1.0, 1e20]},
        UnsupportedOption,
        "the product of scale, query_scale and key_scale is inf for head 1; it must be finite as a float32",
    ),
    ({"query_scale": [1e20, 1.0], "key_scale": -1e20}, UnsupportedOption, "key_scale is -inf for head 0"),
    ({"query_scale": [1e20, 1e20], "key_scale": [1.0, 1e20]}, UnsupportedOption, "key_scale is 1.*e.39 for head 1"),
    ({"query_scale": 1e20, "key_scale": 1e20}, UnsupportedOption, "key_scale is 1.*e.39 for head 0"),
    ({"scale": 1e20, "key_scale": -1e20}, UnsupportedOption, "key_scale is -1.*e.40 for head 0"),
    ({"output_scale": float("nan")}, UnsupportedOption, "output_scale is nan"),
    ({"output_scale": 1e-40}, UnsupportedOption, "output_scale holds .*e-41; .*1.18e-38 or more"),
    ({"output_scale": np.array([1e-40])}, UnsupportedOption, "output_scale holds .*e-41"),
    ({"output_scale": np.float64(-2)}, UnsupportedOption, "output_scale holds -2.0"),
    ({"output_scale": 1e39}, UnsupportedOption, "output_scale is 1e.39; it must be finite"),
    ({"output_scale": [1.0, 2.0]}, ShapeError, r"output_scale has shape \(2,\); it must be \[1\]"),
    ({"output_scale": 1.0, "out": "bfloat16"}, UnsupportedOption, "output_scale is given and out is bfloat16"),
    ({"out": "float8_e5m2"}, UnsupportedDtype, "out is float8_e5m2; it must be bfloat16"),
    ({"out": "int8"}, UnsupportedDtype, "out is int8"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_is_refused_writes_nothing(options, error, message):
    case = float8_case()
    out = options.get("out")
    dtype = E5M2 if out == "float8_e5m2" else np.int8 if out == "int8" else BF16 if out else E4M3
    array = np.zeros((*case.query.shape[:2], 64), dtype)
    unchanged = snapshot(array)
    with pytest.raises(error, match=message):
        case.run(**{**options, "out": array})
    assert unchanged()


def test_only_a_float8_query_has_a_scale():
    with pytest.raises(UnsupportedOption, match=r"query_scale is given and query is bfloat16; .*multiply scale by it"):
        make_case(MIXED).run(query_scale=1.0)


def test_an_output_that_shares_memory_with_the_query_in_another_dtype_is_refused():
    case = make_case(MIXED)
    out = case.query.view(E4M3)[..., :64]
    with pytest.raises(UnsupportedOption, match="out shares memory with query"):
        case.run(out=out)


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "float8_e5m2fnuz", "float64", "uint8", "int64"])
def test_a_refused_query_lists_the_dtypes_of_queries(dtype):
    numbers = np.zeros((2, 4, 64), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    cache = np.zeros((2, 16, 2, 64), BF16)
    with pytest.raises(UnsupportedDtype, match=rf"query is {dtype}; float32, .*float8_e4m3fn and float8_e5m2 are"):
        paged_attention(numbers, cache, cache, [[1], [1]], [3, 4])


class Producer:
    """An array of another library that has DLPack and nothing else, or a dtype that raises."""

    def __init__(self, array: Tensor, raises: bool = False) -> None:
        self._array, self._raises = array, raises

    @property
    def dtype(self) -> object:
        raise RuntimeError("the array was deleted") if self._raises else AttributeError("dtype")

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("raises", [False, True])
def test_a_float8_query_of_a_dlpack_producer(raises):
    case = float8_case()
    expected = case.run(query_scale=0.5)
    got = replace(case, query=Producer(as_tensor(case.query), raises)).run(query_scale=0.5, out=np.empty_like(expected))
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))
