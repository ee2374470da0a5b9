"""Latent attention, dense and sparse, against float64, with poisoned outputs and unread slots of NaN."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, gather_latent, latent_attention, paged_attention, plan_attention, write_latent
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close, random_numbers
from tests.ops.instruction_sets import on_every_isa
from tests.reference import latent as reference
from tests.together import together

PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
FORMATS = ("float8_e4m3fn", *PACKED)


@dataclass
class Case:
    """The arguments of a call."""

    query: np.ndarray
    rope: np.ndarray
    planes: tuple[Any, Any]
    table: np.ndarray
    seq_lens: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    format: str | None = None

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows that the cache holds, dequantised; NaN where nothing was written."""
        return dequantised(self.planes, self.format, self.options.get("latent_scale", 1.0))

    @property
    def latent_dim(self) -> int:
        return self.query.shape[2]

    @property
    def joint(self) -> np.ndarray:
        return np.concatenate([self.query, self.rope], 2).astype(np.float64)

    def check(self, scale: float = 0.07, **more: Any) -> None:
        """Compare a dense call with the oracle."""
        out = np.full(self.query.shape, np.nan, self.query.dtype)
        options = {**self.options, **more}
        lists = (self.table, self.seq_lens)
        arrays = (self.joint, self.rows, self.latent_dim, *lists)
        got, lse = latent_attention(
            self.query, self.rope, *self.planes, *lists, out=out, return_lse=True, scale=scale, **options
        )
        assert got is out
        options = {k: v for k, v in options.items() if k not in ("latent_scale", "format", "plan")}
        expected = reference.latent_attention(*arrays, scale=scale, **options)
        size = None
        if self.latent_dim < 16:
            size = reference.latent_attention(*arrays, scale=scale, absolute=True, **options)[0]
        assert_output_close(out, expected[0], size)
        assert_lse_close(lse, expected[1], str(self.query.dtype))


