"""paged_attention in captured graphs, plans of fixed size, and the workspaces that graphs keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore.arrays.tensors import results
from pagecore.errors import DeviceError, NotEnoughMemory, ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, paged_attention, plan_attention
from pagecore.ops.cuda.schedule._schedule import plan_lengths, plan_shape
from tests.cuda.attention_cases import DECODED, MIXED, DeviceCase, compare
from tests.ops.cases import assert_output_close, make_case

pytestmark = pytest.mark.slow


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


def fixed_plan(cuda: Any, case: Any, max_sequences: int) -> tuple[AttentionPlan, Any]:
    """Return an empty plan of fixed size, and a function that plans decode lengths into it."""
    heads = {"num_query_heads": case.query.shape[1], "num_kv_heads": case.key_cache.shape[2]}
    sizes = {"max_sequences": max_sequences, "max_tokens": max_sequences}
    plan = AttentionPlan(**heads, device=cuda.device, **sizes)
    return plan, lambda lens: plan_attention(None, lens, **heads, out=plan)


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
