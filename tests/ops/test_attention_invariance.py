"""Results do not depend on other sequences of the batch, on the order of blocks, or on the split of the work."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, ops
from tests.ops.cases import DTYPES, Case, Shape, among, assert_lse_close, assert_output_close, make_case
from tests.together import together

pytestmark = pytest.mark.slow

SHAPE = Shape(seq_lens=(2000, 33, 1, 16, 700, 0, 129), query_lens=(1, 5, 1, 16, 40, 2, 1))
DECODE = Shape(seq_lens=(2000, 33, 1, 700, 0, 129))


def plan_for(case: Case, **more: Any) -> ops.AttentionPlan:
    kinds = {name: case.options[name] for name in ("causal", "window") if name in case.options}
    cu_query_lens = case.options.get("cu_query_lens")
    heads = {"num_query_heads": case.query.shape[1], "num_kv_heads": case.key_cache.shape[2]}
    return ops.plan_attention(cu_query_lens, case.seq_lens, **heads, **kinds, **more)


def assert_same_bits(got: Any, expected: Any) -> None:
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


@together("shape", [SHAPE, DECODE])
@together("window", [None, 100])
@together("num_workers", [None, 1, 7, 64])
def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch(shape, window, num_workers):
    case = make_case(shape, window=window)
    plan = plan_for(case, batch_invariant=True, num_workers=num_workers)
    out, lse = case.run(plan=plan, return_lse=True)
    for i in range(len(case.seq_lens)):
        single, rows = among(case, np.array([i]))
        single_plan = plan_for(single, batch_invariant=True)
        single_out, single_lse = single.run(plan=single_plan, return_lse=True)
        assert_same_bits(single_out, out[rows])
        assert_same_bits(single_lse, lse[rows])


# Long enough for several threads.
LONG = (2600, 33, 1300, 700, 0, 2049)
LONG_QUERIES = {"decode": None, "prompts": (1, 33, 300, 5, 2, 17)}


@pytest.fixture
def any_threads():
    yield pagecore.set_num_threads
    pagecore.set_num_threads(None)


@pytest.mark.parametrize("queries", LONG_QUERIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"sinks": np.linspace(-2, 2, 8, dtype=np.float32)}], ids=str)
def test_neither_threads_nor_neighbours_change_a_bit_of_a_batch_invariant_row(any_threads, queries, dtype, options):
    case = make_case(Shape(LONG, LONG_QUERIES[queries], heads=(8, 4), query_dtype=dtype, cache_dtype=dtype), **options)
    any_threads(1)
    expected = case.run(plan=plan_for(case, batch_invariant=True), return_lse=True)
    rng = np.random.default_rng(7)
    for num_threads in (1, 2, 3, 8):
        any_threads(num_threads)
        chosen = np.sort(rng.permutation(len(LONG))[: rng.integers(1, len(LONG))])
        for sequences in (np.arange(len(LONG)), chosen):
            part, rows = among(case, sequences)
            got = part.run(plan=plan_for(part, batch_invariant=True), return_lse=True)
            for one, whole in zip(got, expected, strict=True):
                assert_same_bits(one, whole[rows])


@pytest.mark.parametrize("queries", LONG_QUERIES)
def test_one_plan_gives_the_same_bits_on_any_number_of_threads(any_threads, queries):
    case = make_case(Shape(LONG, LONG_QUERIES[queries], heads=(8, 4)))
    plan = plan_for(case, num_workers=5)
    any_threads(1)
    expected = case.run(plan=plan)
    for num_threads in (2, 3, 8):
        any_threads(num_threads)
        assert_same_bits(case.run(plan=plan), expected)


@together("shape", [SHAPE, DECODE])
def test_the_order_of_a_batch_changes_no_bits(shape):
    case = make_case(shape, sinks=np.ones(4, np.float32))
    other, tokens = among(case, np.random.default_rng(0).permutation(len(case.seq_lens)))
    out = case.run(plan=plan_for(case, batch_invariant=True))
    assert_same_bits(other.run(plan=plan_for(other, batch_invariant=True)), out[tokens])


@together("layout", ["HND", "blockwise", "padded", "reversed"])
def test_the_layout_of_the_cache_changes_no_bits(layout):
    shape = Shape(seq_lens=SHAPE.seq_lens, query_lens=SHAPE.query_lens, layout=layout)
    assert_same_bits(make_case(shape).run(), make_case(SHAPE).run())


@together("shape", [SHAPE, DECODE])
@together("dtype", DTYPES)
@together("num_workers", [1, 2, 16, 64])
@together("batch_invariant", [False, True])
def test_every_split_of_the_work_keeps_the_bounds(shape, dtype, num_workers, batch_invariant):
    shape = Shape(shape.seq_lens, shape.query_lens, query_dtype=dtype, cache_dtype=dtype, heads=(4, 1))
    case = make_case(shape, sinks=np.ones(4, np.float32), softcap=20.0)
    plan = plan_for(case, num_workers=num_workers, batch_invariant=batch_invariant)
    out, lse = case.run(plan=plan, return_lse=True)
    expected = case.expect()
    assert_output_close(out, expected[0])
    assert_lse_close(lse, expected[1], dtype)


def test_a_split_row_without_keys_in_some_splits_is_correct():
    """With one unmasked key of 2,000, all splits but one contribute nothing."""
    for kept in (0, 777, 1999):
        mask = np.zeros(2000, dtype=bool)
        mask[kept] = True
        case = make_case(Shape(seq_lens=(2000,)), mask=mask)
        case.check(plan=plan_for(case, num_workers=64))


@together("query_len", [1, 3])
def test_the_same_call_twice_gives_the_same_bits(query_len):
    case = make_case(Shape(seq_lens=(3000, 5), query_lens=(query_len, 1)))
    assert_same_bits(case.run(), case.run())


@together(
    "change",
    [{"seq_lens": [40, 6]}, {"cu_query_lens": [0, 1, 4]}, {"causal": False}, {"window": 7}, {"window": (6, -1)}],
)
def test_a_plan_for_another_batch_is_refused_and_writes_nothing(change):
    case = make_case(Shape(seq_lens=(40, 5), query_lens=(3, 1)))
    out = np.full(case.query.shape, 7, np.float32)
    planned = {"cu_query_lens": case.options["cu_query_lens"], "seq_lens": case.seq_lens} | change
    plan = ops.plan_attention(**planned, num_query_heads=4, num_kv_heads=2)
    with pytest.raises(errors.ShapeError, match="plan"):
        case.run(plan=plan, out=out)
    assert (out == 7).all()


@together("heads", [(4, 4), (8, 2), (2, 2)])
def test_a_plan_for_other_heads_is_refused(heads):
    case = make_case(Shape(seq_lens=(40, 5)))
    plan = ops.plan_attention(None, case.seq_lens, num_query_heads=heads[0], num_kv_heads=heads[1])
    with pytest.raises(errors.ShapeError, match="plan"):
        case.run(plan=plan)


def test_a_plan_that_was_never_made_is_refused():
    case = make_case(Shape(seq_lens=(40, 5)))
    with pytest.raises(errors.PagecoreError):
        case.run(plan=ops.AttentionPlan.__new__(ops.AttentionPlan))


def test_a_plan_that_another_thread_attends_with_is_not_changed_under_it():
    case = make_case(Shape(seq_lens=(700,) * 8))
    expected = case.run()
    plan = plan_for(case)
    results = []

    def attend():
        for _ in range(50):
            with suppress(errors.ShapeError):  # the plan may be for the other batch by now
                results.append(case.run(plan=plan))

    worker = threading.Thread(target=attend)
    worker.start()
    while worker.is_alive():
        for lengths in ([700] * 4096, case.seq_lens):
            with suppress(errors.UnsupportedOption):  # the plan is in use
                ops.plan_attention(None, lengths, num_query_heads=4, num_kv_heads=2, num_workers=512, out=plan)
    worker.join()
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
