"""Head dims that the matrix kernels pad with zeros: no access lies past the dims of a call."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.ops.cuda.attention.variants import use_prefill_variant
from tests.cuda.attention_cases import (
    BF16,
    F16,
    MIXED,
    OPTIONS,
    SINKS,
    DeviceCase,
    check,
    compare,
    in_last_slot,
    poisoned,
)
from tests.cuda.matrix import cases
from tests.ops.cases import Case, Shape, among, make_case
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

ELEMENTS = {"bfloat16": "pc_bfloat16", "float16": "pc_half"}
# Dims of the kernel instance that serves the dims of a call.
INSTANCES = {
    (80, 80): "96",
    (192, 128): "192,128",
    (96, 96): "96",
    (112, 112): "128",
    (160, 160): "192",
    (192, 192): "192",
    (8, 16): "64",
    (40, 64): "64",
    (64, 128): "128",
    (128, 64): "128",
    (104, 72): "128",
    (136, 8): "192,128",
    (160, 112): "192,128",
    (128, 136): "192",
    (200, 256): "256",
    (248, 88): "256",
}
DIMS = cases([(80, 80), (192, 128)], list(INSTANCES))
EVERY_DIM = pytest.mark.parametrize("dims", DIMS, ids=lambda dims: f"{dims[0]}x{dims[1]}")
EVERY_DTYPE = pytest.mark.parametrize("dtype", cases([BF16], [BF16, F16]), ids=lambda d: d["query_dtype"])

LONG = Shape(seq_lens=(1100, 1030, 70), query_lens=(33, 1, 40), heads=(4, 1), **BF16)


def check_poisoned(cuda: Any, case: Case, **plan: Any) -> None:
    """Compare with the oracle; the memory around the output rows must keep its bytes."""
    there = DeviceCase(cuda, poisoned(case))
    tokens, heads, dim = there.shape
    wide = cuda.empty((tokens, heads, dim + 16), str(case.query.dtype))
    more = {"plan": there.plan(**plan)} if plan else {}
    compare(case, there.run(out=wide[:, :, 8 : 8 + dim], **more))
    written = np.ascontiguousarray(cuda.get(wide)).view(np.uint16)
    assert (written[..., :8] == 0xFFFF).all()
    assert (written[..., 8 + dim :] == 0xFFFF).all()


def instance_name(entry: str, dims: tuple[int, int], dtype: dict[str, str], options: str = "Plain") -> str:
    key, _, value = INSTANCES[dims].partition(",")
    return f"{entry}<{ELEMENTS[dtype['query_dtype']]},{key},{options}{',' + value if value else ''}>"


@EVERY_DIM
@EVERY_DTYPE
def test_rows_surrounded_by_nan_are_read_and_written_within_their_dims(cuda, dims, dtype):
    check_poisoned(cuda, make_case(replace(MIXED, dims=dims, **dtype)))
    if cuda.is_emulated:
        expected = [instance_name(entry, dims, dtype) for entry in ("decode", "prefill")]
        assert cuda.runtime.launched == ["plan", *expected]


@EVERY_DIM
def test_the_last_row_of_an_array_is_not_read_past_its_end(cuda, dims):
    """The last slot of contiguous arrays is in use: the emulator reports a read after it."""
    for query_lens in ((64, 1), (1, 64)):
        check(cuda, in_last_slot(make_case(replace(MIXED, seq_lens=(64, 64), query_lens=query_lens, dims=dims)), 0))


@EVERY_DIM
def test_only_the_dims_of_a_call_are_copied_and_without_bank_conflicts(cuda, dims):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts copied bytes")
    lens = (70, 17, 300)
    decode = DeviceCase(cuda, make_case(Shape(seq_lens=lens, heads=(8, 2), dims=dims, **BF16)))
    decode.run()
    row_bytes = 2 * 2 * sum(dims)  # key and value of two heads, 2 bytes each
    assert cuda.runtime.counts["copied_bytes"] == sum(lens) * row_bytes
    before = dict(cuda.runtime.counts)
    prompt = DeviceCase(cuda, make_case(Shape(seq_lens=(64,), query_lens=(32,), heads=(8, 2), dims=dims, **BF16)))
    prompt.run()
    queries = 32 * 8 * 2 * dims[0]
    assert cuda.runtime.counts["copied_bytes"] - before["copied_bytes"] == 64 * row_bytes + queries
    assert cuda.runtime.counts["matrix_loads"] > before["matrix_loads"] > 0
    assert cuda.runtime.counts["matrix_conflicts"] == 0


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", cases([(80, 80)], [(80, 80), (192, 128), (160, 160), (8, 16)]), ids=str)
def test_every_option_keeps_the_bounds(cuda, dims, name):
    check_poisoned(cuda, make_case(replace(MIXED, dims=dims), **OPTIONS[name]))


@pytest.mark.parametrize("layout", cases(["HND"], ["NHD", "HND", "blockwise", "interleaved", "reversed"]))
@EVERY_DIM
def test_every_layout(cuda, dims, layout):
    check(cuda, make_case(replace(MIXED, dims=dims, layout=layout, index_dtype="int64", shuffle_rows=True)))


@pytest.mark.parametrize("group", cases([5], [1, 2, 5, 8, 16]))
@EVERY_DIM
def test_decode_of_every_group(cuda, dims, group):
    check_poisoned(cuda, make_case(Shape(seq_lens=(70, 17, 300, 0), heads=(2 * group, 2), dims=dims, **BF16)))


@pytest.mark.parametrize("options", [{}, {"window": 1500, "sinks": SINKS[:4]}], ids=["plain", "window and sinks"])
@EVERY_DIM
def test_long_contexts_are_split_and_joined(cuda, dims, options):
    check_poisoned(cuda, make_case(replace(LONG, dims=dims), **options), num_workers=12)


@EVERY_DIM
def test_a_sequence_alone_gives_the_bits_that_it_gives_in_a_batch(cuda, dims):
    """Batch-invariant: with few workers one folds the pieces of a row; with many each piece has its own worker."""
    case = poisoned(make_case(replace(LONG, dims=dims)))
    expected = run_invariant(cuda, case)
    for i, num_workers in itertools.product(range(len(case.seq_lens)), (2, 50)):
        single, rows = among(case, np.array([i]))
        for got, want in zip(run_invariant(cuda, single, num_workers=num_workers), expected, strict=True):
            np.testing.assert_array_equal(got, want[rows])
    compare(case, [part.view(kind) for part, kind in zip(expected, (case.query.dtype, np.float32), strict=True)])


def run_invariant(cuda: Any, case: Case, **more: Any) -> list[np.ndarray[Any, Any]]:
    """Return the bits of output and lse."""
    there = DeviceCase(cuda, case)
    got = there.run(plan=there.plan(batch_invariant=True, **more))
    return [np.ascontiguousarray(part).view(np.uint16 if part.itemsize == 2 else np.uint32) for part in got]


@pytest.mark.parametrize("query_lens", [(4,), (60,)], ids=["drafts", "prompts"])
@EVERY_DIM
def test_a_nan_among_the_values_reaches_only_the_queries_that_attend_to_it(cuda, dims, query_lens):
    case = make_case(Shape(seq_lens=(130,), query_lens=query_lens, heads=(4, 1), dims=dims, **BF16))
    clean = DeviceCase(cuda, case).run()[0].astype(np.float32)
    case.value_cache[case.block_table[0, 129 // 16], 129 % 16, :, dims[1] - 1] = np.nan
    got = DeviceCase(cuda, poisoned(case)).run()[0].astype(np.float32)
    assert np.isnan(got[-1, :, -1]).all()
    assert not np.isnan(got[-1, :, :-1]).any()
    np.testing.assert_array_equal(got[:-1], clean[:-1])


# ---- variants of the prefill kernel

VARIANT = replace(MIXED, dims=(128, 128))


def nan_at_an_edge(shape: Shape) -> Case:
    """Return a case with a NaN in the value of the last key, to which one query attends."""
    case = make_case(shape)
    case.value_cache[case.block_table[0, 199 // 16], 199 % 16, :, 3] = np.nan
    return case


@pytest.mark.parametrize(
    ("name", "dims", "options"),
    in_turn(
        ["SlotsFirst", "WholeTile", "SlotsFirstWholeTile"],
        [(128, 128), (112, 104)],
        over=[[{}, OPTIONS["both sides"], OPTIONS["negative scale"]]],
    ),
    ids=str,
)
def test_variants_of_prefill_keep_the_bounds(cuda, name, dims, options):
    with use_prefill_variant(name):
        check_poisoned(cuda, make_case(replace(VARIANT, dims=dims), **options))
    if cuda.is_emulated:
        assert cuda.runtime.launched[-1] == f"prefill<pc_bfloat16,128,{name}>"


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("make", [make_case, nan_at_an_edge], ids=["finite", "nan"])
def test_variants_with_the_same_order_of_sums_have_the_same_bits(cuda, make, invariant):
    bits = {}
    for shape in (VARIANT, replace(LONG, dims=(128, 128))) if make is make_case else (VARIANT,):
        there = DeviceCase(cuda, make(shape))
        for name in ("Plain", "SlotsFirst", "WholeTile", "SlotsFirstWholeTile"):
            with use_prefill_variant(name):
                out, lse = there.run(plan=there.plan(batch_invariant=invariant, num_workers=12))
            bits[name] = [np.ascontiguousarray(out).view(np.uint16), lse.view(np.uint32)]
        for one, other in (("Plain", "SlotsFirst"), ("WholeTile", "SlotsFirstWholeTile")):
            for got, expected in zip(bits[one], bits[other], strict=True):
                np.testing.assert_array_equal(got, expected)


def test_a_nan_reaches_only_the_queries_that_attend_to_it_in_every_variant(cuda):
    case = nan_at_an_edge(VARIANT)
    for name in ("SlotsFirst", "WholeTile"):
        with use_prefill_variant(name):
            got = DeviceCase(cuda, case).run()[0].astype(np.float32)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(case.expect()[0]))


def test_a_variant_without_an_instance_is_refused_and_the_default_returns_after_its_block(cuda):
    there = DeviceCase(cuda, make_case(MIXED))
    with pytest.raises(UnsupportedOption, match=r"expected one of Plain, SlotsFirst.* got 'Fast'"):
        use_prefill_variant("Fast").__enter__()
    with use_prefill_variant("SlotsFirst"):
        with pytest.raises(UnsupportedOption, match="'SlotsFirst' has no instance prefill<pc_bfloat16,64,SlotsFirst>"):
            there.run()
        capped = DeviceCase(cuda, make_case(VARIANT, softcap=5.0))
        with pytest.raises(UnsupportedOption, match="has no instance prefill<pc_bfloat16,128,Full>"):
            capped.run()
        assert (cuda.get(there.out).view(np.uint16) == 0xFFFF).all()
    compare(there.case, there.run())
