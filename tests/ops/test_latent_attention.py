"""Latent attention against float64, with poisoned outputs and unread slots of NaN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pagecore import errors, latent_attention, paged_attention, plan_attention
from tests.ops.cases import DTYPES
from tests.ops.instruction_sets import on_every_isa
from tests.ops.latent_cases import FORMATS, make_case
from tests.together import together

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
