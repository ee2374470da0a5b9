"""float8 queries and outputs of paged_attention on a CUDA device, against float64 over the dequantised query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore import SealedBlocks
from pagecore.arrays.tensors import results
from pagecore.errors import DeviceError, UnsupportedOption
from pagecore.ops import AttentionPlan, paged_attention, plan_attention
from pagecore.ops.attention import _attention
from tests.cuda.attention_cases import BF16, DeviceCase
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.ops.cases import DTYPES, Case, Shape, assert_lse_close, assert_output_close, make_case
from tests.ops.float8_cases import E4M3, E5M2, assert_rounded_once, dequantised, numbers_near_ties, with_float8_query
from tests.ops.format_cases import make_format_case
from tests.ops.sealed_cases import make_sealed_case
from tests.reference import attention as reference

DECODE = Shape((200, 77, 5, 0, 130), heads=(8, 2), **BF16)
PROMPTS = Shape((200, 77, 5, 0, 130), (33, 77, 1, 0, 2), (8, 2), padding=3, **BF16)
SCALES = np.array([0.5, 2.0], np.float32)
SLACK = 2e-2


def float8_case(shape: Shape, dtype: np.dtype[Any] = E4M3, **options: Any) -> Case:
    case = with_float8_query(make_case(shape, **options), dtype)
    if shape.padding:
        case.query[-shape.padding :] = np.nan
    return case


def run(cuda: Kit, case: Case, out_dtype: str, **more: Any) -> tuple[Any, Any]:
    """Call paged_attention into a poisoned output of a dtype; return output and lse on the host."""
    there = DeviceCase(cuda, case)
    for name, value in more.items():
        if isinstance(value, np.ndarray):
            more[name] = cuda.put(value)
    return there.run(out=cuda.empty(there.shape, out_dtype), **more)


@pytest.mark.parametrize(
    ("shape", "scale"),
    cases(
        [(DECODE, 0.25), (PROMPTS, SCALES), (replace(PROMPTS, dims=(80, 80)), np.array([3.0], np.float32))],
        [(shape, scale) for shape in (DECODE, PROMPTS) for scale in (0.25, SCALES, np.array([3.0], np.float32))]
        + [(replace(PROMPTS, dims=dims), SCALES) for dims in ((80, 80), (192, 128), (50, 30))],
    ),
)
def test_a_float8_query_and_output(cuda, shape, scale):
    case = float8_case(shape)
    expected, expected_lse = dequantised(case, scale).expect()
    out, lse = run(cuda, case, "bfloat16", query_scale=scale)
    assert_output_close(out, expected)
    assert_lse_close(lse, expected_lse, "bfloat16")
    for output_scale in (0.02, np.array([0.5], np.float32)):
        out, lse = run(cuda, case, "float8_e4m3fn", query_scale=scale, output_scale=output_scale)
        assert_rounded_once(out, expected, float(np.reshape(output_scale, ())), SLACK)
        assert_lse_close(lse, expected_lse, "bfloat16")
    assert shape.padding == 0 or (out[-shape.padding :].view(np.uint8) == 0).all()


@pytest.mark.parametrize("query_dtype", list(DTYPES))
def test_a_float8_output_of_other_queries(cuda, query_dtype):
    for shape in (DECODE, PROMPTS):
        case = make_case(replace(shape, query_dtype=query_dtype, cache_dtype=query_dtype), value_scale=SCALES)
        out, _ = run(cuda, case, "float8_e4m3fn", output_scale=0.1)
        slack = {"float32": 1e-5, "float16": SLACK, "bfloat16": 2 * SLACK}[query_dtype]
        assert_rounded_once(out, case.expect()[0], 0.1, slack)


def test_float8_e5m2_queries_and_other_outputs(cuda):
    for out_dtype in DTYPES:
        case = float8_case(replace(PROMPTS, cache_dtype=out_dtype), E5M2)
        out, _ = run(cuda, case, out_dtype, query_scale=SCALES)
        assert_output_close(out, dequantised(case, SCALES).expect()[0])


@pytest.mark.parametrize("invariant", [False, True])
def test_split_and_folded_rows(cuda, invariant):
    """Joined parts of decode, of prompts and of float32 rows; pieces of a batch-invariant call."""
    for shape in (
        Shape((1100, 40), heads=(4, 2), **BF16),
        Shape((1100, 40), (20, 3), heads=(4, 2), **BF16),
        Shape((1100, 40), (20, 3), heads=(4, 2), dims=(36, 20), **BF16),
    ):
        case = float8_case(shape)
        there = DeviceCase(cuda, case)
        plan = there.plan(batch_invariant=invariant, num_workers=None if invariant else 8)
        out, _ = run(cuda, case, "float8_e4m3fn", query_scale=SCALES, output_scale=0.01, plan=plan)
        assert_rounded_once(out, dequantised(case, SCALES).expect()[0], 0.01, SLACK)


def test_ties_and_saturation_of_outputs(cuda):
    """A sequence with one key, whose value is the output."""
    numbers = numbers_near_ties()
    for dtype in (np.dtype(np.float32), DTYPES["bfloat16"]):
        values = np.pad(numbers, (0, -len(numbers) % 64)).reshape(-1, 64).astype(dtype)
        cache = np.concatenate([np.zeros_like(values[:1]), values])[:, None, None]
        table = np.arange(1, len(cache), dtype=np.int32)[:, None]
        query = np.zeros((len(values), 1, 64), dtype)
        arrays = map(cuda.put, (query, np.zeros_like(cache), cache, table, np.ones(len(values), np.int32)))
        out = cuda.empty((len(values), 1, 64), "float8_e4m3fn")
        paged_attention(*arrays, out=out)
        want = np.clip(values.astype(np.float32), -448, 448).astype(E4M3).astype(np.float32)
        np.testing.assert_array_equal(cuda.get(out)[:, 0].astype(np.float32), want)


def test_selected_blocks_and_tokens(cuda):
    case = float8_case(Shape((150, 90, 40), heads=(4, 2), **BF16))
    for name, listed, unit in (("blocks", [0, 2], 16), ("indices", range(0, 40, 3), 1)):
        lists = np.tile(np.array(listed, np.int32), (3, 2, 1))
        masks = []
        for length in case.seq_lens:
            mask = np.zeros((1, length), bool)
            for entry in listed:
                mask[:, entry * unit : entry * unit + unit] = True
            masks.append(mask.reshape(-1))
        expected = replace(dequantised(case, 0.5), options={"mask": np.concatenate(masks)}).expect()[0]
        out, _ = run(cuda, case, "float8_e4m3fn", query_scale=0.5, output_scale=0.01, **{name: lists})
        assert_rounded_once(out, expected, 0.01, SLACK)


@pytest.mark.parametrize("queries", [(1, 1), (30, 2)])
def test_sealed_blocks(cuda, queries):
    sealed = make_sealed_case(Shape((150, 90), queries, heads=(4, 2), **BF16), (4, 2), (16, 16))
    case = with_float8_query(sealed.plain)
    arrays = (dequantised(case, SCALES).query, sealed.key_numbers, sealed.value_numbers, *case.arrays[3:])
    expected = reference.paged_attention(*arrays, **case.options)[0]
    planes = SealedBlocks(*map(cuda.put, sealed.sealed))
    out, _ = run(cuda, case, "float8_e4m3fn", query_scale=SCALES, output_scale=0.02, sealed=planes)
    assert_rounded_once(out, expected, 0.02, SLACK)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_token", "mxfp8"])
def test_quantised_caches(cuda, name):
    for queries in ((1, 1), (30, 2)):
        stored = make_format_case(name, shape=Shape((150, 90), queries, heads=(4, 2), query_dtype="bfloat16"))
        query = stored.plain.query.astype(np.float32).astype(E4M3)
        factors = SCALES.astype(np.float64).repeat(2)[:, None]
        numbers = (query.astype(np.float64) * factors, stored.key.numbers, stored.value.numbers)
        expected = reference.paged_attention(*numbers, *stored.plain.arrays[3:], **stored.plain.options)[0]
        case = Case(query, stored.key.codes, stored.value.codes, *stored.plain.arrays[3:], stored.plain.options)
        scales = {"key_scale": stored.key.scale, "value_scale": stored.value.scale}
        out = cuda.empty((*query.shape[:2], stored.value.numbers.shape[3]), "float8_e4m3fn")
        more = {name: cuda.put(value) if isinstance(value, np.ndarray) else value for name, value in scales.items()}
        there = DeviceCase(cuda, case)
        got, _ = there.run(out=out, query_scale=cuda.put(SCALES), output_scale=0.02, **more)
        assert_rounded_once(got, expected, 0.02, SLACK)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_token", "mxfp8"])
def test_prompts_of_halves_over_quantised_caches(cuda, name):
    stored = make_format_case(name, shape=Shape((150, 90), (30, 2), heads=(4, 2), query_dtype="float16"))
    plain = stored.plain
    expected = reference.paged_attention(
        plain.query, stored.key.numbers, stored.value.numbers, *plain.arrays[3:], **plain.options
    )[0]
    case = Case(plain.query, stored.key.codes, stored.value.codes, *plain.arrays[3:], plain.options)
    scales = {"key_scale": stored.key.scale, "value_scale": stored.value.scale}
    more = {name: cuda.put(value) if isinstance(value, np.ndarray) else value for name, value in scales.items()}
    out = cuda.empty((*plain.query.shape[:2], stored.value.numbers.shape[3]), "float8_e4m3fn")
    got, _ = DeviceCase(cuda, case).run(out=out, output_scale=0.02, **more)
    assert_rounded_once(got, expected, 0.02, SLACK)


def test_prompts_of_halves_over_sealed_blocks(cuda):
    shape = Shape((150, 90), (30, 2), heads=(4, 2), query_dtype="float16", cache_dtype="float16")
    sealed = make_sealed_case(shape, (4, 2), (16, 16))
    case = sealed.plain
    arrays = (case.query, sealed.key_numbers, sealed.value_numbers, *case.arrays[3:])
    expected = reference.paged_attention(*arrays, **case.options)[0]
    planes = SealedBlocks(*map(cuda.put, sealed.sealed))
    out, _ = run(cuda, case, "float8_e4m3fn", output_scale=0.02, sealed=planes)
    assert_rounded_once(out, expected, 0.02, SLACK)


def test_one_scale_in_device_memory_serves_all_heads(cuda):
    case = float8_case(PROMPTS)
    expected, _ = run(cuda, case, "float8_e4m3fn", query_scale=0.5, output_scale=0.25)
    one = np.array([0.5], np.float32)
    out, _ = run(cuda, case, "float8_e4m3fn", query_scale=one, output_scale=one / 2)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


def test_numbers_of_heads_whose_product_overflows_are_refused_if_the_host_has_them(cuda):
    case, large = float8_case(DECODE), [1.0, 1e20]
    launched = len(cuda.runtime.launched) if cuda.is_emulated else 0
    with pytest.raises(UnsupportedOption, match="query_scale and key_scale is inf for head 1"):
        run(cuda, case, "bfloat16", query_scale=large, key_scale=large)
    assert not cuda.is_emulated or len(cuda.runtime.launched) == launched
    run(cuda, case, "bfloat16", query_scale=np.array(large, np.float32), key_scale=large)


def test_a_captured_call_with_a_float8_query_is_refused(cuda):
    case = float8_case(DECODE)
    there = DeviceCase(cuda, case)
    out, plan = cuda.empty(there.shape, "bfloat16"), there.plan()
    with pytest.raises(DeviceError, match="frees its converted rows"):
        cuda.capture(lambda stream: paged_attention(**there.arrays, out=out, plan=plan, stream=stream))


def fixed_plan(cuda: Kit, case: Case) -> AttentionPlan:
    heads = {"num_query_heads": case.query.shape[1], "num_kv_heads": case.key_cache.shape[2]}
    sizes = {"max_sequences": len(case.seq_lens), "max_tokens": len(case.query)}
    plan = AttentionPlan(**heads, device=cuda.device, **sizes)
    return plan_attention(None, case.seq_lens, **heads, out=plan)


def test_one_host_number_in_an_array_is_captured(cuda):
    """An array of one number on the host is read, not copied to the device."""
    case = make_case(DECODE)
    there, plan = DeviceCase(cuda, case), fixed_plan(cuda, case)
    expected, _ = run(cuda, case, "float8_e4m3fn", output_scale=0.25, plan=plan)
    out, number = cuda.empty(there.shape, "float8_e4m3fn"), np.array([0.25])

    def step(stream: int) -> None:
        paged_attention(**there.arrays, out=out, output_scale=number, plan=plan, stream=stream)

    cuda.capture(step)()
    np.testing.assert_array_equal(cuda.get(out).view(np.uint8), expected.view(np.uint8))


def test_a_float8_query_of_torch_is_captured(cuda, monkeypatch):
    """The framework keeps the converted rows for the graph, as torch does; replays convert the query of each time."""
    kept: dict[Any, Any] = {}
    allocate = results.new_result

    def keep(shape: Any, dtype: Any, *more: Any) -> Any:
        if (shape, dtype) not in kept:
            kept[shape, dtype] = allocate(shape, dtype, *more)
        return kept[shape, dtype]

    case = float8_case(DECODE)
    scale = np.array([0.5, 0.5])
    there, plan = DeviceCase(cuda, case), fixed_plan(cuda, case)
    expected, _ = run(cuda, case, "bfloat16", query_scale=0.5, plan=plan)
    first = cuda.put(np.zeros_like(case.query))
    arrays = there.arrays | {"query": first}
    out = cuda.empty(there.shape, "bfloat16")
    monkeypatch.setattr(results, "new_result", keep)
    monkeypatch.setattr(_attention, "lasts_for_graphs", lambda example: True)

    def step(stream: int) -> None:
        paged_attention(**arrays, out=out, query_scale=scale, plan=plan, stream=stream)

    step(0)
    replay = cuda.capture(step)
    replay()
    assert not np.array_equal(cuda.get(out), expected)
    cuda.runtime.copy(first.pointer, case.query.ctypes.data, case.query.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    np.testing.assert_array_equal(cuda.get(out).view(np.uint16), expected.view(np.uint16))


def test_a_new_output_over_float16_caches_is_float16(cuda):
    """So that query, keys and values have one dtype of 16 bits, and matrix kernels serve them."""
    case = float8_case(replace(PROMPTS, cache_dtype="float16"))
    arrays = DeviceCase(cuda, case).arrays
    out = cuda.get(paged_attention(**arrays, query_scale=0.5))
    assert out.dtype == np.float16
    assert_output_close(out, dequantised(case, 0.5).expect()[0])
