"""Given factors in device memory: one number for all heads of a layer, as vLLM has them, and one for each head."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagecore
from tests.cuda.memory import calls_of
from tests.ops.cases import Shape, make_case
from tests.ops.test_transfer_formats import PAIRS, sides

FACTORS = (0.375, -1.7)
FORM = pytest.mark.parametrize("form", [(), (1,)], ids=["no axis", "one axis"])
# Decode and prefill of the matrix kernels, codes of both, and the general kernels.
SHAPES = {
    "16 bits": Shape((150, 70, 33), (3, 70, 1), heads=(4, 2), dims=(64, 64), query_dtype="bfloat16", layout="NHD"),
    "float32": Shape((90, 20), (1, 20), heads=(4, 2), dims=(40, 40), query_dtype="float32", layout="HND"),
}


def number(cuda: Any, value: float, form: tuple[int, ...]) -> Any:
    return cuda.put(np.full(form, value, np.float32))


def attend(cuda: Any, shape: Shape, is_coded: bool, **scales: Any) -> list[Any]:
    case = make_case(shape, seed=3)
    query, key, value, table, lens = case.arrays
    if is_coded:
        key, value = (np.asarray(each, np.float32).astype(ml_dtypes.float8_e4m3fn) for each in (key, value))
    arguments = {name: cuda.put(each) if isinstance(each, np.ndarray) else each for name, each in case.options.items()}
    arrays = [cuda.put(each) for each in (query, key, value, table, lens)]
    found = pagecore.paged_attention(*arrays, return_lse=True, **arguments | scales)
    return [cuda.get(each) for each in found]


@FORM
@pytest.mark.parametrize("is_coded", [False, True], ids=["plain", "codes"])
@pytest.mark.parametrize("name", SHAPES)
def test_one_number_on_the_device_is_the_factor_of_all_heads(cuda, name, is_coded, form):
    names = ("key_scale", "value_scale")
    given = {each: number(cuda, factor, form) for each, factor in zip(names, FACTORS, strict=True)}
    for got, expected in zip(
        attend(cuda, SHAPES[name], is_coded, **given),
        attend(cuda, SHAPES[name], is_coded, **dict(zip(names, FACTORS, strict=True))),
        strict=True,
    ):
        assert np.isfinite(np.asarray(expected, np.float32)).all()
        assert got.tobytes() == expected.tobytes()


def test_one_factor_may_be_of_the_layer_and_the_other_of_heads(cuda):
    heads = np.array([0.5, 3.0], np.float32)
    got = attend(cuda, SHAPES["16 bits"], False, key_scale=number(cuda, 0.5, (1,)), value_scale=cuda.put(heads))
    expected = attend(cuda, SHAPES["16 bits"], False, key_scale=0.5, value_scale=heads)
    assert [each.tobytes() for each in got] == [each.tobytes() for each in expected]


@FORM
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_numbers_are_divided_by_one_number_on_the_device(cuda, dtype, layout, form):
    shape = (5, 4, 3, 16) if layout == "NHD" else (5, 3, 4, 16)
    rows = np.random.default_rng(0).standard_normal((6, 3, 16)).astype(np.float32)
    written = []
    for scales in (FACTORS, [number(cuda, each, form) for each in FACTORS]):
        made = [np.zeros(shape, getattr(ml_dtypes, dtype, dtype)) for _ in range(2)]
        put = [cuda.put(each if layout == "NHD" else each.swapaxes(1, 2)) for each in made]
        slots = cuda.put(np.array([4, 19, 7, -1, 8, 13]))
        pagecore.write_kv(cuda.put(rows), cuda.put(rows), *put, slots, key_scale=scales[0], value_scale=scales[1])
        written.append([np.ascontiguousarray(cuda.get(each)).tobytes() for each in put])
    assert written[0] == written[1]
    assert any(written[0][0])


def test_a_write_with_a_number_of_the_layer_moves_the_heads_of_a_token_together(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    rows, caches = cuda.put(np.ones((6, 3, 16), np.float32)), [cuda.empty((5, 4, 3, 16)) for _ in range(2)]
    scale, slots = number(cuda, 0.5, ()), cuda.put(np.arange(6))
    call = lambda: pagecore.write_kv(rows, rows, *caches, slots, key_scale=scale, value_scale=scale)  # noqa: E731
    assert calls_of(cuda, call) == {"launches": 1}


@FORM
def test_blocks_are_converted_with_one_number_on_the_device(cuda, form):
    source, target, expected = sides(("float8_e4m3fn", "float8_e4m3fn"), ("NHD", "NHD"), (0.5, 0.25))
    codes, to = cuda.put(source.codes), cuda.put(target.codes)
    scales = [number(cuda, each, form) for each in (0.5, 0.25)]
    pagecore.transfer_blocks(codes, to, PAIRS, source_scales=scales[0], target_scales=scales[1])
    assert np.ascontiguousarray(cuda.get(to)).tobytes() == np.ascontiguousarray(expected.codes).tobytes()


@FORM
def test_rows_are_quantised_with_one_number_on_the_device(cuda, form):
    rows = np.random.default_rng(1).standard_normal((7, 3, 32)).astype(np.float32)
    scale = number(cuda, 0.375, form)
    codes, _ = pagecore.quantize(cuda.put(rows), "float8_e4m3fn", scale=scale)
    expected, _ = pagecore.quantize(rows, "float8_e4m3fn", scale=0.375)
    assert cuda.get(codes).tobytes() == expected.tobytes()
    read = pagecore.dequantize(codes, "float8_e4m3fn", scale=scale)
    assert cuda.get(read).tobytes() == pagecore.dequantize(expected, "float8_e4m3fn", scale=0.375).tobytes()


def test_a_graph_reads_the_number_when_it_is_launched(cuda):
    case = make_case(Shape((20, 9), (1, 1), heads=(4, 2), dims=(64, 64), query_dtype="bfloat16", layout="NHD"), seed=3)
    query, key, value, table, lens = map(cuda.put, case.arrays)
    plan = pagecore.AttentionPlan(num_query_heads=4, num_kv_heads=2, device=cuda.device, max_sequences=2, max_tokens=2)
    pagecore.plan_attention(None, case.seq_lens, num_query_heads=4, num_kv_heads=2, out=plan)
    scale, out = number(cuda, 1.0, ()), cuda.empty(query.shape, "bfloat16")

    def work(stream: int) -> None:
        pagecore.paged_attention(query, key, value, table, lens, plan=plan, out=out, stream=stream, value_scale=scale)

    work(0)
    cuda.runtime.synchronize(0)
    once = cuda.get(out).astype(np.float32)
    replay = cuda.capture(work)
    two = np.full((), 2.0, np.float32)
    cuda.runtime.copy(scale.pointer, two.ctypes.data, 4, 0)
    cuda.runtime.synchronize(0)
    replay()
    np.testing.assert_array_equal(cuda.get(out).astype(np.float32), 2 * once)


@pytest.mark.parametrize("shape", [(1, 1), (3,), (0,)])
def test_other_shapes_of_factors_are_refused(cuda, shape):
    scale = cuda.put(np.ones(shape, np.float32))
    with pytest.raises(pagecore.ShapeError, match=r"key_scale has shape .* it must be \[2\]"):
        attend(cuda, SHAPES["16 bits"], False, key_scale=scale)