def make_case(
    seq_lens: tuple[int, ...] = (70, 33, 1, 300),
    query_lens: tuple[int, ...] | None = None,
    *,
    heads: int = 3,
    dims: tuple[int, int] = (512, 64),
    block_size: int = 16,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    format: str | None = None,
    joint: bool = True,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Return random sequences in scattered blocks; slots that belong to none are NaN, or bytes of NaN."""
    rng = np.random.default_rng(seed)
    latent_dim, rope_dim = dims
    lens = np.array(seq_lens, np.int32)
    width = max(-(-int(n) // block_size) for n in [*lens, 1])
    num_blocks = len(lens) * width + 3
    ids = rng.permutation(np.arange(1, num_blocks))[: len(lens) * width]
    table = ids.reshape(len(lens), width).astype(np.int32)
    cache_dtype = cache_dtype or dtype
    planes: tuple[Any, Any]
    if format in PACKED:
        planes = (np.full((num_blocks, block_size, PACKED[format]), 0xFF, np.uint8), None)
    else:
        stored = ml_dtypes.float8_e4m3fn if format else DTYPES[cache_dtype]
        shape = (num_blocks, block_size)
        if joint:
            planes = (np.full((*shape, latent_dim + rope_dim), np.nan, stored), None)
        else:
            planes = tuple(np.full((*shape, dim), np.nan, stored) if dim else None for dim in dims)
    factor = {"scale": scale} if format == "float8_e4m3fn" else {}
    for row, n in zip(table, lens, strict=True):
        new = random_numbers(rng, (n, latent_dim + rope_dim), np.dtype(np.float32))
        slots = row[np.arange(n) // block_size] * block_size + np.arange(n) % block_size
        write_latent(new[:, :latent_dim], new[:, latent_dim:], *planes, slots, **factor)
    queries = len(lens) if query_lens is None else sum(query_lens)
    query = random_numbers(rng, (queries, heads, latent_dim), DTYPES[dtype]).copy()
    rope = random_numbers(rng, (queries, heads, rope_dim), DTYPES[dtype]).copy()
    options: dict[str, Any] = {}
    if query_lens is not None:
        options["cu_query_lens"] = np.cumsum([0, *query_lens]).astype(np.int32)
    if factor:
        options["latent_scale"] = scale
    return Case(query, rope, planes, table, lens, options, format)


def dequantised(planes: tuple[Any, Any], format: str | None, scale: float) -> np.ndarray:
    latent, rope = planes
    if format in PACKED:
        read = getattr(reference, f"read_{format}")
        return np.array([[read(row.tobytes()) for row in block] for block in latent])
    joint = latent if rope is None else np.concatenate([latent, rope], 2)
    return joint.astype(np.float64) if format is None else (joint.astype(np.float32) * np.float32(scale)).astype(float)


MIXED = {"seq_lens": (70, 33, 1, 16, 300, 0), "query_lens": (7, 1, 1, 16, 40, 2)}


@together("dtype", DTYPES)
@together("cache_dtype", DTYPES)
@on_every_isa
def test_every_pair_of_dtypes(dtype, cache_dtype):
    make_case(dtype=dtype, cache_dtype=cache_dtype, dims=(96, 32)).check()


@together("format", FORMATS)
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_every_format(format, dtype):
    make_case(seq_lens=(70, 33, 1), format=format, dtype=dtype, scale=0.37).check()


@together("seed", range(4))
@on_every_isa
def test_scores_at_the_scale_of_deepseek_v3(seed):
    """Scores of 576 products are large, so that their rounding errors show in the output."""
    make_case((300, 200), heads=8, dtype="float32", seed=seed).check(scale=0.1352)


@together("heads", [1, 2, 5, 16, 17, 33, 128])
@on_every_isa
def test_every_number_of_heads(heads):
    make_case(heads=heads).check()


@together("dims", [(512, 64), (3, 2), (33, 5), (16, 16), (17, 64), (100, 1), (512, 0), (2, 0), (45, 0)])
@together("joint", [True, False])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_every_shape(dims, joint, dtype):
    make_case(dims=dims, joint=joint, dtype=dtype, block_size=5, **MIXED).check()


@together("format", [None, "float8_e4m3fn"])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_latents_without_a_rotary_part(format, dtype):
    """None means the same as arrays without numbers, for dense calls and for lists."""
    case = make_case(dims=(45, 0), dtype=dtype, format=format, scale=0.5, heads=16, **MIXED)
    case.check()
    options = {"scale": 0.07, "return_lse": True}
    lists = (case.table, case.seq_lens)
    for rest in (lists, ()):
        more = {
            **options,
            **(case.options if rest else {"indices": np.tile(case.table[4, :3] * 16, (len(case.query), 1))}),
        }
        more |= {} if format is None else {"latent_scale": 0.5}
        parts = [latent_attention(case.query, rope, *case.planes, *rest, **more) for rope in (case.rope, None)]
        for given, none in zip(*parts, strict=True):
            assert given.tobytes() == none.tobytes()


@together(
    ("rope", "error", "words"),
    [
        (np.zeros((4, 2, 0), np.float32), errors.ShapeError, "axis 1 must have length 3: the heads of query_latent"),
        (np.zeros((3, 3, 0), np.float32), errors.ShapeError, "axis 0 must have length 4"),
        (np.zeros((4, 3, 0), np.float16), errors.UnsupportedDtype, "query_latent is float32 and query_rope float16"),
        (np.zeros((4, 3, 1), np.float32), errors.ShapeError, "latent_dim \\+ rope_dim"),
    ],
)
def test_a_rotary_part_that_does_not_fit_is_refused(rope, error, words):
    case = make_case(dims=(45, 0), dtype="float32")
    with pytest.raises(error, match=words):
        latent_attention(case.query, rope, *case.planes, case.table, case.seq_lens, scale=1.0)


@together("block_size", [1, 7, 16, 64, 100])
def test_every_block_size(block_size):
    make_case(block_size=block_size, heads=16, **MIXED).check()


@together("options", [{"causal": False}, {"window": 9}, {"window": 200}, {"sinks": [0.5, -2.0, 30.0]}])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_options(options, dtype):
    make_case(dims=(48, 16), dtype=dtype, **MIXED).check(**options)


@together("invariant", [False, True])
def test_splits_and_plans(invariant):
    case = make_case((5000, 3, 1500), dims=(64, 16), dtype="float32", heads=16)
    plan = plan_attention(
        None, case.seq_lens, num_query_heads=16, num_kv_heads=1, num_workers=4, batch_invariant=invariant
    )
    case.check(plan=plan)


@together("window", [None, 1100])
@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_prompts_past_several_folds(dtype, window):
    """The items of a long prompt are not split, so their sums are folded every 1,024 keys."""
    case = make_case((2300, 1025), (9, 1), dims=(48, 16), dtype=dtype, heads=16)
    lists = (case.options["cu_query_lens"], case.seq_lens)
    plan = plan_attention(*lists, num_query_heads=16, num_kv_heads=1, window=window, batch_invariant=True)
    case.check(plan=plan, **({} if window is None else {"window": window}))


def test_batch_invariant_rows_have_the_same_bits_in_any_batch():
    case = make_case((2500, 3, 1500), dims=(64, 16), heads=6)

    def run(rows: list[int]) -> np.ndarray:
        plan = plan_attention(None, case.seq_lens[rows], num_query_heads=6, num_kv_heads=1, batch_invariant=True)
        return latent_attention(
            case.query[rows], case.rope[rows], *case.planes, case.table[rows], case.seq_lens[rows], scale=1, plan=plan
        )

    whole = run([0, 1, 2])
    for i in range(3):
        assert run([i]).tobytes() == whole[i : i + 1].tobytes()


@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_a_nan_reaches_only_queries_that_see_it(dtype):
    case = make_case((40,), (8,), dims=(32, 16), dtype=dtype)
    last = case.table[0][37 // 16] * 16 + 37 % 16
    case.planes[0].reshape(-1, 48)[last] = np.nan
    out = latent_attention(
        case.query, case.rope, *case.planes, case.table, case.seq_lens, scale=1.0, **case.options
    ).astype(np.float32)
    assert np.isfinite(out[:5]).all()
    assert np.isnan(out[5:]).all()


@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_a_nan_of_an_earlier_call_reaches_no_later_one(dtype):
    """The rows of a tile are copied to scratch memory, which later tiles fill in part."""
    poisoned = make_case((64,), dims=(32, 16), dtype=dtype, block_size=5)
    poisoned.planes[0][...] = np.nan
    lists = (poisoned.table, poisoned.seq_lens)
    assert np.isnan(latent_attention(poisoned.query, poisoned.rope, *poisoned.planes, *lists, scale=1.0)).all()
    make_case((5,), dims=(32, 16), dtype=dtype, block_size=5).check()


@together("dtype", ["float32", "bfloat16"])
@on_every_isa
def test_planes_of_padded_rows(dtype):
    """The rows of the latent plane are as far apart as rows that hold both parts."""
    case = make_case((70, 33), dims=(64, 32), dtype=dtype, joint=False)
    wide = np.full((*case.planes[0].shape[:2], 96), np.nan, case.planes[0].dtype)
    wide[..., :64] = case.planes[0]
    case.planes = (wide[..., :64], case.planes[1])
    case.check()


def test_agrees_with_paged_attention_on_views():
    case = make_case(dtype="float32", **MIXED)
    cache = case.planes[0][:, :, None]
    query = np.concatenate([case.query, case.rope], 2)
    expected = paged_attention(query, cache, cache[..., :512], case.table, case.seq_lens, scale=0.1, **case.options)
    got = latent_attention(case.query, case.rope, *case.planes, case.table, case.seq_lens, scale=0.1, **case.options)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@together(("latent_scale", "rope_scale"), [(0.01, 0.5), (1.0, 0.003)])
def test_rope_codes_of_another_factor_take_it_from_the_query(latent_scale, rope_scale):
    rng = np.random.default_rng(0)
    latent, rope = (rng.standard_normal((4, 16, dim)).astype(ml_dtypes.float8_e4m3fn) for dim in (512, 64))
    query, query_rope = (rng.standard_normal((1, 16, dim)).astype(np.float32) for dim in (512, 64))
    got = latent_attention(
        query,
        query_rope * (rope_scale / latent_scale),
        latent,
        rope,
        [[2, 1]],
        [20],
        scale=0.05,
        latent_scale=latent_scale,
    )
    planes = [plane.astype(np.float32) * factor for plane, factor in ((latent, latent_scale), (rope, rope_scale))]
    expected = latent_attention(query, query_rope, *planes, [[2, 1]], [20], scale=0.05)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * latent_scale)


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


# ---- refusals


def test_scale_is_mandatory():
    case = make_case((5,), dims=(32, 16))
    for given in ({}, {"scale": None}):
        with pytest.raises(errors.UnsupportedOption, match=r"scale is missing; give qk_head_dim \*\* -0.5"):
            latent_attention(case.query, case.rope, *case.planes, case.table, case.seq_lens, **given)


@together(
    ("change", "error", "words"),
    [
        (lambda c: {"query_rope": c.rope[:, :, :3]}, errors.ShapeError, "latent_dim + rope_dim"),
        (lambda c: {"query_rope": c.rope[:, :1]}, errors.ShapeError, "heads of query_latent"),
        (lambda c: {"query_rope": c.rope.astype(np.float32)}, errors.UnsupportedDtype, "one dtype"),
        (
            lambda c: {"latent_cache": np.zeros(c.planes[0].shape, np.int32)},
            errors.UnsupportedDtype,
            "latent_cache is int32",
        ),
        (lambda c: {"format": "fp8_ds_mla"}, errors.UnsupportedOption, "leave format out"),
        (lambda c: {"format": "fp9"}, errors.UnsupportedOption, "use one of float8_e4m3fn"),
        (lambda c: {"latent_scale": 2.0}, errors.UnsupportedOption, "takes no factor"),
        (lambda c: {"seq_lens": None}, errors.UnsupportedOption, "seq_lens is None"),
        (lambda c: {"seq_lens": [10**5]}, errors.ShapeError, "too narrow"),
        (lambda c: {"block_table": c.table + 100}, errors.InvalidBlock, "block_table[0, 0]"),
        (lambda c: {"out": c.planes[0].reshape(-1)[:96].reshape(1, 3, 32)}, errors.UnsupportedOption, "latent_cache"),
    ],
)
def test_refusals(change, error, words):
    case = make_case((5,), dims=(32, 16))
    arguments = {
        "query_latent": case.query, "query_rope": case.rope, "latent_cache": case.planes[0], "rope_cache": None,
        "block_table": case.table, "seq_lens": case.seq_lens, "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(error) as raised:
        latent_attention(**(arguments | change(case)))
    assert words in str(raised.value)
