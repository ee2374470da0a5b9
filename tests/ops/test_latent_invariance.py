"""Batch-invariant latent attention: no neighbour, chunk, thread, layout or block size changes a bit of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import gather_latent, latent_attention, plan_attention, write_latent
from tests.ops.instruction_sets import on_every_isa
from tests.ops.latent_cases import FORMATS, Case, make_case
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

Results = tuple[np.ndarray, np.ndarray]
PROMPTS = {"seq_lens": (2600, 33, 1300, 700, 0, 2049), "query_lens": (1, 33, 70, 5, 2, 17)}


@pytest.fixture
def any_threads() -> Iterator[Any]:
    yield pagecore.set_num_threads
    pagecore.set_num_threads(None)


def attend(case: Case, queries: np.ndarray, rows: Sequence[int], lens: Any, cu: Any, **options: Any) -> Results:
    """Attend with `queries` of the case by a batch-invariant plan, into NaN."""
    workers, kinds = options.pop("num_workers", None), {k: v for k, v in options.items() if k in ("causal", "window")}
    plan = plan_attention(
        cu,
        lens,
        num_query_heads=case.query.shape[1],
        num_kv_heads=1,
        batch_invariant=True,
        num_workers=workers,
        **kinds,
    )
    out = np.full(case.query[queries].shape, np.nan, case.query.dtype)
    arrays = (case.query[queries], case.rope[queries], *case.planes, case.table, lens)
    format_options = {k: v for k, v in case.options.items() if k == "latent_scale"}
    return latent_attention(
        *arrays, rows=rows, cu_query_lens=cu, scale=0.07, plan=plan, out=out, return_lse=True,
        **format_options, **options,
    )  # fmt: skip


def attend_sequences(case: Case, sequences: Sequence[int], **options: Any) -> tuple[Results, np.ndarray]:
    """Attend to some sequences of a case; return the results and the rows of its queries."""
    cu = case.options.get("cu_query_lens", np.arange(len(case.seq_lens) + 1))
    queries = np.concatenate([np.arange(cu[i], cu[i + 1]) for i in sequences])
    part = np.concatenate([[0], np.cumsum(np.diff(cu)[list(sequences)])]).astype(np.int32)
    return attend(case, queries, list(sequences), case.seq_lens[list(sequences)], part, **options), queries


def assert_same_bits(got: Results, expected: Results) -> None:
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(other.astype(np.float32)[np.isfinite(expected[1])]).all()
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"causal": False}], ids=str)
@pytest.mark.parametrize("heads", [3, 16])
@on_every_isa
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(dtype, options, heads):
    case = make_case(**PROMPTS, heads=heads, dims=(48, 16), dtype=dtype)
    whole, _ = attend_sequences(case, range(6), **options)
    for i in range(6):
        alone, queries = attend_sequences(case, [i], **options)
        assert_same_bits(alone, (whole[0][queries], whole[1][queries]))


# Heads, dims, keys and queries. Pieces end at 1024 and 2048 keys, of which the larger dims have one.
SIZES = [(3, (48, 16), 2300, 2300), (16, (512, 64), 1150, 150)]


@pytest.mark.parametrize(("window", "size", "dtype"), in_turn([None, 90, 1070], SIZES, over=[["float32", "bfloat16"]]))
@on_every_isa
def test_the_chunks_of_a_prompt_change_no_bits(window, size, dtype):
    heads, dims, length, queries = size
    first = length - queries  # the position of query 0
    case = make_case((length,), (queries,), heads=heads, dims=dims, dtype=dtype)
    some = np.unique(np.r_[0:3, 15:18, 31:34, 63:66, 1021:1028, 1088:1093, length - 101 : length : 7, length - 1])
    whole = attend(case, np.arange(queries), [0], [length], [0, queries], window=window)
    for edges in ([1, 64, 65, 700, 1024, length - 50, length - 49, length], [length - 1, length]):
        ends = [edge - first for edge in edges if edge > first]
        parts = [
            attend(case, np.arange(b, e), [0], [first + e], [0, e - b], window=window)
            for b, e in zip([0, *ends[:-1]], ends, strict=True)
        ]
        joined = tuple(np.concatenate(each) for each in zip(*parts, strict=True))
        assert_same_bits((joined[0], joined[1]), whole)
    for i in some[some >= first] - first:  # decode
        alone = attend(case, np.array([i]), [0], [first + int(i) + 1], [0, 1], window=window)
        assert_same_bits(alone, (whole[0][i : i + 1], whole[1][i : i + 1]))


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_neither_threads_nor_neighbours_change_bits(any_threads, format):
    case = make_case(**PROMPTS, heads=16, format=format, scale=0.37 if format == "float8_e4m3fn" else 1.0)
    any_threads(1)
    expected, _ = attend_sequences(case, range(6), sinks=np.linspace(-2, 2, 16))
    rng = np.random.default_rng(7)
    for num_threads in (1, 2, 3, 8):
        any_threads(num_threads)
        for chosen in (np.arange(6), rng.permutation(6)[: rng.integers(1, 6)]):
            got, queries = attend_sequences(case, chosen, sinks=np.linspace(-2, 2, 16), num_workers=int(num_threads))
            assert_same_bits(got, (expected[0][queries], expected[1][queries]))


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_neither_block_size_nor_planes_change_bits(joint, dtype):
    first = make_case((1500, 77), (40, 3), heads=16, dims=(96, 32), dtype=dtype)
    expected, _ = attend_sequences(first, [0, 1])
    rows = gather_latent(*first.planes, first.table, first.seq_lens, dtype=dtype)
    for block_size in (1, 7, 64, 100):
        case = make_case((1500, 77), (40, 3), heads=16, dims=(96, 32), dtype=dtype, block_size=block_size, joint=joint)
        for row, part in zip(case.table, (rows[:1500], rows[1500:]), strict=True):
            at = np.arange(len(part))
            write_latent(part[:, :96], part[:, 96:], *case.planes, row[at // block_size] * block_size + at % block_size)
        case.query, case.rope = first.query, first.rope
        assert_same_bits(attend_sequences(case, [0, 1])[0], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_a_list_of_slots_has_the_same_bits_among_others_and_with_padding(dtype, any_threads):
    case = make_case((2600,) * 3, dims=(48, 16), heads=16, dtype=dtype)
    rng = np.random.default_rng(0)
    slots = (case.table[:, :, None] * 16 + np.arange(16)).reshape(3, -1)[:, :2600]
    lists = np.array([rng.permutation(row)[:2100] for row in slots], np.int32)
    lists[:, 5::9] = -1
    lens = np.array([2100, 1030, 70], np.int32)

    def run(rows: list[int], width: int, num_threads: int) -> Results:
        any_threads(num_threads)
        padded = np.full((len(rows), width), -1, np.int32)
        padded[:, :2100] = lists[rows]
        plan = plan_attention(None, lens[rows], num_query_heads=16, num_kv_heads=1, causal=False, batch_invariant=True)
        return latent_attention(
            case.query[rows], case.rope[rows], *case.planes, scale=0.07, indices=padded, index_lens=lens[rows],
            plan=plan, return_lse=True,
        )  # fmt: skip

    whole = run([0, 1, 2], 2100, 1)
    for i in range(3):
        for width, num_threads in ((2100, 1), (2999, 2), (2100, 8)):
            assert_same_bits(run([i], width, num_threads), (whole[0][i : i + 1], whole[1][i : i + 1]))
