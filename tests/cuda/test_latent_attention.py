"""latent_attention on CUDA arrays, dense and sparse, against float64: matrix instructions and the general kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagecore
from pagecore import errors, latent_attention, plan_attention
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.ops.cases import DTYPES, assert_lse_close, assert_output_close
from tests.ops.latent_cases import FORMATS, Case, make_case
from tests.reference import latent as reference

LISTS = ("block_table", "seq_lens", "indices", "index_lens", "rows", "cu_query_lens")
MIXED: dict[str, Any] = {"seq_lens": (70, 33, 1, 16, 130, 0), "query_lens": (7, 1, 1, 16, 20, 2)}
SMALL: dict[str, Any] = {"seq_lens": (70, 0, 33), "heads": 2}


class Arrays:
    """The arrays of a case in device memory. `out` is filled with 0xFF bytes."""

    def __init__(self, cuda: Kit, case: Case, on_host: tuple[str, ...] = ()) -> None:
        self.cuda, self.case = cuda, case
        self.query, self.rope = cuda.put(case.query), cuda.put(case.rope)
        self.planes = tuple(None if plane is None else cuda.put(plane) for plane in case.planes)
        self.out = cuda.empty(case.query.shape, str(case.query.dtype))
        lists = {"block_table": case.table, "seq_lens": case.seq_lens, **case.options}
        self.lists = {
            name: cuda.put(value) if name in LISTS and name not in on_host else value for name, value in lists.items()
        }

    def call(self, **more: Any) -> Any:
        options = {"scale": 0.07, "out": self.out, **self.lists, **more}
        return latent_attention(self.query, self.rope, *self.planes, **options)

    def run(self, **more: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        got, lse = self.call(return_lse=True, **more)
        assert got is more.get("out", self.out)
        return self.cuda.get(got), self.cuda.get(lse)

    def plan(self, **more: Any) -> pagecore.AttentionPlan:
        heads = {"num_query_heads": self.case.query.shape[1], "num_kv_heads": 1, "device": self.cuda.device}
        return plan_attention(self.case.options.get("cu_query_lens"), self.case.seq_lens, **{**heads, **more})

    @property
    def kernel(self) -> str:
        return str(self.cuda.runtime.launched[-1]) if self.cuda.is_emulated else ""


def compare(case: Case, got: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], **options: Any) -> None:
    options = {**case.options, **options}
    options.pop("latent_scale", None)
    arrays = (case.joint, case.rows, case.latent_dim, case.table, case.seq_lens)
    expected = reference.latent_attention(*arrays, scale=0.07, **options)
    size = reference.latent_attention(*arrays, scale=0.07, absolute=True, **options)[0]
    assert_output_close(got[0], expected[0], size if case.latent_dim < 16 else None)
    assert_lse_close(got[1], expected[1], str(case.query.dtype))


def check(cuda: Kit, case: Case, *, kernel: str = "", plan: dict[str, Any] | None = None, **options: Any) -> None:
    there = Arrays(cuda, case)
    more = dict(options)
    if plan is not None:
        kinds = {name: options[name] for name in ("causal", "window") if name in options}
        more["plan"] = there.plan(**kinds, **plan)
    if "sinks" in more:
        more["sinks"] = cuda.put(np.asarray(more["sinks"], np.float32))
    compare(case, there.run(**more), **options)
    if cuda.is_emulated:
        assert there.kernel.startswith(kernel)


def listed_slots(case: Case, width: int, seed: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return lists of written slots with holes, and their lengths; entries past a length are out of range."""
    rng = np.random.default_rng(seed)
    size = case.rows.shape[1]
    written = np.concatenate(
        [
            row[np.arange(n) // size] * size + np.arange(n) % size
            for row, n in zip(case.table, case.seq_lens, strict=True)
        ]
    )
    indices = np.array([rng.permutation(written)[:width] for _ in case.query], np.int32)
    indices[rng.random(indices.shape) < 0.3] = -1
    lens = rng.integers(0, width + 1, len(indices)).astype(np.int32)
    lens[0] = width
    for row, n in zip(indices, lens, strict=True):
        row[n:] = 10**6
    return indices, lens


# ---- matrix instructions


@pytest.mark.parametrize("heads", cases([1, 16, 40], [1, 5, 16, 17, 40, 64, 128]))
@pytest.mark.parametrize("dtype", cases(["bfloat16"], ["bfloat16", "float16"]))
def test_every_number_of_heads(cuda, heads, dtype):
    check(cuda, make_case((70, 0, 33), heads=heads, dtype=dtype), kernel="latent<")


@pytest.mark.parametrize("format", [None, "fp8_ds_mla"])
def test_rows_are_copied_once_for_16_heads_and_twice_for_40(cuda, format):
    row_bytes = 1152 if format is None else 656
    for heads, times in ((16, 1), (40, 2)):
        there = Arrays(cuda, make_case((160, 96), heads=heads, format=format))
        if not cuda.is_emulated:
            continue
        before = cuda.runtime.counts["copied_bytes"]
        there.run()
        assert cuda.runtime.counts["copied_bytes"] - before == times * 256 * row_bytes
        assert cuda.runtime.counts["matrix_conflicts"] == 0


@pytest.mark.slow
def test_the_heads_of_a_large_model(cuda):
    check(cuda, make_case((35,), heads=128), kernel="latent<pc_bfloat16,512,32")


@pytest.mark.parametrize("block_size", cases([1, 100], [1, 16, 64, 100]))
@pytest.mark.parametrize("joint", [True, False])
def test_every_block_size(cuda, block_size, joint):
    check(cuda, make_case(heads=3, dims=(256, 64), block_size=block_size, joint=joint, **MIXED), kernel="latent<")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("heads", cases([2], [2, 40]))
@pytest.mark.parametrize("dtype", cases(["bfloat16"], ["bfloat16", "float16"]))
def test_every_format(cuda, format, heads, dtype):
    case = make_case((70, 0, 33), format=format, dtype=dtype, heads=heads, scale=0.37)
    check(cuda, case, kernel="general_latent" if (format, dtype) == ("fp8_ds_mla", "float16") else "latent<")


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": 9}, {"window": 40}, {"sinks": [0.5, -2.0, 30.0]}], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_options(cuda, options, dtype):
    check(
        cuda, make_case(heads=3, dims=(256, 64) if dtype == "bfloat16" else (48, 16), dtype=dtype, **MIXED), **options
    )


@pytest.mark.parametrize(("dtype", "dims"), [("bfloat16", (256, 64)), ("float32", (48, 16))])
def test_a_sink_beyond_all_scores_leaves_no_weight_to_rows(cuda, dtype, dims):
    case = make_case((40, 1100), heads=3, dims=dims, dtype=dtype)
    sinks = np.array([np.inf, 0.5, 3e38], np.float32)
    out, lse = Arrays(cuda, case).run(sinks=cuda.put(sinks))
    assert (out[:, ::2].astype(np.float32) == 0).all()
    assert (lse[:, ::2] == sinks[::2]).all()
    assert np.isfinite(out[:, 1].astype(np.float32)).all()
    case.planes[0][case.table[0, 0], 0] = np.nan
    out, lse = Arrays(cuda, case).run(sinks=cuda.put(sinks))
    assert np.isnan(lse[0]).all()
    assert np.isnan(out[0].astype(np.float32)).all()
    assert (lse[1, ::2] == sinks[::2]).all()


def test_a_negative_scale(cuda):
    case = make_case((40,), heads=2, dims=(256, 64))
    out, _ = Arrays(cuda, case).run(scale=-0.07)
    expected = reference.latent_attention(case.joint, case.rows, 256, case.table, case.seq_lens, scale=-0.07)
    assert_output_close(out, expected[0], None)


@pytest.mark.parametrize("heads", cases([4, 20], [4, 16, 20, 40]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_keys_are_split_among_workers(cuda, heads, dtype):
    case = make_case((1500, 3, 700), dims=(256, 64) if dtype == "bfloat16" else (64, 16), heads=heads, dtype=dtype)
    check(cuda, case, plan={"num_workers": 5}, sinks=np.linspace(-2, 3, heads))


@pytest.mark.slow
def test_a_sequence_is_split_among_many_workers(cuda):
    case = make_case((50 * 128,), heads=1, dims=(256, 64), block_size=64)
    check(cuda, case, plan={"num_workers": 50})


def bits(cuda: Kit, case: Case, **options: Any) -> list[bytes]:
    there = Arrays(cuda, case)
    out, lse = there.run(plan=there.plan(batch_invariant=True, **options))
    return [one.tobytes() + other.tobytes() for one, other in zip(out, lse, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_invariant_rows_have_the_same_bits_in_every_batch(cuda, dtype):
    dims = (256, 64) if dtype == "bfloat16" else (40, 16)
    case = make_case((2300, 3, 1100, 0), heads=6, dims=dims, dtype=dtype)
    whole = bits(cuda, case)
    for i in range(4):
        alone = replace(
            case, query=case.query[[i]], rope=case.rope[[i]], table=case.table[[i]], seq_lens=case.seq_lens[[i]]
        )
        assert bits(cuda, alone) == whole[i : i + 1]
        assert bits(cuda, alone, num_workers=1) == whole[i : i + 1]
    check(cuda, case, plan={"batch_invariant": True})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_value_that_is_not_finite_reaches_only_queries_that_see_it(cuda, dtype, value):
    dims = (256, 64) if dtype == "bfloat16" else (32, 16)
    case = make_case((40,), (8,), dims=dims, dtype=dtype)
    last = case.table[0][37 // 16] * 16 + 37 % 16
    clean, _ = Arrays(cuda, case).run()
    case.planes[0].reshape(-1, sum(dims))[last, 5] = value
    out, _ = Arrays(cuda, case).run()
    np.testing.assert_allclose(out[:5].astype(np.float32), clean[:5].astype(np.float32), rtol=2e-2, atol=2e-3)
    assert not np.isfinite(out[5:, :, 5].astype(np.float32)).all()


def test_rows_pick_from_a_larger_table(cuda):
    case = make_case(heads=2, dims=(256, 64))
    table = np.full((9, case.table.shape[1]), -7, np.int64)
    table[[8, 2, 5, 0]] = case.table
    there = Arrays(cuda, case)
    compare(case, there.run(block_table=cuda.put(table), rows=cuda.put(np.array([8, 2, 5, 0]))))


def test_padding_rows_are_cleared(cuda):
    case = make_case((20, 5), (2, 1), heads=3, dims=(256, 64))
    padded = replace(case, query=np.repeat(case.query, 2, 0), rope=np.repeat(case.rope, 2, 0))
    out, lse = Arrays(cuda, padded).run()
    assert not out[3:].astype(np.float32).any()
    assert np.isneginf(lse[3:]).all()
    assert_output_close(
        Arrays(cuda, case).run()[0],
        reference.latent_attention(case.joint, case.rows, 256, case.table, case.seq_lens, scale=0.07,
                                   cu_query_lens=case.options["cu_query_lens"])[0], None)  # fmt: skip


# ---- the general kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", cases(["float32"], list(DTYPES)))
def test_every_pair_of_dtypes(cuda, dtype, cache_dtype):
    check(cuda, make_case(dtype=dtype, cache_dtype=cache_dtype, dims=(96, 32), **SMALL), kernel="general_latent")


@pytest.mark.parametrize(
    "dims",
    cases([(3, 2), (33, 5), (45, 0)], [(3, 2), (33, 5), (16, 16), (100, 1), (512, 64), (640, 64), (45, 0), (512, 0)]),
    ids=str,
)
@pytest.mark.parametrize("joint", [True, False])
def test_every_shape(cuda, dims, joint):
    check(cuda, make_case(dims=dims, joint=joint, dtype="float32", block_size=5, **MIXED), kernel="general_latent")


@pytest.mark.parametrize("format", FORMATS)
def test_float32_queries_of_every_format(cuda, format):
    check(cuda, make_case(format=format, dtype="float32", scale=0.37, **SMALL), kernel="general_latent")


def test_rows_that_are_not_aligned(cuda):
    case = make_case(dims=(256, 64), **SMALL)
    held = np.full((*case.planes[0].shape[:2], 321), np.nan, case.planes[0].dtype)
    held[..., 1:] = case.planes[0]
    check(cuda, replace(case, planes=(held[..., 1:], None)), kernel="general_latent")


# ---- lists of slots


@pytest.mark.parametrize("format", cases([None, "fp8_ds_mla"], [None, *FORMATS]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("heads", cases([16], [3, 16, 40]))
@pytest.mark.parametrize("on_host", [(), ("index_lens",)], ids=["device", "host"])
def test_listed_slots(cuda, format, dtype, heads, on_host):
    case = make_case((90, 40, 1), format=format, dtype=dtype, heads=heads, block_size=5)
    indices, lens = listed_slots(case, 60)
    sinks = np.linspace(-2, 3, heads).astype(np.float32)
    there = Arrays(cuda, case)
    lists = {"block_table": None, "seq_lens": None, "indices": cuda.put(indices)}
    lists["index_lens"] = lens if on_host else cuda.put(lens)
    got = there.run(sinks=cuda.put(sinks), **lists)
    expected = reference.sparse_attention(case.joint, case.rows, 512, indices, lens, scale=0.07, sinks=sinks)
    assert_output_close(got[0], expected[0], None)
    assert_lse_close(got[1], expected[1], dtype)


def test_long_lists_in_a_plan(cuda):
    case = make_case((900, 40), heads=4, dims=(256, 64))
    indices, lens = listed_slots(case, 700)
    plan = plan_attention(
        None, lens, num_query_heads=4, num_kv_heads=1, causal=False, device=cuda.device, num_workers=4
    )
    there = Arrays(cuda, case)
    got = there.run(block_table=None, seq_lens=None, indices=cuda.put(indices), index_lens=cuda.put(lens), plan=plan)
    expected = reference.sparse_attention(case.joint, case.rows, 256, indices, lens, scale=0.07)
    assert_output_close(got[0], expected[0], None)
    assert_lse_close(got[1], expected[1], "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lists_of_nothing_give_zero_and_minus_infinity(cuda, dtype):
    case = make_case((5, 5), dims=(256, 64), dtype=dtype)
    indices = cuda.put(np.array([[-1, -1], [-1, -5]], np.int64))
    out, lse = Arrays(cuda, case).run(block_table=None, seq_lens=None, indices=indices)
    assert not out.astype(np.float32).any()
    assert np.isneginf(lse).all()


# ---- plans and refusals


def test_a_captured_call_follows_the_lengths_of_later_plans(cuda):
    case = make_case((70, 64), heads=3, dims=(256, 64))
    there = Arrays(cuda, case)
    heads = {"num_query_heads": 3, "num_kv_heads": 1}
    plan = pagecore.AttentionPlan(**heads, device=cuda.device, max_sequences=2, max_tokens=2)
    lens = cuda.put(case.seq_lens)

    def planned(seq_lens: Any) -> Any:
        return plan_attention(None, seq_lens, **heads, out=plan)

    planned(case.seq_lens)
    there.run(plan=plan, seq_lens=lens)
    later = np.array([33, 64], np.int32)
    replay = cuda.capture(lambda stream: there.call(plan=plan, seq_lens=lens, stream=stream))
    for each in (case, replace(case, seq_lens=later)):
        planned(each.seq_lens)
        cuda.runtime.copy(lens.pointer, each.seq_lens.ctypes.data, each.seq_lens.nbytes, 0)
        cuda.runtime.synchronize(0)
        replay()
        expected = reference.latent_attention(case.joint, case.rows, 256, case.table, each.seq_lens, scale=0.07)
        assert_output_close(cuda.get(there.out), expected[0], None)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c: {"plan": c.plan(num_query_heads=5)}, errors.ShapeError, "make a plan for num_query_heads=2"),
        (lambda c: {"plan": c.plan(causal=False)}, errors.ShapeError, "causal"),
        (lambda c: {"block_table": None, "indices": [[1], [2], [3]], "seq_lens": None, "index_lens": [1, 2, 1]},
         errors.ShapeError, r"index_lens\[1\] is 2"),
        (lambda c: {"latent_scale": 2.0}, errors.UnsupportedOption, "takes no factor"),
        (lambda c: {"out": c.case.query}, errors.DeviceError, "out is on cpu"),
        (lambda c: {"seq_lens": [10**5, 0, 0]}, errors.ShapeError, "too narrow"),
    ],
)  # fmt: skip
def test_refusals(cuda, change, error, words):
    there = Arrays(cuda, make_case(dims=(256, 64), **SMALL))
    with pytest.raises(error, match=words):
        there.run(**change(there))
    assert (cuda.get(there.out).view(np.uint8) == 0xFF).all()


def test_a_row_too_wide_for_the_device_is_refused(cuda):
    case = make_case((3,), dims=(1040, 16))
    with pytest.raises(errors.UnsupportedOption, match="at most 1024"):
        Arrays(cuda, case).run()


@pytest.mark.parametrize(
    ("indices", "words"), [([[20, 21, 20]], "lists before"), ([[1, 2, 10**6]], r"indices\[0, 2\] is 1000000")]
)
def test_debug_refuses_the_lists_that_the_host_refuses(cuda, indices, words):
    there = Arrays(cuda, make_case((5,), dims=(256, 64)))
    with pytest.raises(errors.InvalidBlock, match=words):  # lists on the host are checked in every call
        there.run(block_table=None, seq_lens=None, indices=indices)
    pagecore.debug(True)
    try:
        with pytest.raises(errors.InvalidBlock, match=words):
            there.run(block_table=None, seq_lens=None, indices=cuda.put(np.array(indices, np.int32)))
    finally:
        pagecore.debug(False)
    assert (cuda.get(there.out).view(np.uint8) == 0xFF).all()
