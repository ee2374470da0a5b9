"""Batch-invariant attention over sealed blocks: the bits of a row do not depend on the rest of its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import ops
from tests.ops.cases import DTYPES, Shape
from tests.ops.instruction_sets import on_every_isa
from tests.ops.sealed_cases import SealedCase, keep_sealed, make_sealed_case, sealed_among, sealed_chunks
from tests.together import together

# Long enough for several threads, and for several pieces of 1,024 keys.
LENS: dict[str, dict[str, Any]] = {
    "decode": {"seq_lens": (2600, 33, 1300, 0, 1024)},
    "prompts": {"seq_lens": (1300, 33, 700, 0, 2049), "query_lens": (1, 33, 150, 2, 17)},
}


@pytest.fixture
def any_threads():
    yield pagecore.set_num_threads
    pagecore.set_num_threads(None)


def run(case: SealedCase, **more: Any) -> list[Any]:
    """Run by a batch-invariant plan; return the bytes of output and lse, one row for each query."""
    plain = case.plain
    heads = {"num_query_heads": plain.query.shape[1], "num_kv_heads": plain.key_cache.shape[2]}
    kinds = {"window": plain.options["window"]} if "window" in plain.options else {}
    cu = plain.options.get("cu_query_lens")
    plan = ops.plan_attention(cu, plain.seq_lens, batch_invariant=True, **heads, **kinds, **more)
    parts = case.run(plan=plan, return_lse=True)
    return [np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts]


def assert_same_bits(got: list[Any], expected: list[Any], rows: Any = slice(None)) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other[rows])


@together("lens", LENS)
@together(("dtype", "bits"), list(zip(DTYPES, [(4, 4), (2, 2), (2, 4)], strict=True)))
@together("options", [{}, {"window": 700}, {"sinks": np.linspace(-2, 2, 8, dtype=np.float32)}])
def test_neither_threads_nor_neighbours_change_a_bit(any_threads, lens, dtype, bits, options):
    shape = Shape(heads=(8, 4), query_dtype=dtype, cache_dtype=dtype, **LENS[lens])
    case = make_sealed_case(shape, bits, **options)
    any_threads(1)
    expected = run(case)
    rng = np.random.default_rng(7)
    for num_threads in (1, 3):
        any_threads(num_threads)
        count = len(shape.seq_lens)
        for chosen in (np.arange(count), rng.permutation(count)[: rng.integers(1, count)]):
            part, rows = sealed_among(case, chosen)
            assert_same_bits(run(part, num_workers=5), expected, rows)


@on_every_isa
def test_every_sequence_alone_gives_the_bits_that_it_gives_in_a_batch():
    lens = {"seq_lens": (1100, 33, 70, 0), "query_lens": (3, 33, 16, 2)}
    case = make_sealed_case(Shape(heads=(4, 1), query_dtype="bfloat16", cache_dtype="bfloat16", **lens))
    expected = run(case)
    for i in range(4):
        part, rows = sealed_among(case, np.array([i]))
        assert_same_bits(run(part), expected, rows)


@together("dtype", DTYPES)
@together("sizes", [(33, 7), (1, 39), (1,) * 40])
def test_chunks_of_a_prompt_change_no_bits_between_which_nothing_is_sealed(dtype, sizes):
    case = make_sealed_case(Shape((1100,), (40,), heads=(4, 1), query_dtype=dtype, cache_dtype=dtype))
    case = keep_sealed(case, 0, 1056)
    expected = run(case)
    for chunk, rows in sealed_chunks(case, sizes):
        assert_same_bits(run(chunk), expected, rows)


def test_other_sealed_tokens_change_bits():
    """Tokens of sealed blocks have other numbers than those that were sealed, and on the host other products."""
    case = make_sealed_case(Shape((1100,), (40,), heads=(4, 1), cache_dtype="bfloat16"))
    assert (run(case)[0] != run(keep_sealed(case, 0, 1040))[0]).any()


def test_sealed_tokens_before_the_window_of_a_row_change_no_bits():
    case = make_sealed_case(Shape((1100,), None, heads=(4, 1), cache_dtype="bfloat16"), window=12)
    few = replace(case, sealed=case.sealed._replace(lens=case.sealed.lens - 1024))
    assert_same_bits(run(few), run(case))
