"""Batch-invariant attention: the bits of a row depend only on its own query, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cuda.attention_cases import BF16, DeviceCase, compare
from tests.cuda.matrix import cases
from tests.ops.cases import Case, Shape, among, make_case
from tests.thinning import interleaved

pytestmark = pytest.mark.slow

SHAPE = Shape(
    seq_lens=(2300, 33, 1, 1100, 0, 1024, 1500, 2049),
    query_lens=(1, 5, 1, 40, 2, 1, 33, 5),
    heads=(4, 1),
    dims=(64, 64),
    **BF16,
)
DECODE = replace(SHAPE, seq_lens=(2300, 33, 1, 1100, 0, 1024), query_lens=None)
SINKS = np.linspace(-2, 3, 4, dtype=np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1100},
    "chunk": {"chunk": 1500},
    "sink tokens": {"window": 1100, "sink_tokens": 9},
    "sinks": {"sinks": SINKS, "value_scale": 0.7},
    "full": {"softcap": 20.0, "sinks": SINKS},
}


def run(cuda: Any, case: Case, **more: Any) -> Any:
    """Return the bytes of output and lse, each as an array with one row per query."""
    there = DeviceCase(cuda, case)
    return bytes_of(there.run(plan=there.plan(**{"batch_invariant": True, **more})))


def bytes_of(got: Any) -> Any:
    return tuple(np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in got)


def assert_same_bits(got: Any, expected: Any, rows: Any = slice(None)) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other[rows])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", cases([64], [64, 128, 256]))
def test_a_batch_keeps_the_bounds_and_a_sequence_alone_gives_its_bits(cuda, name, dim):
    case = make_case(replace(SHAPE, dims=(dim, dim)), **OPTIONS[name])
    there = DeviceCase(cuda, case)
    got = there.run(plan=there.plan(batch_invariant=True))
    compare(case, got)
    if cuda.is_emulated:
        assert not any(kernel.startswith("decode") for kernel in cuda.runtime.launched)
    expected = bytes_of(got)
    for i in range(len(case.seq_lens)):
        single, rows = among(case, np.array([i]))
        assert_same_bits(run(cuda, single), expected, rows)


@pytest.mark.parametrize("shape", [SHAPE, DECODE], ids=["mixed", "decode"])
def test_the_number_of_workers_changes_no_bits(cuda, shape):
    """With few workers one CTA folds the pieces of a tile; with many workers each piece has a CTA of its own."""
    case = make_case(shape)
    expected = run(cuda, case)
    for num_workers in (1, 2, 3, 50):
        assert_same_bits(run(cuda, case, num_workers=num_workers), expected)


def test_the_order_of_a_batch_changes_no_bits(cuda):
    case = make_case(SHAPE, sinks=SINKS)
    other, rows = among(case, np.random.default_rng(0).permutation(len(case.seq_lens)))
    assert_same_bits(run(cuda, other), run(cuda, case), rows)


@pytest.mark.parametrize(("name", "sizes"), interleaved(OPTIONS, [(1,) * 4 + (36,), (33, 7), (39, 1)]), ids=str)
def test_the_chunks_of_a_prompt_change_no_bits(cuda, name, sizes):
    """Rows of a chunk lie elsewhere in their tiles, next to other rows, or alone with split keys."""
    case = make_case(replace(SHAPE, seq_lens=(2100,), query_lens=(40,)), **OPTIONS[name])
    expected, begin = run(cuda, case), 0
    for size in sizes:
        rows = slice(begin, begin + size)
        options = {**case.options, "cu_query_lens": np.array([0, size], np.int32)}
        lens = np.array([2100 - 40 + begin + size], np.int32)
        chunk = replace(case, query=case.query[rows], seq_lens=lens, options=options)
        assert_same_bits(run(cuda, chunk), expected, rows)
        begin += size


@pytest.mark.parametrize("layout", ["HND", "blockwise", "reversed"])
def test_the_layout_of_the_cache_changes_no_bits(cuda, layout):
    shape = replace(SHAPE, seq_lens=(1200, 90), query_lens=(3, 60))
    assert_same_bits(run(cuda, make_case(replace(shape, layout=layout))), run(cuda, make_case(shape)))


def test_rows_of_padding_change_no_bits(cuda):
    case, padded = make_case(SHAPE), make_case(replace(SHAPE, padding=9))
    assert_same_bits(run(cuda, case), run(cuda, padded), slice(len(case.query)))


def test_one_plan_gives_the_same_bits_in_every_order_of_blocks_and_warps(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it chooses the order of threads")
    for batch_invariant in (False, True):
        case, bits = make_case(SHAPE), []
        for seed in range(3):
            cuda.runtime.seed = seed
            bits.append(run(cuda, case, num_workers=12, batch_invariant=batch_invariant))
        for other in bits[1:]:
            assert_same_bits(other, bits[0])
