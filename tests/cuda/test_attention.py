"""paged_attention on CUDA arrays: prompts, mixed batches and chunks, with every option, layout and size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.cuda.attention_cases import BF16, DECODED, F16, INDICES, MIXED, OPTIONS, SINKS, DeviceCase, check, compare
from tests.cuda.matrix import cases
from tests.ops.cases import LAYOUTS, assert_lse_close, assert_output_close, make_case

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", cases([BF16], [BF16, F16]), ids=lambda d: d["query_dtype"])
def test_prompts_of_every_head_dim(cuda, dim, dtype):
    check(cuda, make_case(replace(MIXED, dims=(dim, dim), **dtype)))
    if cuda.is_emulated:
        name = {"bfloat16": "pc_bfloat16", "float16": "pc_half"}[dtype["query_dtype"]]
        assert cuda.runtime.launched == ["plan", f"decode<{name},{dim},Plain>", f"prefill<{name},{dim},Plain>"]


def test_prompts_in_float16(cuda):
    check(cuda, make_case(replace(MIXED, **F16)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", cases([MIXED], [replace(MIXED, dims=(d, d)) for d in (64, 128, 256)]), ids=str)
def test_every_option_keeps_the_bounds(cuda, shape, name):
    check(cuda, make_case(shape, **OPTIONS[name]))


@pytest.mark.parametrize("name", ["not causal", "window", "everything"])
def test_options_with_a_plan(cuda, name):
    check(cuda, make_case(MIXED, **OPTIONS[name]), plan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(cuda, layout):
    check(cuda, make_case(replace(MIXED, layout=layout, index_dtype="int64")))


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 17, 64])
def test_every_block_size(cuda, block_size):
    check(cuda, make_case(replace(MIXED, block_size=block_size), window=100))


@pytest.mark.parametrize("heads", [(n, 1) for n in (1, 2, 3, 5, 7, 8, 16)] + [(64, 1), (71, 1), (6, 6)], ids=str)
def test_every_group_of_query_heads(cuda, heads):
    shape = replace(MIXED, seq_lens=(150, 70), query_lens=(20, 3), heads=heads)
    check(cuda, make_case(shape, sinks=np.linspace(-2, 2, heads[0], dtype=np.float32)))


@pytest.mark.parametrize("dtype", [BF16, {"query_dtype": "float32"}], ids=["matrix instructions", "general"])
@pytest.mark.parametrize("sink", [np.inf, 3e38])
def test_a_sink_beyond_all_scores_leaves_no_weight_to_keys(cuda, sink, dtype):
    shape = replace(MIXED, seq_lens=(70, 40), query_lens=(9, 1), **dtype)
    case = make_case(shape, sinks=np.where(np.arange(shape.heads[0]) == 1, np.float32(sink), np.float32(0)))
    out, lse = DeviceCase(cuda, case).run()
    assert (out[:, 1].astype(np.float32) == 0).all()
    assert (lse[:, 1] == np.float32(sink)).all()
    assert np.isfinite(out[:, 0].astype(np.float32)).all()
    case.key_cache[case.block_table[0, 0], 0] = np.nan  # all queries of the first sequence attend to it
    out, lse = DeviceCase(cuda, case).run()
    assert np.isnan(lse[:9]).all()
    assert np.isnan(out[:9].astype(np.float32)).all()
    assert lse[9, 1] == np.float32(sink)


@pytest.mark.slow
def test_a_group_of_more_heads_than_a_tile_has_rows(cuda):
    """The heads form two chunks, the second one shorter, and the keys are split."""
    check(cuda, make_case(replace(MIXED, seq_lens=(600,), query_lens=(1,), heads=(258, 2))))


@pytest.mark.parametrize("seq_len", [1, 31, 32, 33, 63, 64, 65, 127, 129])
def test_prompts_around_the_edges_of_tiles(cuda, seq_len):
    check(cuda, make_case(replace(MIXED, seq_lens=(seq_len, 200), query_lens=(seq_len, seq_len), heads=(4, 1))))


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_longer_than_its_sequence_attends_to_all_stored_keys(cuda, causal):
    check(cuda, make_case(replace(MIXED, seq_lens=(3, 0, 17), query_lens=(60, 40, 90)), causal=causal))


@pytest.mark.parametrize("window", [1, 7, 64, (10, 0), (2**31 - 1, 2**31 - 1)])
def test_windows_exclude_the_keys_before_them(cuda, window):
    check(cuda, make_case(replace(MIXED, seq_lens=(700, 90), query_lens=(60, 9), heads=(4, 1)), window=window))


LONG = replace(MIXED, seq_lens=(3000, 40, 1800), query_lens=(33, 40, 1), heads=(4, 1))


@pytest.mark.parametrize("on_host", [(), ("seq_lens", "cu_query_lens")], ids=["lengths on device", "lengths on host"])
@pytest.mark.parametrize("options", [{}, {"window": 1500, "sinks": SINKS[:4]}], ids=str)
def test_long_contexts_are_split_and_joined(cuda, on_host, options):
    case = make_case(LONG, **options)
    check(cuda, case, on_host=on_host)
    plan = DeviceCase(cuda, case).plan(num_workers=12)
    assert plan.num_partial_rows > 0


@pytest.mark.parametrize("on_host", [(), INDICES, ("seq_lens",), ("block_table", "cu_query_lens")], ids=str)
def test_indices_may_be_on_the_host_or_on_the_device(cuda, on_host):
    check(cuda, make_case(replace(MIXED, shuffle_rows=True, padding=3, index_dtype="int64")), on_host=on_host)


def test_indices_may_be_lists_and_have_strides(cuda):
    case = make_case(MIXED)
    there = DeviceCase(cuda, case)
    wide = np.zeros((2, len(case.seq_lens), 3), np.int64)
    wide[0, :, 1] = case.seq_lens
    there.arrays["seq_lens"] = cuda.put(wide)[0, :, 1]
    there.arrays["cu_query_lens"] = case.options["cu_query_lens"].tolist()
    compare(case, there.run())


@pytest.mark.parametrize("padding", [1, 40])
@pytest.mark.parametrize("plan", [False, True])
def test_rows_past_the_last_query_are_zero_and_minus_infinity(cuda, padding, plan):
    for lens in ({}, {"seq_lens": (), "query_lens": ()}, {"seq_lens": (9, 5), "query_lens": (1, 1)}):
        check(cuda, make_case(replace(MIXED, padding=padding, **lens)), plan=plan)


def test_a_batch_without_rows_launches_nothing(cuda):
    case = make_case(replace(MIXED, seq_lens=(5,), query_lens=(0,)))
    out, lse = DeviceCase(cuda, case).run()
    assert out.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_chunks_of_a_prompt_equal_the_whole_prompt(cuda, num_steps):
    whole = make_case(replace(MIXED, seq_lens=(150,), query_lens=(150,)))
    expected = whole.expect()
    there = DeviceCase(cuda, whole)
    edges = np.linspace(0, 150, num_steps + 1, dtype=int)
    for begin, end in pairwise(edges.tolist()):
        there.arrays["query"] = cuda.put(whole.query[begin:end])
        there.arrays["seq_lens"] = [end]
        there.arrays["cu_query_lens"] = [0, end - begin]
        out, lse = there.run(out=None)
        assert_output_close(out, expected[0][begin:end])
        assert_lse_close(lse, expected[1][begin:end], "bfloat16")


def test_one_plan_serves_all_layers(cuda):
    layers = [make_case(MIXED, seed=seed) for seed in range(3)]
    plan = DeviceCase(cuda, layers[0]).plan()
    for layer in layers:
        compare(layer, DeviceCase(cuda, layer).run(plan=plan))
    if cuda.is_emulated:
        assert cuda.runtime.launched.count("plan") == 0


@pytest.mark.parametrize("dtype", [BF16, {}], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("batch_invariant", [None, False, True], ids=["no plan", "plan", "batch-invariant plan"])
def test_out_may_be_the_query_itself(cuda, batch_invariant, dtype):
    plain = {"query_dtype": "float32", "cache_dtype": "float32"} | dtype
    for shape in (replace(MIXED, seq_lens=(90, 77, 5, 0, 1100, 33), **plain), replace(DECODED, **plain)):
        case = make_case(shape)
        there = DeviceCase(cuda, case)
        plan = None if batch_invariant is None else there.plan(batch_invariant=batch_invariant, num_workers=24)
        compare(case, there.run(plan=plan, out=there.arrays["query"]))
