"""Plans of the planning kernel against its plain-Python twin, and the work of each of its threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagecore.ops import plan_attention
from pagecore.ops.cuda.plan._plan import items_in
from pagecore.ops.cuda.schedule._schedule import plan_on_device
from tests.cuda.kit import Kit
from tests.ops.test_plan import batches
from tests.reference import cuda_plan as reference
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

# Examples may share the fixture: it keeps no state between plans.
many = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(cuda: Kit, cu: Any, seq_lens: Any, **options: Any) -> list[int]:
    """Compare both sections with those of the twin; return the number of items of each."""
    plan = plan_attention(cu, seq_lens, **options, device=cuda.device)
    offsets = None if cu is None else cuda.put(np.asarray(cu, np.int32))
    num_tokens = len(seq_lens) if cu is None else cu[-1]
    buffer = cuda.get(plan_on_device(plan, cuda.put(np.asarray(seq_lens, np.int64)), offsets, num_tokens))
    expected = reference.plan(cu, seq_lens, **options | {"num_workers": plan.cuda.num_workers})
    for section, (items, first_item) in enumerate(expected):
        got_items, got_first = items_in(buffer, plan.cuda, section)
        assert got_items.tolist() == items
        assert got_first.tolist() == first_item
    return [len(items) for items, _ in expected]


@many
@given(batches())
def test_the_kernel_plans_as_its_twin_does(cuda, batch):
    cu, seq_lens, options = batch
    check(cuda, cu, seq_lens, **options)


@many
@given(batches(), st.one_of(st.integers(1, 3000), st.none()), st.integers(1, 2000))
def test_chunks_and_sinks_are_planned_as_by_the_twin(cuda, batch, chunk, sink_tokens):
    cu, seq_lens, options = batch
    if chunk is not None:
        options |= {"window": None, "chunk": chunk}
    elif options["window"] is None or (isinstance(options["window"], tuple) and options["window"][0] == -1):
        options |= {"window": 700, "sink_tokens": sink_tokens}
    else:
        options |= {"sink_tokens": sink_tokens}
    if options.get("sink_tokens") and options["batch_invariant"]:
        options["causal"] = True
    check(cuda, cu, seq_lens, **options)


LARGE: dict[str, Any] = {
    "decode and sinks": (None, [100_000] * 40 + [700] * 300 + [3] * 20, {"window": 1024, "sink_tokens": 4}),
    "prompts with sinks": ([0, 9000, 9050, 9051], [12_000, 50, 900], {"window": 3000, "sink_tokens": 130}),
    "one sequence for many workers": (None, [100_000], {"num_workers": 1500}),
    "a short one for many workers": (None, [700], {"num_workers": 1500}),
    "many sequences": (None, [3000] * 4 + [50] * 600 + [20_000] * 20 + [1] * 240 + [0] * 9, {}),
    "many prompts": (list(range(0, 601 * 20, 20)), [2000] * 300 + [0, 30] * 150, {"num_workers": 40}),
    "one long prompt": ([0, 20_000], [30_000], {}),
    "both": ([*range(300), *range(300, 300 + 40 * 90 + 1, 90)], [9000] * 339 + [5], {"window": (500, 3)}),
}


@pytest.mark.parametrize(
    ("name", "batch_invariant", "heads"),
    in_turn(LARGE, [False, True], over=[[(8, 1), (8, 8), (71, 1), (24, 8)]]),
    ids=str,
)
def test_large_batches_are_planned_in_rounds(cuda, name, batch_invariant, heads):
    cu, seq_lens, options = LARGE[name]
    check(
        cuda,
        cu,
        seq_lens,
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        causal=len(name) % 2 == 0,
        batch_invariant=batch_invariant,
        **options,
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("length", [300, 60_000])
def test_the_work_of_a_thread_does_not_grow_with_borders_and_items(cuda, length, batch_invariant):
    """One long sequence: a thread that looped over its borders would access memory once for each."""
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts accesses")
    options = {"num_query_heads": 8, "num_kv_heads": 1, "batch_invariant": batch_invariant}
    most = []
    for num_workers in (2, 500):
        before = cuda.runtime.counts["most_accesses"]
        check(cuda, None, [length], **options, num_workers=num_workers)
        most.append(cuda.runtime.counts["most_accesses"] - before)
    assert most[0] == most[1] < 40
