"""paged_attention with blocks= and indices= on a CUDA device, against float64 over the selected keys.

Keys and values that a head has not selected are NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors
from pagecore.ops import paged_attention, plan_attention
from tests.cuda.attention_cases import BF16, F16, SINKS, SLOPES, DeviceCase
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.ops.cases import Case, Shape, assert_lse_close, assert_output_close, make_case, random_mask
from tests.ops.format_cases import make_format_case
from tests.ops.selections import expect, poison, random_selection
from tests.reference import attention as reference
from tests.reference import sparse

DECODE = Shape((300, 33, 1, 0, 130), heads=(8, 2), dims=(64, 64))
PROMPTS = Shape((200, 33, 1, 16, 40), (30, 1, 1, 16, 0), heads=(8, 2), dims=(64, 64))
LENS = {"decode": DECODE, "prompts": PROMPTS}
NAMES = {True: ("blocks", "block_counts"), False: ("indices", "index_counts")}
WAYS = ["host", "device", "plan"]


def run_case(cuda: Kit, case: Case, selected: dict[str, Any], way: str, **more: Any) -> tuple[Any, Any]:
    """Run with lengths on the host or on the device, or with a plan of all keys."""
    on_host = ("seq_lens", "cu_query_lens") if way == "host" else ()
    there = DeviceCase(cuda, case, on_host)
    if way == "plan":
        more["plan"] = there.plan(**more.pop("planned", {}))
    lists = selected if way == "host" else {name: cuda.put(array) for name, array in selected.items()}
    return there.run(**lists, **more)


def check(
    cuda: Kit, shape: Shape, *, by_block: bool = True, counted: bool = True, way: str = "device",
    planned: dict[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    case = make_case(shape, **options)
    unit = shape.block_size if by_block else 1
    lists, counts = random_selection(case, unit)
    poison(case, lists, counts, unit)
    names = NAMES[by_block]
    selected = {names[0]: lists, **({names[1]: counts} if counted else {})}
    out, lse = run_case(cuda, case, selected, way, **({"planned": planned} if planned else {}))
    expected = expect(case, lists, counts, unit)
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], str(case.query.dtype))


DTYPES = [BF16, F16, {}]


@pytest.mark.parametrize(
    ("by_block", "way"),
    cases([(True, "host"), (False, "device"), (True, "plan")], [(unit, way) for unit in (True, False) for way in WAYS]),
)
@pytest.mark.parametrize("lens", LENS)
def test_each_head_attends_to_what_it_selects(cuda, lens, by_block, way):
    check(cuda, replace(LENS[lens], **BF16), by_block=by_block, way=way)


@pytest.mark.parametrize("dtypes", cases(DTYPES[1:], DTYPES), ids=str)
@pytest.mark.parametrize("dim", cases([40, 128, 256], [8, 40, 64, 96, 100, 128, 192, 256, 512]))
def test_every_dim_and_dtype(cuda, dtypes, dim):
    check(cuda, replace(DECODE, dims=(dim, dim), **dtypes))
    check(cuda, replace(PROMPTS, dims=(dim, dim), seq_lens=(90, 33), query_lens=(7, 1), **dtypes), by_block=False)


def test_keys_and_values_of_unequal_dims(cuda):
    check(cuda, replace(DECODE, dims=(192, 128), **BF16))
    check(cuda, replace(DECODE, dims=(64, 24), **BF16), by_block=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 50},
    "not causal": {"causal": False},
    "both sides": {"causal": False, "window": (20, 9)},
    "negative scale": {"scale": -0.3, "window": 7},
    "sinks": {"sinks": SINKS},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": SLOPES, "window": 100},
    "factors": {"key_scale": -2.0, "value_scale": 0.7},
}


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_use_the_positions_of_the_keys(cuda, name, lens):
    for by_block in cases([lens == "decode"], [True, False]):
        check(cuda, replace(LENS[lens], **BF16), by_block=by_block, **OPTIONS[name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lens", LENS)
def test_masks_use_the_positions_of_the_keys(cuda, lens, way):
    shape = replace(LENS[lens], **BF16)
    check(cuda, shape, mask=random_mask(shape), window=100, way=way)


@pytest.mark.parametrize("block_size", cases([1, 5, 100], [1, 5, 16, 64, 100]))
@pytest.mark.parametrize("counted", [True, False])
def test_every_block_size(cuda, block_size, counted):
    for shape in (DECODE, PROMPTS):
        check(cuda, replace(shape, block_size=block_size, **BF16), counted=counted)


def test_rows_layouts_and_wide_indices(cuda):
    for layout in cases(["HND"], ["NHD", "HND"]):
        check(cuda, replace(PROMPTS, layout=layout, index_dtype="int64", shuffle_rows=True, **BF16))


@pytest.mark.parametrize("heads", [(4, 4), (16, 1), (20, 1), (40, 2)], ids=str)
def test_every_number_of_heads(cuda, heads):
    check(cuda, replace(DECODE, heads=heads, **BF16))


@pytest.mark.parametrize("way", WAYS)
def test_long_selections_are_split(cuda, way):
    check(cuda, Shape((3000, 40), heads=(4, 1), dims=(64, 64), **BF16), way=way)
    check(cuda, Shape((3000, 40), heads=(4, 1), dims=(40, 40)), way=way, by_block=False)


@pytest.mark.slow
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(cuda):
    shape = Shape((2500, 40, 130), (3, 1, 20), heads=(4, 2), dims=(64, 64), **BF16)
    case = make_case(shape)
    lists, counts = random_selection(case, shape.block_size)
    selected = {"blocks": lists, "block_counts": counts}
    out, _ = run_case(cuda, case, selected, "plan", planned={"batch_invariant": True})
    expected = expect(case, lists, counts, shape.block_size)
    assert_output_close(out, expected[0])
    there = DeviceCase(cuda, case)
    plan = plan_attention([0, 3], [2500], num_query_heads=4, num_kv_heads=2, device=cuda.device, batch_invariant=True)
    alone = {name: cuda.put(array[:1]) for name, array in selected.items()}
    single = {"seq_lens": cuda.put(np.array([2500], np.int32)), "cu_query_lens": cuda.put(np.array([0, 3], np.int32))}
    arrays = (
        there.arrays | single | {"query": there.arrays["query"][:3], "block_table": there.arrays["block_table"][:1]}
    )
    rows = arrays.pop("rows", None)
    got = cuda.get(paged_attention(**arrays, **({} if rows is None else {"rows": rows[:1]}), **alone, plan=plan))
    assert got.tobytes() == out[:3].tobytes()


@pytest.mark.parametrize("name", cases(["int8_token", "nvfp4"], ["int8_token", "int4_token", "nvfp4", "mxfp8"]))
@pytest.mark.parametrize("shape", [DECODE, PROMPTS], ids=["decode", "prompts"])
def test_stored_formats(cuda, name, shape):
    case = make_format_case(name, shape=replace(shape, dims=(128, 128), query_dtype="bfloat16"))
    plain = case.plain
    lists, counts = random_selection(plain, shape.block_size)
    query, _, _, table, lens = plain.arrays
    options = dict(plain.options)
    names = {"key_scale": case.key.scale, "value_scale": case.value.scale, "blocks": lists, "block_counts": counts}
    device = {key: cuda.put(x) if isinstance(x, np.ndarray) else x for key, x in (options | names).items()}
    device |= {"key_global_scale": case.key.global_scale, "value_global_scale": case.value.global_scale}
    out = cuda.empty(query.shape, str(query.dtype))
    arrays = (query, case.key.codes, case.value.codes, table, lens)
    paged_attention(*map(cuda.put, arrays), out=out, **device)
    query_lens = [1] * len(lens) if options.get("cu_query_lens") is None else np.diff(options["cu_query_lens"]).tolist()
    masks = sparse.selection_mask(lists, counts, shape.block_size, lens, query_lens)
    group = query.shape[1] // lists.shape[1]
    for head in range(lists.shape[1]):
        own = np.concatenate([np.zeros(0, bool), *[mask.reshape(-1) for mask in masks[head]]])
        expected, _ = reference.paged_attention(
            query[:, head * group : (head + 1) * group],
            case.key.numbers[:, :, head : head + 1],
            case.value.numbers[:, :, head : head + 1],
            table,
            lens,
            **options,
            mask=own,
        )
        assert_output_close(cuda.get(out)[:, head * group : (head + 1) * group], expected)


def test_a_call_with_a_selection_can_be_captured_with_an_array_of_torch_only(cuda):
    """The call plans its own batch, in memory that a graph of another framework would outlive."""
    case = make_case(replace(DECODE, **BF16))
    lists, _ = random_selection(case, 16)
    there, blocks = DeviceCase(cuda, case), cuda.put(lists)
    there.run(blocks=blocks)
    with pytest.raises(errors.DeviceError, match="captured"):
        cuda.capture(lambda stream: paged_attention(**there.arrays, out=there.out, blocks=blocks, stream=stream))


def test_invalid_lists_on_the_device_read_nothing_outside(cuda):
    case = make_case(replace(DECODE, **BF16))
    for lists in ([[[2**40, -7, 3], [9, 8, 7]]], [[[-1, -1, -1], [0, 2**31, 5]]]):
        blocks = cuda.put(np.repeat(np.array(lists, np.int64), 5, axis=0))
        counts = cuda.put(np.array([[2**40, -3]] * 5, np.int64))
        there = DeviceCase(cuda, case)
        there.run(blocks=blocks)
        there.run(blocks=blocks, block_counts=counts)


def test_lists_are_checked_on_the_host_and_under_debug(cuda):
    case = make_case(Shape((64, 40), heads=(2, 1), dims=(64, 64), **BF16))
    there = DeviceCase(cuda, case, ("seq_lens",))
    refused = {
        r"blocks\[1, 0, 1\] is 3 and sequence 1 of 40 tokens has 3": {"blocks": [[[0, 1]], [[0, 3]]]},
        "must ascend": {"blocks": [[[1, 1]], [[0, 1]]]},
        "expected 0 to 2": {"blocks": [[[0, 1]], [[0, 1]]], "block_counts": [[3], [1]]},
    }
    for message, given in refused.items():
        with pytest.raises(errors.ShapeError, match=message):
            there.run(**given)
    width = case.block_table.shape[1]
    with pytest.raises(errors.ShapeError, match=rf"is {width} and a row of block_table has {width}; use 0 to"):
        DeviceCase(cuda, case).run(blocks=[[[0, 1]], [[0, width]]])
    pagecore.debug(True)
    try:
        with pytest.raises(errors.ShapeError, match="must ascend"):
            there.run(blocks=cuda.put(np.array([[[2, 1]], [[0, 1]]])))
    finally:
        pagecore.debug(False)
