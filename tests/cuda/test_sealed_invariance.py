"""Batch-invariant attention over sealed blocks on CUDA: a row has the same bits in every batch and every chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cuda.attention_cases import BF16, F16
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.sealed_calls import check, plan_of, run
from tests.ops.cases import Shape
from tests.ops.sealed_cases import SealedCase, keep_sealed, make_sealed_case, sealed_among, sealed_chunks

pytestmark = pytest.mark.slow

# The first sequence has two pieces of 1,024 keys.
SHAPE = Shape((1100, 33, 70, 0, 1), (3, 33, 1, 2, 1), heads=(4, 1), **BF16)
SINKS = np.linspace(-2, 3, 4, dtype=np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1050, "sinks": SINKS},
    "full": {"softcap": 20.0, "value_scale": 0.7},
}
# Kernels of matrix instructions, and general_sealed.
KINDS: dict[str, dict[str, Any]] = {"bfloat16": BF16, "float16": F16, "float32": {}}


def bits(cuda: Kit, case: SealedCase, **more: Any) -> list[Any]:
    """Return the bytes of output and lse, one row for each query."""
    parts = run(cuda, case, plan=plan_of(cuda, case, batch_invariant=True, **more))
    return [np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts]


def assert_same_bits(got: list[Any], expected: list[Any], rows: Any = slice(None)) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other[rows])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sequence_alone_gives_the_bits_that_it_gives_in_a_batch(cuda, name):
    case = make_sealed_case(SHAPE, **OPTIONS[name])
    expected = bits(cuda, case)
    for chosen in ([0], [1, 2], [3], [4, 0]):
        part, rows = sealed_among(case, np.array(chosen))
        assert_same_bits(bits(cuda, part), expected, rows)


@pytest.mark.parametrize("kind", cases(["bfloat16"], list(KINDS)))
def test_the_number_of_workers_changes_no_bits(cuda, kind):
    """With few workers one CTA folds the pieces of a tile; with many workers each piece has a CTA of its own."""
    case = make_sealed_case(Shape((1100, 40), (3, 1), heads=(4, 1), **KINDS[kind]), (2, 2))
    check(cuda, case, planned={"batch_invariant": True})
    expected = bits(cuda, case)
    for num_workers in (1, 12):
        assert_same_bits(bits(cuda, case, num_workers=num_workers), expected)


@pytest.mark.parametrize(("kind", "sizes"), [("bfloat16", (33, 7)), ("float16", (1, 39)), ("float32", (8, 1, 31))])
def test_chunks_of_a_prompt_change_no_bits_between_which_nothing_is_sealed(cuda, kind, sizes):
    """Rows of a chunk lie elsewhere in their tiles, next to other rows, or alone with split keys."""
    case = keep_sealed(make_sealed_case(Shape((1100,), (40,), heads=(4, 1), **KINDS[kind])), 0, 1056)
    expected = bits(cuda, case)
    for chunk, rows in sealed_chunks(case, sizes):
        assert_same_bits(bits(cuda, chunk), expected, rows)
