"""Plans in arrays of the caller: made on the device, shared by the calls of a step, checked in debug mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pagecore
from pagecore.arrays import strided
from pagecore.errors import DeviceError, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.ops import AttentionPlan, paged_attention
from pagecore.ops.cuda.schedule._schedule import plan_lengths, plan_shape
from tests.cuda.attention_cases import BF16, LIMITS, DeviceCase, compare
from tests.ops.cases import Shape, make_case
from tests.thinning import interleaved

pytestmark = pytest.mark.slow

DECODE = Shape(seq_lens=(700, 37, 0, 129, 5), heads=(8, 2), block_size=5, **BF16)
MIXED = Shape(seq_lens=(200, 77, 5, 0, 130, 33), query_lens=(33, 77, 1, 0, 2, 33), heads=(8, 2), **BF16)
FLOATS = replace(MIXED, heads=(4, 2), query_dtype="float32", cache_dtype="float32")
LONG = replace(DECODE, seq_lens=(2000, 1500, 0, 900, 5), heads=(4, 1), block_size=64)  # several tiles are split
SHAPES = {"decode": DECODE, "mixed": MIXED, "floats": FLOATS, "long": LONG}


def planned(there: DeviceCase, **changes: Any) -> Any:
    """Plan the lengths and options of a case into a new array."""
    arrays = there.arrays | changes
    heads = {"num_query_heads": there.shape[1], "num_kv_heads": there.case.key_cache.shape[2]}
    kinds = {name: arrays[name] for name in LIMITS if name in arrays}
    lens, num_tokens = arrays["seq_lens"], arrays["query"].shape[0]
    plan = there.cuda.empty(plan_shape(lens.shape[0], num_tokens, *heads.values(), "sink_tokens" in kinds), "uint8")
    plan_lengths(plan, lens, arrays.get("cu_query_lens"), num_tokens, **heads, **kinds)
    return plan


@pytest.fixture
def debugging() -> Iterator[None]:
    pagecore.debug(True)
    yield
    pagecore.debug(None)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 700), st.integers(1, 9000), st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 4, 16, 71, 200]))
def test_every_device_has_room_for_its_plan(cuda, num_sequences, num_tokens, kv_heads, group):
    rows, width = plan_shape(num_sequences, num_tokens, group * kv_heads, kv_heads)
    heads = {"num_query_heads": group * kv_heads, "num_kv_heads": kv_heads, "device": cuda.device}
    for num_workers in (None, 7, 1024):
        plan = AttentionPlan(**heads, num_workers=num_workers, max_sequences=num_sequences, max_tokens=num_tokens)
        tiles = [max(1, most // group) for most in (16, 128)]
        partial_rows = max(3 * w * tile for w, tile in zip(plan.cuda.num_workers, tiles, strict=True))
        num_tiles, num_borders = num_sequences + num_tokens // tiles[1], max(plan.cuda.num_workers)
        scratch = 8 * num_sequences + 8 * (num_tiles + 1) + 32 * num_tiles + 16 * (num_borders + 1)
        counters = 4 * partial_rows * kv_heads * -(-group // 128)
        needed = plan.cuda.num_bytes + scratch + counters
        assert needed <= rows * width
    assert rows == num_sequences + 1
    assert width % 16 == 0
    assert rows * width < needed + 32 * rows + 1024


OPTIONS = [
    {},
    {"window": 50},
    {"causal": False},
    {"window": (100, 3), "causal": False},
    {"chunk": 90},
    {"window": 70, "sink_tokens": 5},
]


@pytest.mark.parametrize(("shape", "options"), interleaved(SHAPES, OPTIONS), ids=str)
def test_calls_that_share_a_plan_give_the_same_results_as_calls_that_plan(cuda, shape, options):
    case = make_case(SHAPES[shape], **options)
    there = DeviceCase(cuda, case)
    alone, plan = there.run(), planned(there)
    compare(case, alone)
    launches = cuda.runtime.launched if cuda.is_emulated else []
    count, fills = launches.count("plan"), cuda.runtime.counts["fills"] if cuda.is_emulated else 0
    for _ in range(2):
        for one, other in zip(there.run(plan=plan), alone, strict=True):
            np.testing.assert_array_equal(one, other)
    assert launches.count("plan") == count
    assert not cuda.is_emulated or cuda.runtime.counts["fills"] == fills  # the kernel resets its own counters


def test_masks_start_at_the_offsets_of_the_plan(cuda):
    pairs = sum(n * q for n, q in zip(MIXED.seq_lens, MIXED.query_lens or (), strict=True))
    case = make_case(MIXED, mask=np.random.default_rng(0).random(pairs) < 0.7)
    there = DeviceCase(cuda, case)
    compare(case, there.run(plan=planned(there)))


def test_a_plan_is_replanned_in_its_array(cuda):
    """A graph that captured planning and attention does this: the lengths change in place."""
    first, second = (make_case(replace(DECODE, seq_lens=lens)) for lens in ((700, 37, 0, 129, 5), (3, 650, 200, 1, 90)))
    there = DeviceCase(cuda, first)
    plan, other = planned(there), DeviceCase(cuda, second)
    plan_lengths(plan, other.arrays["seq_lens"], None, 5, num_query_heads=8, num_kv_heads=2)
    compare(second, other.run(plan=plan))


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    "change",
    [{"window": 20}, {"causal": False}, {"seq_lens": [200, 77, 5, 0, 130, 34]}, {"seq_lens": [199, 77, 5, 0, 131, 33]}],
    ids=str,
)
def test_debug_finds_plans_of_other_lengths_and_options(cuda, change):
    case = make_case(MIXED)
    there = DeviceCase(cuda, case)
    compare(case, there.run(plan=planned(there)))
    made = {name: cuda.put(np.asarray(x, np.int32)) if name == "seq_lens" else x for name, x in change.items()}
    plan = planned(there, **made)
    with pytest.raises(ShapeError, match="plan was made for other lengths, another window or another causality"):
        there.run(plan=plan)
    assert (cuda.get(there.out).view(np.uint8) != 0xFF).any()  # from the first call


def test_arrays_that_do_not_fit_the_plan_of_a_call_are_refused(cuda):
    there = DeviceCase(cuda, make_case(MIXED))
    plan = planned(there)
    rows, width = plan.shape
    memory = cuda.empty(rows * width + 8, "uint8")
    for wrong, error, message in (
        (cuda.empty((rows + 1, width), "uint8"), ShapeError, "one more than seq_lens; plan this batch"),
        (cuda.empty((rows, width + 16), "uint8"), ShapeError, "6 sequences, 146 queries and 8/2 heads, whose plan has"),
        (cuda.empty((rows, width), "int32"), UnsupportedDtype, "plan is int32; a plan in an array is uint8"),
        (cuda.empty(rows * width, "uint8"), ShapeError, "plan has"),
        (strided(memory, (rows, width), (width, 1), 8, "uint8"), ShapeError, "multiple of 16 bytes"),
        (strided(memory, (rows, width), (0, 1), 0, "uint8"), ShapeError, "contiguous"),
        (np.zeros((rows, width), np.uint8), DeviceError, "plan is on cpu"),
        ([1, 2], UnsupportedOption, "plan is a list; it must be a plan from plan_attention"),
    ):
        with pytest.raises(error, match=message):
            there.run(plan=wrong)


def test_lengths_that_do_not_fit_are_refused_before_they_are_planned(cuda):
    lens, cu = cuda.put(np.asarray([5, 6], np.int32)), cuda.put(np.asarray([0, 3, 4], np.int32))
    heads = {"num_query_heads": 8, "num_kv_heads": 2}
    out = cuda.empty(plan_shape(2, 4, 8, 2), "uint8")
    before = cuda.get(out).tobytes()
    for arguments, error, message in (
        ((out, np.asarray([5, 6]), None, 2), DeviceError, "use plan_attention for host lengths"),
        ((out, lens, None, 3), ShapeError, "num_tokens is 3 and seq_lens has 2 entries"),
        ((out, lens, cuda.put(np.zeros(2, np.int32)), 4), ShapeError, "cu_query_lens"),
        ((out, lens, cu, -1), ShapeError, "num_tokens is -1"),
        ((out, lens, cu, 2**31), ShapeError, "num_tokens is 2147483648"),
        ((cuda.empty((3, 16), "uint8"), lens, cu, 4), ShapeError, "out has shape"),
        ((cuda.empty(out.shape, "int8"), lens, cu, 4), UnsupportedDtype, "out is int8"),
    ):
        with pytest.raises(error, match=message):
            plan_lengths(*arguments, **heads)
    assert cuda.get(out).tobytes() == before
    plan_lengths(out, lens, cu, 4, **heads)
    assert cuda.get(out)[0, :4].view(np.int32)[0] == 2


def test_a_capture_is_refused_if_its_memory_does_not_outlive_it(cuda):
    there = DeviceCase(cuda, make_case(DECODE))
    plan = planned(there)
    there.run(plan=plan)
    with pytest.raises(DeviceError, match=r"in an array or with a selection.*pass a plan of type AttentionPlan"):
        cuda.capture(lambda stream: paged_attention(**there.arrays | {"out": there.out}, plan=plan, stream=stream))
