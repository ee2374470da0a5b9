"""paged_attention on CUDA arrays: prompts, mixed batches and chunks, with every option, layout and size."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pagecore.arrays import strided
from pagecore.arrays.tensors import results
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, paged_attention, plan_attention
from pagecore.ops.cuda.schedule._schedule import plan_lengths, plan_shape
from tests.cuda.attention_cases import BF16, F16, INDICES, MIXED, OPTIONS, SINKS, DeviceCase, check, compare
from tests.cuda.matrix import cases
from tests.ops.cases import LAYOUTS, Shape, assert_lse_close, assert_output_close, make_case, random_mask
from tests.reference import attention as reference

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


def test_out_in_memory_that_a_call_reads_is_refused(cuda):
    case = make_case(MIXED)
    there = DeviceCase(cuda, case)
    query, cache = there.arrays["query"], there.arrays["key_cache"]
    shape, row, memory = query.shape, query.strides, cuda.empty((100_000,), "bfloat16")
    backwards = strided(query.reshape(-1), shape, (-row[0], *row[1:]), (shape[0] - 1) * row[0])
    with pytest.raises(UnsupportedOption, match="out shares memory with query and is not that array"):
        there.run(out=backwards)
    with pytest.raises(UnsupportedOption, match="out shares memory with key_cache"):
        there.run(key_cache=strided(memory, cache.shape), out=strided(memory, shape))
    with pytest.raises(ShapeError, match=r"out has strides .*elements share memory"):
        there.run(out=strided(there.out.reshape(-1), shape, (0, *row[1:])))


@pytest.mark.parametrize("planned", ["before each replay", "in the call", "once in the graph"])
def test_a_captured_step_serves_other_lengths_at_the_same_addresses(cuda, monkeypatch, planned):
    """Lengths, tables and the plan are rewritten between replays; memory, grids and arguments stay the same.

    Without an AttentionPlan the captured call plans in memory that the framework keeps for the graph, as torch does.
    """
    has_plan = planned == "before each replay"
    if not has_plan:
        kept: dict[Any, Any] = {}
        allocate = results.new_result

        def keep(shape: Any, *more: Any) -> Any:
            if shape not in kept:
                kept[shape] = allocate(shape, *more)
            return kept[shape]

        monkeypatch.setattr(results, "new_result", keep)
        monkeypatch.setattr(results, "lasts_for_graphs", lambda example: True)
    steps = [
        replace(MIXED, seq_lens=(90, 200, 7), query_lens=(1, 1, 1), padding=97),
        replace(MIXED, seq_lens=(90, 201, 600), query_lens=(1, 60, 2), padding=37),
        replace(MIXED, seq_lens=(0, 0, 1500), query_lens=(0, 0, 100)),
    ]
    made = [make_case(shape, seed=seed) for seed, shape in enumerate(steps)]
    width = max(case.block_table.shape[1] for case in made)
    blocks = max(case.key_cache.shape[0] for case in made)

    def grown(array: Any, shape: Any) -> Any:
        large = np.zeros(shape, array.dtype)
        large[tuple(slice(n) for n in array.shape)] = array
        return large

    def arrays_of(case: Any) -> dict[str, Any]:
        cache = (blocks, *case.key_cache.shape[1:])
        return {
            "query": case.query,
            "key_cache": grown(case.key_cache, cache),
            "value_cache": grown(case.value_cache, cache),
            "block_table": grown(case.block_table, (3, width)),
            "seq_lens": case.seq_lens,
            "cu_query_lens": case.options["cu_query_lens"],
        }

    there = {name: cuda.put(array) for name, array in arrays_of(made[0]).items()}
    out, heads = cuda.empty(made[0].query.shape, "bfloat16"), {"num_query_heads": 8, "num_kv_heads": 2}
    fixed = {"max_sequences": 3, "max_tokens": 100}
    plan = AttentionPlan(**heads, device=cuda.device, **fixed) if has_plan else None
    if plan is not None:
        plan_attention(None, [1, 1, 1], **heads, out=plan)
    shared = None
    if planned == "once in the graph":
        shared = cuda.empty(plan_shape(3, len(made[0].query), *heads.values()), "uint8")

    def step(stream: int) -> None:
        if shared is not None:
            lens = (there["seq_lens"], there["cu_query_lens"], len(made[0].query))
            plan_lengths(shared, *lens, **heads, stream=stream)
        paged_attention(**there, out=out, plan=plan if shared is None else shared, stream=stream)

    step(0)  # allocates the workspace and loads the kernels that the graph launches
    replay = cuda.capture(step)
    for case in made:
        for name, array in arrays_of(case).items():
            held = np.ascontiguousarray(array)
            cuda.runtime.copy(there[name].pointer, held.ctypes.data, held.nbytes, 0)
        if plan is not None:
            plan_attention(case.options["cu_query_lens"], case.seq_lens, **heads, out=plan)
        cuda.runtime.synchronize(0)
        replay()
        assert_output_close(cuda.get(out), case.expect()[0])


@pytest.mark.parametrize("place", [("causal", 129), ("window", 125), ("mask", 100)], ids=str)
@pytest.mark.parametrize("plane", ["key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_in_the_cache_reaches_only_the_queries_that_attend_to_it(cuda, place, plane, bad):
    how, key = place
    shape = replace(MIXED, seq_lens=(130,), query_lens=(60,), heads=(4, 1))
    options: dict[str, Any] = {"window": (2, 1), "causal": False} if how == "window" else {"causal": how == "causal"}
    if how == "mask":
        options["mask"] = random_mask(shape)
    case = make_case(shape, **options)
    clean, _ = DeviceCase(cuda, case).run()
    cache = case.key_cache if plane == "key" else case.value_cache
    cache[case.block_table[0, key // 16], key % 16] = bad
    mask = options["mask"].reshape(60, 130) if how == "mask" else None
    reached = reference.allowed(60, 130, causal=options["causal"], window=options.get("window"), mask=mask)[:, key]
    assert 0 < reached.sum() < 60
    out, _ = DeviceCase(cuda, case).run()
    if plane == "value" or np.isnan(bad):
        assert not np.isfinite(out[reached].astype(np.float32)).any()
    np.testing.assert_array_equal(out[~reached].astype(np.float32), clean[~reached].astype(np.float32))


@pytest.mark.parametrize("seed", range(cases([3], [20])[0]))
def test_invalid_indices_in_device_arrays_cause_no_access_outside(cuda, seed):
    """The emulator reports accesses outside of the arrays; the result is undefined and may be written twice."""
    if cuda.is_emulated:
        cuda.runtime.may_overwrite = True
    rng = np.random.default_rng(seed)
    case = make_case(replace(MIXED, shuffle_rows=True), mask=random_mask(MIXED))
    there = DeviceCase(cuda, case)
    for name in INDICES:
        array = case.arrays[3] if name == "block_table" else case.seq_lens if name == "seq_lens" else case.options[name]
        wild = rng.integers(-(2**31), 2**31, array.shape)
        there.arrays[name] = cuda.put(np.where(rng.random(array.shape) < 0.5, wild, array).astype(np.int64))
    there.run()


def test_a_stale_plan_causes_no_access_outside(cuda):
    case = make_case(MIXED, mask=random_mask(MIXED))
    there = DeviceCase(cuda, case)
    plan = there.plan()
    there.run(plan=plan, cu_query_lens=cuda.put(np.full(7, len(case.query), np.int32)))
    for lens in (np.zeros(6, np.int32), np.full(6, 2**31 - 1, np.int32)):
        there.arrays["seq_lens"] = cuda.put(lens)
        there.run(plan=plan)


def test_plans_for_other_calls_are_refused(cuda):
    case = make_case(MIXED)
    there = DeviceCase(cuda, case)
    with pytest.raises(DeviceError, match="plan is on cpu"):
        there.run(plan=there.plan(device="cpu"))
    with pytest.raises(ShapeError, match=r"8 heads; the batch is planned for 4 query heads \(num_query_heads"):
        there.run(plan=there.plan(num_query_heads=4))
    with pytest.raises(ShapeError, match="causal=False"):
        there.run(plan=there.plan(causal=False))
    with pytest.raises(ShapeError, match="window"):
        there.run(plan=there.plan(window=5))
    with pytest.raises(ShapeError, match="plan is of 1 sequences"):
        there.run(plan=plan_attention(None, [5], num_query_heads=8, num_kv_heads=2, device=cuda.device))
    fixed = AttentionPlan(num_query_heads=8, num_kv_heads=2, device=cuda.device, max_sequences=6, max_tokens=100)
    with pytest.raises(ShapeError, match=r"room for 6 and 100; plan this batch first \(plan_attention"):
        there.run(plan=fixed)


def fixed_plan(cuda: Any, case: Any, max_sequences: int) -> tuple[AttentionPlan, Any]:
    """Return an empty plan of fixed size, and a function that plans decode lengths into it."""
    heads = {"num_query_heads": case.query.shape[1], "num_kv_heads": case.key_cache.shape[2]}
    sizes = {"max_sequences": max_sequences, "max_tokens": max_sequences}
    plan = AttentionPlan(**heads, device=cuda.device, **sizes)
    return plan, lambda lens: plan_attention(None, lens, **heads, out=plan)


DECODED = Shape(seq_lens=(2500, 900), heads=(8, 2), dims=(64, 64), **BF16)


def test_a_plan_of_fixed_size_serves_the_number_of_sequences_that_it_was_planned_for(cuda):
    case = make_case(DECODED)
    there = DeviceCase(cuda, case)
    plan, make = fixed_plan(cuda, case, 4)
    for lens in (None, [2500], [2500, 900, 7]):
        if lens is not None:
            make(lens)
        with pytest.raises(ShapeError, match=r"the call has 2 sequences .*; plan this batch first"):
            there.run(plan=plan)
    make(case.seq_lens)
    compare(case, there.run(plan=plan))
    make([1])  # the capture does not depend on the contents of the plan
    replay = cuda.capture(lambda stream: paged_attention(**there.arrays, out=there.out, plan=plan, stream=stream))
    make(case.seq_lens)
    cuda.runtime.fill(there.out.pointer, 0xFF, there.out.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    assert_output_close(cuda.get(there.out), case.expect()[0], case.magnitude())


@pytest.mark.parametrize(("with_offsets", "asked"), [(False, 0), (True, 1)])
def test_a_call_with_a_plan_queries_a_capture_only_if_it_would_launch_more_kernels_in_one(
    cuda, monkeypatch, with_offsets, asked
):
    """A decode step has no items of prompts; a later plan of the same graph has some only with offsets of queries."""
    case = make_case(DECODED)
    there = DeviceCase(cuda, case)
    plan, make = fixed_plan(cuda, case, 4)
    make(case.seq_lens)
    if with_offsets:
        there.arrays["cu_query_lens"] = cuda.put(np.arange(3, dtype=np.int32))
    there.run(plan=plan)
    queries = []
    is_capturing = cuda.runtime.is_capturing
    monkeypatch.setattr(cuda.runtime, "is_capturing", lambda stream: queries.append(stream) or is_capturing(stream))
    compare(case, there.run(plan=plan))
    assert len(queries) == asked


def test_a_graph_keeps_its_workspace_when_a_call_has_wider_values(cuda):
    narrow, wide = make_case(DECODED), make_case(replace(DECODED, dims=(64, 128)))
    there = DeviceCase(cuda, narrow)
    plan, make = fixed_plan(cuda, narrow, 2)
    assert make(narrow.seq_lens).num_partial_rows > 0
    paged_attention(**there.arrays, out=there.out, plan=plan)
    before = plan.nbytes
    replay = cuda.capture(lambda stream: paged_attention(**there.arrays, out=there.out, plan=plan, stream=stream))
    compare(wide, DeviceCase(cuda, wide).run(plan=plan))
    assert plan.nbytes > before
    cuda.runtime.fill(there.out.pointer, 0xFF, there.out.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    assert_output_close(cuda.get(there.out), narrow.expect()[0], narrow.magnitude())


@pytest.mark.parametrize("has_one", [True, False])
def test_a_failed_allocation_of_a_workspace_keeps_the_previous_one(cuda, monkeypatch, has_one):
    case, wide = make_case(DECODED), make_case(replace(DECODED, dims=(64, 128)))
    there, other = DeviceCase(cuda, case), DeviceCase(cuda, wide)
    plan = there.plan()
    assert plan.num_partial_rows > 0
    if has_one:
        there.run(plan=plan)

    def refuse(*arguments: Any) -> None:
        raise NotEnoughMemory("no room")

    with monkeypatch.context() as broken:
        broken.setattr(cuda.runtime, "allocate", refuse)
        with pytest.raises(NotEnoughMemory):
            paged_attention(**other.arrays, out=other.out, plan=plan)
    compare(case, there.run(plan=plan))
    compare(wide, other.run(plan=plan))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_lens": [200, 77, 5, 0, 130, -1]}, "lengths are 0 to 2147483647"),
        ({"seq_lens": [200, 77, 5, 0, 130, 2**30]}, "the block table is too narrow"),
        ({"seq_lens": [200, 77, 5, 0, 130, 2**40]}, r"seq_lens\[5\] is 1099511627776; lengths are 0 to"),
        ({"cu_query_lens": [0, 33, 110, 111, 111, 113, -(2**40)]}, "cu_query_lens falls from 113 to -1099"),
        ({"cu_query_lens": [0, 33, 30, 111, 111, 113, 146]}, "must never fall"),
        ({"cu_query_lens": [1, 33, 110, 111, 111, 113, 146]}, "must start at 0"),
        ({"cu_query_lens": [0, 33, 110, 111, 111, 113, 147]}, "every query must have its row"),
        ({"mask": np.ones(7, bool)}, "mask has 7 entries"),
    ],
    ids=str,
)
def test_lengths_on_the_host_are_checked(cuda, changed, message):
    there = DeviceCase(cuda, make_case(MIXED), on_host=INDICES)
    with pytest.raises(ShapeError, match=message):
        there.run(**changed)


def test_a_capture_without_a_plan_or_loaded_kernels_is_refused(cuda):
    case = make_case(MIXED)
    there = DeviceCase(cuda, case)
    arrays = {**there.arrays, "out": there.out}
    with pytest.raises(UnsupportedOption, match="is on the host and the stream is being captured"):
        cuda.capture(lambda stream: paged_attention(**{**arrays, "seq_lens": [1] * 6}, stream=stream))
    with pytest.raises(DeviceError, match=r"being captured, and a call without a plan.*pass a plan of type"):
        cuda.capture(lambda stream: paged_attention(**arrays, stream=stream))
    plan = AttentionPlan(
        num_query_heads=8, num_kv_heads=2, device=cuda.device, max_sequences=6, max_tokens=len(case.query)
    )
    plan_attention(case.options["cu_query_lens"], case.seq_lens, num_query_heads=8, num_kv_heads=2, out=plan)
    with pytest.raises(DeviceError, match="run the call once before the capture"):
        cuda.capture(lambda stream: paged_attention(**arrays, plan=plan, stream=stream))


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_capture_refuses_a_growing_plan(cuda, is_warm):
    """A larger batch would free the buffers that the graph reads."""
    case = make_case(DECODED)
    there = DeviceCase(cuda, case)
    plan = there.plan()
    if is_warm:
        paged_attention(**there.arrays, out=there.out, plan=plan)
    cuda.runtime.fill(there.out.pointer, 0xFF, there.out.nbytes, 0)
    cuda.runtime.synchronize(0)
    with pytest.raises(DeviceError, match=r"plan has no fixed size.*max_sequences=2, max_tokens=2"):
        cuda.capture(lambda stream: paged_attention(**there.arrays, out=there.out, plan=plan, stream=stream))
    assert (cuda.get(there.out).view(np.uint8) == 0xFF).all()
    plan_attention(None, [10] * 500, num_query_heads=8, num_kv_heads=2, out=plan)  # grows as before
    plan_attention(None, case.seq_lens, num_query_heads=8, num_kv_heads=2, out=plan)
    compare(case, there.run(plan=plan))


def test_a_graph_of_a_fixed_plan_outlives_larger_and_smaller_batches(cuda):
    case = make_case(DECODED)
    there = DeviceCase(cuda, case)
    plan, make = fixed_plan(cuda, case, 500)
    make(case.seq_lens)
    paged_attention(**there.arrays, out=there.out, plan=plan)
    replay = cuda.capture(lambda stream: paged_attention(**there.arrays, out=there.out, plan=plan, stream=stream))
    for lens in ([10] * 500, [7], case.seq_lens):
        make(lens)
    cuda.runtime.fill(there.out.pointer, 0xFF, there.out.nbytes, 0)
    cuda.runtime.synchronize(0)
    replay()
    assert_output_close(cuda.get(there.out), case.expect()[0], case.magnitude())
