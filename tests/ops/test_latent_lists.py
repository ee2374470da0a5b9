"""Latent attention over listed slots, and rows that are gathered from a cache of latents."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import errors, gather_latent, latent_attention, write_latent
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close
from tests.ops.instruction_sets import on_every_isa
from tests.ops.latent_cases import FORMATS, make_case
from tests.reference import latent as reference
from tests.together import together


def test_rows_pick_from_a_larger_table():
    case = make_case()
    table = np.full((9, case.table.shape[1]), -7, np.int32)
    table[[8, 2, 5, 0]] = case.table
    options = {"scale": 0.3, "rows": [8, 2, 5, 0]}
    got = latent_attention(case.query, case.rope, *case.planes, table, case.seq_lens, **options)
    expected = latent_attention(case.query, case.rope, *case.planes, case.table, case.seq_lens, scale=0.3)
    assert got.tobytes() == expected.tobytes()


# ---- sparse


@together("format", [None, *FORMATS])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_listed_slots(format, dtype):
    rng = np.random.default_rng(3)
    case = make_case((90, 40), format=format, dtype=dtype, heads=16)
    written = np.concatenate(
        [row[np.arange(n) // 16] * 16 + np.arange(n) % 16 for row, n in zip(case.table, case.seq_lens, strict=True)]
    )
    indices = np.array([rng.permutation(written)[:100], rng.permutation(written)[:100]], np.int32)
    indices[0, 3:90:4] = -1
    lens = np.array([100, 71], np.int32)
    indices[1, 71:] = 10**6
    out = np.full(case.query.shape, np.nan, case.query.dtype)
    sinks = np.linspace(-2, 3, 16)
    got, lse = latent_attention(
        case.query, case.rope, *case.planes, scale=0.05, indices=indices, index_lens=lens, sinks=sinks, out=out,
        return_lse=True, **case.options,
    )  # fmt: skip
    expected = reference.sparse_attention(case.joint, case.rows, 512, indices, lens, scale=0.05, sinks=sinks)
    assert_output_close(got, expected[0])
    assert_lse_close(lse, expected[1], dtype)


def test_lists_of_nothing_give_zero_and_minus_infinity():
    case = make_case((5, 5), dims=(32, 16))
    out, lse = latent_attention(
        case.query, case.rope, *case.planes, scale=1.0, indices=[[-1, -1], [-1, -5]], return_lse=True
    )
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


@together(
    ("indices", "lens", "error", "words"),
    [
        ([[1, 2, 10**6]], None, errors.InvalidBlock, "indices[0, 2] is 1000000"),
        ([[20, 21, 20]], None, errors.InvalidBlock, "lists before"),
        ([[20, 21, 22]], [4], errors.ShapeError, "index_lens[0] is 4"),
        ([[20], [21]], None, errors.ShapeError, "one row for each query"),
    ],
)
def test_bad_lists_are_refused_before_anything_is_written(indices, lens, error, words):
    case = make_case((5,), dims=(32, 16))
    out = np.full_like(case.query, 7)
    with pytest.raises(error) as raised:
        latent_attention(case.query, case.rope, *case.planes, scale=1.0, indices=indices, index_lens=lens, out=out)
    assert words in str(raised.value)
    assert (out == 7).all()


@together("name", ["block_table", "seq_lens", "rows", "cu_query_lens", "window"])
def test_lists_and_sequences_exclude_each_other(name):
    case = make_case((5,), dims=(32, 16))
    with pytest.raises(errors.UnsupportedOption, match=f"{name} is given with indices"):
        latent_attention(case.query, case.rope, *case.planes, scale=1.0, indices=[[1]], **{name: 1})


# ---- worked examples


LATENTS = np.array([[1, 0, 1], [0, 2, -1], [1, 1, 0]], np.float32)
ROPES = np.array([[1, 0], [0, 1], [1, 1]], np.float32)
W_UK = np.array([[[1, 0, 2], [0, 1, -1]], [[2, 1, 0], [1, -1, 1]]], np.float32)
W_UV = np.array([[[1, 1, 0], [0, 1, 1]], [[1, 0, -1], [2, 1, 0]]], np.float32)


@together(
    ("keys", "lse", "latent"),
    [
        (1, [1, 0], [[1, 0, 1], [1, 0, 1]]),
        (2, [1.9740770, 1.7014133], [[0.3775407, 1.2449187, -0.2449187], [0.1824255, 1.6351490, -0.6351490]]),
        (3, [2.4580201, 2.1041306], [[0.6163483, 1.1509552, -0.1509552], [0.4534506, 1.4245977, -0.4245977]]),
    ],
)
@on_every_isa
def test_worked_example_variants_a3_absorbed_equals_expanded(keys, lse, latent):
    q_nope, q_rope = np.array([[1, 2], [0, -1]], np.float32), np.array([[1, -1], [2, 0]], np.float32)
    query = np.einsum("hd,hdl->hl", q_nope, W_UK)
    assert query.tolist() == [[1, 2, 0], [-1, 1, -1]]
    cache = np.full((2, 4, 5), np.nan, np.float32)
    write_latent(LATENTS, ROPES, cache, None, [4, 5, 6])
    out, found = latent_attention(query[None], q_rope[None], cache, None, [[1]], [keys], scale=0.5, return_lse=True)
    np.testing.assert_allclose(found[0], lse, atol=2e-6)
    np.testing.assert_allclose(out[0], latent, atol=2e-6)
    key = np.concatenate([np.einsum("hdl,nl->nhd", W_UK, LATENTS), np.repeat(ROPES[:, None], 2, 1)], 2)[:keys]
    value = np.einsum("hdl,nl->nhd", W_UV, LATENTS)[:keys]
    for head in range(2):
        joint = np.concatenate([q_nope, q_rope], 1)[head : head + 1]
        expanded = reference.attend(joint, key[:, head], value[:, head], 0.5)[0][0]
        np.testing.assert_allclose(W_UV[head] @ out[0, head], expanded, atol=2e-6)


@together(
    ("slots", "sinks", "lse", "latent"),
    [
        ([0, 2, 3], None, [2.2080201, 1.9076060], [[1.3836517, 0.7673035], [1.6652410, 0.9099694]]),
        ([4, -1, 1], None, [0.9740770, 1.0485874], [[0, 0.2449187], [0, 0.9051483]]),
        ([-1, -1, -1], None, [-np.inf, -np.inf], [[0, 0], [0, 0]]),
        ([0, 2, 3], [0, 1], [2.3123063, 2.2465673], [[1.2466251, 0.6913154], [1.1865009, 0.6483623]]),
    ],
)
@on_every_isa
def test_worked_example_variants_a9_sparse_attention(slots, sinks, lse, latent):
    rows = np.array([[1, 0, 1], [0, 1, 0], [2, 1, -1], [1, 1, 1], [0, -1, 2]], np.float32)
    query = np.array([[[1, 1, 0.5], [0, 2, -1]]], np.float32)
    out, found = latent_attention(
        query[..., :2], query[..., 2:], rows[None], None, scale=0.5, indices=[slots], sinks=sinks, return_lse=True
    )
    np.testing.assert_allclose(found[0], lse, atol=2e-6)
    np.testing.assert_allclose(out[0], latent, atol=2e-6)


# ---- rows of sequences


@together("format", [None, *FORMATS])
@together("dtype", DTYPES)
@on_every_isa
def test_gathered_rows(format, dtype):
    case = make_case((33, 0, 5), format=format, scale=0.37)
    got = gather_latent(case.planes[0], None, case.table, case.seq_lens, dtype=dtype, **case.options)
    expected = np.concatenate(
        [case.rows[row].reshape(-1, 576)[:n] for row, n in zip(case.table, (33, 0, 5), strict=True)]
    )
    assert got.dtype == DTYPES[dtype]
    assert got.tobytes() == expected.astype(np.float32).astype(DTYPES[dtype]).tobytes()


@together("format", [None, *FORMATS])
def test_rows_are_gathered_into_rows_of_any_stride(format):
    case = make_case((9, 0, 5), format=format, scale=0.37)
    table = np.where(case.table == case.table[0, 0], 0, case.table)  # the first block is a hole
    expected = gather_latent(case.planes[0], None, table, case.seq_lens, **case.options)
    memory = np.full((14, 600), -7, np.float32)
    for out in (memory[:, 5:581], memory[::-1, 5:581]):
        assert gather_latent(case.planes[0], None, table, case.seq_lens, out=out, **case.options) is out
        np.testing.assert_array_equal(out, expected)
        assert (memory[:, :5] == -7).all()
        assert (memory[:, 581:] == -7).all()


@on_every_isa
def test_every_code_of_fp8_ds_mla():
    """Zeros stay zeros and NaN stays NaN with every scale, whatever a scale does to the exponents of the others."""
    row = np.zeros(656, np.uint8)
    row[:512] = np.arange(512) % 256
    row[512:528] = np.array([1, 2.0**-5, 2.0**20, 2.0**-100], np.float32).view(np.uint8)
    got = gather_latent(np.tile(row, (2, 1, 1)), None, [[1]], [1])
    np.testing.assert_array_equal(got[0].astype(np.float64), reference.read_fp8_ds_mla(row.tobytes()))
