"""paged_attention with blocks= and indices=: each key head reads only what it selected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from tests.ops.cases import DTYPES, LAYOUTS, Shape, among, assert_lse_close, assert_output_close, make_case, random_mask
from tests.ops.instruction_sets import on_every_isa
from tests.ops.selections import expect, poison, random_selection
from tests.ops.test_attention_invariance import assert_same_bits, plan_for
from tests.together import together

LENS = {
    "decode": {"seq_lens": (300, 33, 1, 0, 130)},
    "mixed": {"seq_lens": (300, 33, 1, 16, 40), "query_lens": (70, 1, 1, 16, 0)},
}
NAMES = {True: ("blocks", "block_counts"), False: ("indices", "index_counts")}


def check(shape: Shape, *, by_block: bool = True, seed: int = 3, counted: bool = True, **options: Any) -> None:
    case = make_case(shape, **options)
    unit = shape.block_size if by_block else 1
    lists, counts = random_selection(case, unit, seed=seed)
    poison(case, lists, counts, unit)
    names = NAMES[by_block]
    selected = {names[0]: lists, **({names[1]: counts} if counted else {})}
    out = np.full((*case.query.shape[:2], case.value_cache.shape[3]), np.nan, case.query.dtype)
    got, lse = case.run(out=out, return_lse=True, **selected)
    assert got is out
    expected = expect(case, lists, counts, unit)
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], str(case.query.dtype))


@pytest.mark.slow
@together("lens", LENS)
@together("dtype", ["float32", "bfloat16"])
@together("by_block", [True, False])
@together("dim", [64, 40, 128])
@on_every_isa
def test_every_instruction_set_attends_to_what_each_head_selects(lens, dtype, by_block, dim):
    shape = Shape(heads=(8, 2), dims=(dim, dim), query_dtype=dtype, cache_dtype=dtype, **LENS[lens])
    check(shape, by_block=by_block)


@together(
    "options",
    [
        {"window": 50},
        {"causal": False},
        {"causal": False, "window": (20, 9)},
        {"softcap": 3.0},
        {"scale": 0.3, "window": 7},
    ],
)
@together("lens", LENS)
@together("by_block", [True, False])
def test_windows_and_causality_use_true_positions(options, lens, by_block):
    check(Shape(**LENS[lens]), by_block=by_block, **options)


@together("lens", LENS)
@together("by_block", [True, False])
@on_every_isa
def test_biases_sinks_and_masks_use_true_positions(lens, by_block):
    shape = Shape(**LENS[lens])
    check(shape, by_block=by_block, alibi_slopes=np.array([0.5, 0.1, -0.2, 0.0], np.float32))
    check(shape, by_block=by_block, sinks=np.linspace(-1, 1, 4, dtype=np.float32))
    check(shape, by_block=by_block, mask=random_mask(shape), window=100)


@together("block_size", [1, 5, 16, 64, 100])
@together("lens", LENS)
def test_every_block_size(block_size, lens):
    check(Shape(block_size=block_size, **LENS[lens]))
    check(Shape(block_size=block_size, **LENS[lens]), by_block=False, counted=False)


@together("layout", LAYOUTS)
@together("cache_dtype", DTYPES)
def test_every_layout_and_dtype(layout, cache_dtype):
    check(Shape(layout=layout, cache_dtype=cache_dtype, index_dtype="int64", shuffle_rows=True, **LENS["mixed"]))


def test_blocks_that_are_not_selected_may_not_exist():
    case = make_case(Shape((64,)))
    case.block_table[0, [0, 2]] = -7
    expected = case.run(blocks=[[[1, 3], [1, 3]]])
    case.block_table[0, [0, 2]] = 2**31 - 1
    assert_same_bits(case.run(blocks=[[[1, 3], [1, 3]]]), expected)
    with pytest.raises(errors.InvalidBlock, match="selects it"):
        case.run(blocks=[[[1, 3], [1, 2]]])


def test_a_selection_of_all_blocks_gives_the_bits_of_no_selection():
    case = make_case(Shape((2000,), (3,), heads=(4, 4)))
    everything = np.broadcast_to(np.arange(125), (1, 4, 125))
    assert_same_bits(
        case.run(blocks=everything, plan=plan_for(case, batch_invariant=True)),
        case.run(plan=plan_for(case, batch_invariant=True)),
    )


@pytest.mark.slow
@together("threads", [1, 2, 3])
@together("lens", [{"seq_lens": (9000, 3000, 50)}, {"seq_lens": (3000, 50), "query_lens": (200, 2)}])
def test_long_selections_are_split_among_threads(threads, lens):
    pagecore.set_num_threads(threads)
    try:
        check(Shape(**lens), seed=5)
    finally:
        pagecore.set_num_threads(None)


def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch():
    case = make_case(Shape(seq_lens=(5000, 33, 1, 700, 129), query_lens=(1, 5, 1, 40, 1), heads=(4, 2)))
    lists, counts = random_selection(case, 16)
    plan = plan_for(case, batch_invariant=True)
    out, lse = case.run(plan=plan, return_lse=True, blocks=lists, block_counts=counts)
    for threads in (1, 3):
        pagecore.set_num_threads(threads)
        try:
            for i in range(len(case.seq_lens)):
                single, rows = among(case, np.array([i]))
                chosen = {"blocks": lists[[i]], "block_counts": counts[[i]]}
                got = single.run(plan=plan_for(single, batch_invariant=True), return_lse=True, **chosen)
                assert_same_bits(got[0], out[rows])
                assert_same_bits(got[1], lse[rows])
        finally:
            pagecore.set_num_threads(None)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not ascending": ({"blocks": [[[1, 0]]]}, errors.ShapeError, "must ascend"),
    "twice": ({"blocks": [[[1, 1]]]}, errors.ShapeError, "must ascend"),
    "past the end": ({"blocks": [[[0, 3]]]}, errors.ShapeError, r"use 0 to 2"),
    "token past the end": ({"indices": [[[39, 40]]]}, errors.ShapeError, r"use 0 to 39"),
    "negative with counts": ({"blocks": [[[0, -1]]], "block_counts": [[2]]}, errors.ShapeError, "is -1"),
    "count": ({"blocks": [[[0, 1]]], "block_counts": [[3]]}, errors.ShapeError, "expected 0 to 2"),
    "both": ({"blocks": [[[0]]], "indices": [[[0]]]}, errors.UnsupportedOption, "one of them"),
    "counts alone": ({"block_counts": [[1]]}, errors.UnsupportedOption, "without blocks"),
    "index counts alone": ({"index_counts": [[1]]}, errors.UnsupportedOption, "without indices"),
    "sequences": ({"blocks": [[[0]], [[0]]]}, errors.ShapeError, "one list for each of seq_lens"),
    "heads": ({"blocks": [[[0], [0]]]}, errors.ShapeError, "each key-value head"),
    "rank": ({"blocks": [[0]]}, errors.ShapeError, "3 axes"),
}


@together("name", REFUSED)
def test_refusals_come_before_anything_is_written(name):
    options, kind, message = REFUSED[name]
    case = make_case(Shape((40,), heads=(2, 1)))
    out = np.full((1, 2, 64), 7, np.float32)
    with pytest.raises(kind, match=message):
        case.run(out=out, **options)
    assert (out == 7).all()


def test_the_output_may_not_overlap_the_lists():
    case = make_case(Shape((40,), heads=(1, 1), dims=(64, 64)))
    lists = np.zeros(64, np.int32)
    with pytest.raises(errors.UnsupportedOption, match="blocks"):
        case.run(out=lists.view(np.float32).reshape(1, 1, 64), blocks=lists[:1].reshape(1, 1, 1))


def test_a_selection_needs_no_more_than_the_attended_keys():
    """A list may be longer than the table row allows for an empty sequence."""
    case = make_case(replace(Shape(), seq_lens=(0, 5), heads=(2, 1)))
    out = case.run(blocks=[[[-1]], [[0]]])
    assert (out[0] == 0).all()
    assert ops.select(np.zeros((2, 1, 4), np.float32), 1, lens=[0, 1])[1].tolist() == [[0], [1]]


@together("format", ["float8_token", "int8_token", "int4_token", "nvfp4", "mxfp8"])
@together("by_block", [True, False])
@on_every_isa
def test_selected_rows_of_a_quantised_cache(format, by_block):
    case = make_case(Shape(seq_lens=(300, 33, 1, 130), query_lens=(7, 1, 1, 2), query_dtype="bfloat16"))
    unit = case.key_cache.shape[1] if by_block else 1
    lists, counts = random_selection(case, unit, seed=5)
    poison(case, lists, counts, unit)
    codes, scales, exact = {}, {}, {}
    for name in ("key_cache", "value_cache"):
        codes[name], scales[name] = pagecore.quantize(np.ascontiguousarray(getattr(case, name)), format)
        exact[name] = pagecore.dequantize(codes[name], format, scales[name])
    names = NAMES[by_block]
    options = {names[0]: lists, names[1]: counts}
    stored = replace(case, **codes)
    got = stored.run(key_scale=scales["key_cache"], value_scale=scales["value_cache"], **options)
    assert_output_close(got, expect(replace(case, **exact), lists, counts, unit)[0])


@together(("name", "entry"), [("blocks", 40), ("indices", 40), ("blocks", -2), ("indices", -2)])
def test_errors_name_the_argument_also_for_blocks_of_one_token(name, entry):
    case = make_case(Shape((40,), heads=(2, 1), block_size=1))
    with pytest.raises(errors.ShapeError, match=rf"^{name}\[0, 0, 1\] is {entry} "):
        case.run(**{name: [[[3, entry]]], NAMES[name == "blocks"][1]: [[2]]})
