"""paged_attention on CUDA arrays with NaN and with invalid or stale arguments: errors, and no access out of bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagecore.arrays import strided
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, plan_attention
from tests.cuda.attention_cases import INDICES, MIXED, DeviceCase
from tests.cuda.matrix import cases
from tests.ops.cases import make_case, random_mask
from tests.reference import attention as reference

pytestmark = pytest.mark.slow


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
