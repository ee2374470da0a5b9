"""Plans for CUDA, made on the host and on the device: every query row attends to every key exactly once."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagecore.arrays.cuda import pinned
from pagecore.errors import DeviceError, ShapeError, UnsupportedOption
from pagecore.ops import AttentionPlan, plan_attention
from pagecore.ops.cuda.plan._plan import items_in
from pagecore.ops.cuda.schedule._schedule import plan_on_device
from tests.cuda.kit import Kit
from tests.ops.test_plan import attended, batches

DECODE, PROMPTS = 0, 1
DECODE_ROWS, PROMPT_ROWS = 16, 128
FLOORS = (128, 256)
FOLD = 1024
SEQUENCE, QUERY_BEGIN, QUERY_COUNT, KEY_BEGIN, KEY_END, PARTIAL, SPLIT, NUM_SPLITS = range(8)
HEADS = {"num_query_heads": 8, "num_kv_heads": 2}

# Examples may share the fixture: it keeps no state between plans.
many = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
few = settings(many, max_examples=15)


def make_plan(cuda: Kit, cu: Any, seq_lens: Any, where: str, **options: Any) -> tuple[Any, list[Any]]:
    """Return a plan and, for each section, its items and first_item, planned on the host or by the kernel."""
    plan = plan_attention(cu, seq_lens, **options, device=cuda.device)
    if where == "host":
        return plan, [plan.cuda.items(section) for section in (DECODE, PROMPTS)]
    lens = cuda.put(np.asarray(seq_lens, np.int64))
    offsets = None if cu is None else cuda.put(np.asarray(cu, np.int32))
    num_tokens = len(seq_lens) if cu is None else cu[-1]
    buffer = cuda.get(plan_on_device(plan, lens, offsets, num_tokens))
    sections = [items_in(buffer, plan.cuda, section) for section in (DECODE, PROMPTS)]
    head = buffer[:20].view(np.int32).tolist()
    assert head[:3] == [len(seq_lens), *(len(items) for items, _ in sections)]
    for counted, (items, _) in zip(head[3:], sections, strict=True):
        rows = items[items[:, NUM_SPLITS] > 1, QUERY_COUNT].sum()
        # Batch-invariant tiles without room for their splits are counted, too.
        assert counted >= rows if plan.batch_invariant else counted == rows
    begin = -(-(32 + 4 * sum(len(first) for _, first in sections)) // 16) * 16
    query_lens = np.ones(len(seq_lens), int) if cu is None else np.diff(cu)
    starts = np.cumsum([0, *query_lens * np.asarray(seq_lens, int)])[:-1]
    assert buffer[begin : begin + 8 * len(seq_lens)].view(np.int64).tolist() == starts.tolist()  # starts of the masks
    return plan, sections


def check_coverage(cu: Any, seq_lens: Any, items: Any, options: Any) -> None:
    """Assert that each query row meets each key that it may attend to once, and no key of another sequence."""
    offsets = list(range(len(seq_lens) + 1)) if cu is None else cu
    for sequence, length in enumerate(seq_lens):
        begin, end = offsets[sequence], offsets[sequence + 1]
        met = np.zeros((end - begin, length), np.int8)
        rows = np.zeros(end - begin, bool)
        for item in items[items[:, SEQUENCE] == sequence]:
            first = item[QUERY_BEGIN] - begin
            assert first >= 0
            assert item[QUERY_COUNT] >= 1
            assert first + item[QUERY_COUNT] <= end - begin
            assert 0 <= item[KEY_BEGIN] <= item[KEY_END] <= length
            met[first : first + item[QUERY_COUNT], item[KEY_BEGIN] : item[KEY_END]] += 1
            rows[first : first + item[QUERY_COUNT]] = True
        assert rows.all()
        assert met.max(initial=0) <= 1
        for row in {0, (end - begin) // 2, end - begin - 1} if end > begin else ():
            keys = attended(length - (end - begin) + row, length, options["causal"], options["window"])
            assert met[row, keys.start : keys.stop].all()


def check_section(plan: Any, cu: Any, section: int, items: Any, first: Any) -> None:
    """Assert that a section has its sequences, that workers share its items and that splits have separate rows."""
    group = plan.num_query_heads // plan.num_kv_heads
    tile = max(1, (DECODE_ROWS, PROMPT_ROWS)[section] // group)
    queries = np.ones(len(items), int) if cu is None else np.diff(cu)[items[:, SEQUENCE]]
    is_decode = queries * group <= (0 if plan.batch_invariant else DECODE_ROWS)
    assert (is_decode == (section == DECODE)).all()
    assert items[:, QUERY_COUNT].max(initial=0) <= tile
    assert len(first) == plan.cuda.num_workers[section] + 1
    assert first[0] == 0
    assert first[-1] == len(items)
    assert (np.diff(first) >= 0).all()

    floor = FOLD if plan.batch_invariant else FLOORS[section]
    owned: dict[int, int] = {}
    by_tile: dict[tuple[int, int], list[Any]] = {}
    for item in items:
        by_tile.setdefault((item[SEQUENCE], item[QUERY_BEGIN]), []).append(item)
    for splits in by_tile.values():
        splits.sort(key=lambda item: item[SPLIT])
        ordered = np.array(splits)
        assert ordered[:, SPLIT].tolist() == list(range(len(splits)))
        assert (ordered[:, NUM_SPLITS] == len(splits)).all()
        assert (ordered[1:, KEY_BEGIN] == ordered[:-1, KEY_END]).all()
        assert (ordered[1:, KEY_BEGIN] % floor == 0).all()
        assert len(splits) == 1 or (ordered[:, KEY_BEGIN] < ordered[:, KEY_END]).all()
        if len(splits) == 1:
            assert splits[0][PARTIAL] == -1
            continue
        assert len(set(ordered[:, PARTIAL] - ordered[:, SPLIT] * ordered[:, QUERY_COUNT])) == 1
        for item in splits:
            for row in range(item[PARTIAL], item[PARTIAL] + item[QUERY_COUNT]):
                assert row >= 0
                assert row not in owned
                owned[row] = 1
        if plan.batch_invariant:
            assert (ordered[:-1, KEY_END] // FOLD == ordered[1:, KEY_BEGIN] // FOLD).all()
            assert (ordered[:, KEY_END] - ordered[:, KEY_BEGIN] <= FOLD).all()
    # Partial rows of splits: three for each row of the tile of each worker.
    room = max(
        3 * w * max(1, rows // group) for w, rows in zip(plan.cuda.num_workers, (DECODE_ROWS, PROMPT_ROWS), strict=True)
    )
    assert max(owned, default=-1) < room


@pytest.mark.slow
@many
@given(batches())
def test_a_plan_of_the_host_is_complete_and_within_its_capacities(cuda, batch):
    check_plan(cuda, batch, "host")


@pytest.mark.slow
@many
@given(batches())
def test_a_plan_of_the_device_is_complete_and_within_its_capacities(cuda, batch):
    check_plan(cuda, batch, "device")


def check_plan(cuda: Kit, batch: Any, where: str) -> None:
    cu, seq_lens, options = batch
    plan, sections = make_plan(cuda, cu, seq_lens, where, **options)
    check_coverage(cu, seq_lens, np.concatenate([items for items, _ in sections]), options)
    for section, (items, first) in enumerate(sections):
        check_section(plan, cu, section, items, first)


def costs(items: Any, first: Any) -> np.ndarray[Any, Any]:
    """Return the cost of each worker: its keys, and 64 more for each item."""
    each = items[:, KEY_END] - items[:, KEY_BEGIN] + 64
    return np.array([each[a:b].sum() for a, b in pairwise(first)])


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("lens", [[4096] * 40, [1000] * 34, [100_000, *[1000] * 255], [32768]])
def test_long_contexts_are_shared_evenly(cuda, where, lens):
    _, sections = make_plan(cuda, None, lens, where, **HEADS, num_workers=66)
    load = costs(*sections[DECODE])
    assert load.max() <= 1.25 * (sum(lens) + 64 * len(lens)) / 33 + 128


def test_short_sequences_are_dealt_out_longest_first(cuda):
    lens = [int(n) for n in np.random.default_rng(0).integers(1, 300, 200)]
    _, sections = make_plan(cuda, None, lens, "host", **HEADS, num_workers=66)
    items, first = sections[DECODE]
    assert len(items) == len(lens)
    assert costs(items, first).max() <= 1.1 * (sum(lens) + 64 * len(lens)) / 33
    for a, b in pairwise(first):
        assert (np.diff(items[a:b, KEY_END]) <= 0).all()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_tiles_than_the_kernel_has_threads_are_planned_in_rounds(cuda, queries, batch_invariant, where):
    lens = [3000] * 4 + [50] * 280 + [5000] * 20 + [1] * 240 + [2048, 60]
    options = {**HEADS, "causal": True, "window": None, "batch_invariant": batch_invariant, "num_workers": 66}
    check_plan(cuda, (list(range(0, queries * len(lens) + 1, queries)), lens, options), where)


@pytest.mark.parametrize("where", ["host", "device"])
def test_sequences_of_few_rows_are_decode_and_others_prompts(cuda, where):
    cu = [0, 4, 9, 9, 10]  # 16, 20, 0 and 4 rows
    plan, sections = make_plan(cuda, cu, [50, 60, 70, 80], where, **HEADS)
    assert sorted(sections[DECODE][0][:, SEQUENCE].tolist()) == [0, 3]
    assert sections[PROMPTS][0][:, SEQUENCE].tolist() == [1]
    if where == "host":
        assert plan.num_items == 3


@pytest.mark.parametrize("where", ["host", "device"])
def test_batch_invariant_plans_cut_single_tiles_at_folds_and_leave_prompts_whole(cuda, where):
    cu, lens = [0, 1, 200], [3000, 5000]
    _, sections = make_plan(cuda, cu, lens, where, **HEADS, batch_invariant=True, num_workers=8)
    assert len(sections[DECODE][0]) == 0
    items = sections[PROMPTS][0]
    decode = items[items[:, SEQUENCE] == 0]
    assert sorted(decode[:, KEY_END].tolist()) == [1024, 2048, 3000]
    assert (items[items[:, SEQUENCE] == 1][:, NUM_SPLITS] == 1).all()


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_a_short_window_over_a_fold_is_cut_there_and_nowhere_else(cuda, where, num_workers):
    options = {"num_query_heads": 1, "num_kv_heads": 1, "window": 2, "batch_invariant": True}
    _, sections = make_plan(cuda, None, [1025], where, **options, num_workers=num_workers)
    assert sorted(sections[PROMPTS][0][:, KEY_BEGIN].tolist()) == [1023, 1024]


@pytest.mark.parametrize("where", ["host", "device"])
def test_splits_that_have_no_room_stay_whole(cuda, where):
    plan, sections = make_plan(cuda, None, [100_000] * 5, where, **HEADS, batch_invariant=True, num_workers=2)
    items = sections[PROMPTS][0]
    whole = items[items[:, NUM_SPLITS] == 1]
    assert len(whole) > 0
    assert (whole[:, KEY_END] - whole[:, KEY_BEGIN] == 100_000).all()
    check_section(plan, None, PROMPTS, *sections[PROMPTS])


@pytest.mark.parametrize("group", [71, 128, 129, 300])
def test_a_group_of_many_heads_is_cut_into_chunks(cuda, group):
    plan = plan_attention([0, 3], [40], num_query_heads=group, num_kv_heads=1, num_workers=12, device=cuda.device)
    assert plan.cuda.items(PROMPTS)[0][:, QUERY_COUNT].tolist() == [1] * 3
    assert plan.cuda.num_workers[PROMPTS] == 12 // -(-group // 128)


@few
@given(batches(), st.integers(0, 2**31 - 1))
def test_invalid_lengths_cause_no_access_outside_the_buffer(cuda, batch, seed):
    """The emulator reports accesses outside of the buffer."""
    cu, seq_lens, options = batch
    if not seq_lens:
        return
    rng = np.random.default_rng(seed)
    plan = plan_attention(cu, seq_lens, **options, device=cuda.device)
    num_tokens = len(seq_lens) if cu is None else cu[-1]
    lens = cuda.put(rng.integers(-(2**62), 2**62, len(seq_lens)))
    wild = cuda.put(rng.integers(-5, num_tokens + 5, len(seq_lens) + 1))
    buffer = cuda.get(plan_on_device(plan, lens, wild, num_tokens))
    for section in (DECODE, PROMPTS):
        items, first = items_in(buffer, plan.cuda, section)
        assert (np.diff(first) >= 0).all()
        assert (items[:, QUERY_BEGIN] >= 0).all()
        assert (items[:, QUERY_BEGIN] + items[:, QUERY_COUNT] <= num_tokens).all()


def test_overlapping_ranges_never_exceed_the_capacity_of_items(cuda):
    num_tokens = 4000
    plan = plan_attention([0, *[num_tokens] * 40], [100] * 40, **HEADS, device=cuda.device, num_workers=2)
    lens, falling = cuda.put(np.full(40, 100)), cuda.put(np.array([0, num_tokens] * 20 + [0]))
    buffer = cuda.get(plan_on_device(plan, lens, falling, num_tokens))
    items, first = items_in(buffer, plan.cuda, PROMPTS)
    assert 40 < first[-1] < 40 + num_tokens // 32 + 10
    assert (items[:, QUERY_BEGIN] + items[:, QUERY_COUNT] <= num_tokens).all()


def test_a_plan_is_replanned_without_allocating(cuda):
    plan = AttentionPlan(**HEADS, device=cuda.device, max_sequences=64, max_tokens=200)
    address = plan.cuda.address
    plan_attention([0, 100], [5000], **HEADS, out=plan)
    cuda.runtime.synchronize(0)
    if cuda.is_emulated:
        cuda.runtime.counts.clear()
    for step in range(5):
        plan_attention(None, [1000 + step] * 64, **HEADS, out=plan)
        assert plan.num_sequences == 64
        assert plan.cuda.address == address
    if cuda.is_emulated:
        assert cuda.runtime.counts["allocations"] == cuda.runtime.counts["pinned_allocations"] == 0
        assert cuda.runtime.counts["synchronizes"] == 0
        assert cuda.runtime.counts["copies"] == 5


def test_a_plan_of_fixed_size_refuses_larger_batches_and_keeps_its_contents(cuda):
    plan = AttentionPlan(**HEADS, device=cuda.device, max_sequences=4, max_tokens=10)
    plan_attention(None, [100] * 4, **HEADS, out=plan)
    before = plan.items
    for cu, lens in ((None, [1] * 5), ([0, 11], [20])):
        with pytest.raises(
            ShapeError, match="has room for 4 and 10; make one with larger max_sequences and max_tokens"
        ):
            plan_attention(cu, lens, **HEADS, out=plan)
    with pytest.raises(ShapeError):
        plan_attention(None, [-1], **HEADS, out=plan)
    assert plan.items.tolist() == before.tolist()


@pytest.mark.parametrize(
    "changed", [{"num_query_heads": 16}, {"num_kv_heads": 4}, {"batch_invariant": True}, {"num_workers": 12}], ids=str
)
def test_a_plan_of_fixed_size_keeps_the_layout_that_graphs_rely_on(cuda, changed):
    plan = AttentionPlan(**HEADS, num_workers=24, device=cuda.device, max_sequences=4, max_tokens=10)
    with pytest.raises(ShapeError, match="plan with its options, or make another plan"):
        plan_attention(None, [100], **HEADS | {"num_workers": 24} | changed, out=plan)
    again = plan_attention(None, [100], **HEADS, num_workers=24, causal=False, window=(5, 5), out=plan)
    assert (again.num_sequences, again.num_query_heads) == (1, 8)


def planned_sequences(cuda: Kit, plan: Any) -> int:
    """Return the number of sequences in the header of a plan in device memory, after all work of stream 0."""
    head = np.zeros(8, np.int32)
    cuda.runtime.copy(head.ctypes.data, plan.cuda.address, head.nbytes, 0)
    cuda.runtime.synchronize(0)
    return int(head[0])


def test_a_new_plan_of_fixed_size_may_be_planned_on_any_stream(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it delays the work of a stream")
    cuda.runtime.streams.deferred = True
    plan, stream = AttentionPlan(**HEADS, device=cuda.device, max_sequences=4, max_tokens=10), cuda.stream()
    plan_attention(None, [100] * 4, **HEADS, out=plan, stream=stream)
    cuda.runtime.synchronize(stream)
    assert planned_sequences(cuda, plan) == 4


@pytest.mark.parametrize("has_cuda", [True, False])
def test_without_a_stream_a_plan_follows_the_framework_of_its_lengths(cuda, monkeypatch, has_cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it delays the work of a stream")

    class Lens(list[int]):
        pass

    def current_stream(device: int) -> Any:
        assert has_cuda, "a torch for the host alone has no streams"
        return SimpleNamespace(cuda_stream=stream)

    torch = SimpleNamespace(
        Tensor=Lens,
        backends=SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: has_cuda)),
        cuda=SimpleNamespace(current_stream=current_stream),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    plan, stream = AttentionPlan(**HEADS, device=cuda.device, max_sequences=4, max_tokens=10), cuda.stream()
    cuda.runtime.streams.deferred = True
    plan_attention(None, Lens([100] * 4), **HEADS, out=plan)
    assert planned_sequences(cuda, plan) == (0 if has_cuda else 4)
    cuda.runtime.synchronize(stream)
    assert planned_sequences(cuda, plan) == 4


@pytest.mark.parametrize("fixed", [{"max_sequences": 64, "max_tokens": 64}, {}])
def test_planning_on_the_host_in_a_capture_is_refused(cuda, fixed):
    """The graph would copy pinned memory that later plans overwrite."""
    plan = AttentionPlan(**HEADS, device=cuda.device, **fixed)
    plan_attention(None, [100] * 4, **HEADS, out=plan)
    for lens in ([10] * 3, [10] * 50):
        with pytest.raises(DeviceError, match=r"is being captured: plan before the capture"):
            cuda.capture(lambda stream, lens=lens: plan_attention(None, lens, **HEADS, out=plan, stream=stream))
    assert plan.num_sequences == 4


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_plan_that_cannot_be_initialised_again_stays_as_it_was(cuda, monkeypatch, is_on_host):
    place = "cpu" if is_on_host else cuda.device
    plan = plan_attention(None, [3000], **HEADS, window=(63, 0), num_workers=2, device=place)

    def refuse(*arguments: Any) -> None:
        raise DeviceError("the device is gone")

    before = (plan.device, plan.window, plan.num_workers, repr(plan), plan.items.tolist())
    with monkeypatch.context() as broken:
        broken.setattr(pinned.Slot, "send", refuse)
        with pytest.raises(DeviceError, match="gone"):
            plan.__init__(num_query_heads=4, num_kv_heads=4, device=cuda.device, max_sequences=4, max_tokens=4)
    assert (plan.device, plan.window, plan.num_workers, repr(plan), plan.items.tolist()) == before


def test_a_plan_on_the_device_becomes_one_on_the_host(cuda):
    plan = plan_attention(None, [3000], **HEADS, device=cuda.device)
    plan.__init__(**HEADS, window=7)
    assert (plan.device, plan.num_sequences, plan.num_items) == ("cpu", 0, 0)
    assert plan_attention(None, [30], **HEADS, out=plan).items["key_end"].tolist() == [30]


@pytest.mark.parametrize("lens", [[700] * 2, [10] * 500], ids=["as large", "larger"])
def test_a_plan_that_cannot_be_uploaded_keeps_the_previous_one(cuda, monkeypatch, lens):
    plan = plan_attention(None, [5000, 300], **HEADS, device=cuda.device)

    def state() -> Any:
        own = plan.cuda
        sizes = (own.max_sequences, own.max_tokens, own.num_bytes, own.num_workers, own.num_partial_rows)
        return (repr(plan), own.address, plan.nbytes, plan.batch_invariant, sizes, plan.items.tolist())

    def refuse(*arguments: Any) -> None:
        raise DeviceError("the device is gone")

    before = state()
    with monkeypatch.context() as broken:
        broken.setattr(pinned.Slot, "send", refuse)
        with pytest.raises(DeviceError, match="gone"):
            plan_attention(
                None, lens, num_query_heads=12, num_kv_heads=4, num_workers=12, batch_invariant=True, out=plan
            )
    assert state() == before
    assert planned_sequences(cuda, plan) == 2


def test_a_plan_grows_with_its_batches(cuda):
    plan = plan_attention(None, [10], **HEADS, device=cuda.device)
    assert plan_attention(None, [10] * 500, **HEADS, out=plan) is plan
    assert plan.num_items == 500
    assert plan.device == "cuda:0"
    assert "500 items" in repr(plan)


def test_a_plan_whose_batches_grow_one_by_one_allocates_seldom(cuda):
    if not cuda.is_emulated:
        pytest.skip("needs the emulator: it counts calls")
    plan = plan_attention(None, [10], **HEADS, device=cuda.device)
    before = cuda.runtime.counts.copy()
    for count in range(2, 65):
        plan_attention(None, [10] * count, **HEADS, out=plan)
    spent = cuda.runtime.counts - before
    assert 0 < spent["allocations"] <= 6
    assert spent["pinned_allocations"] == 3 * spent["allocations"]
    assert plan.num_items == 64


def test_invalid_arguments_are_refused(cuda):
    plan = plan_attention(None, [10], **HEADS, device="cuda")
    with pytest.raises(DeviceError, match="cannot be read; plan it with plan_attention"):
        _ = AttentionPlan(**HEADS, device="cuda").items
    with pytest.raises(DeviceError, match="out is a plan on cuda:0"):
        plan_attention(None, [10], **HEADS, out=plan, device="cpu")
    with pytest.raises(UnsupportedOption, match="leave stream out"):
        plan_attention(None, [10], **HEADS, stream=0)
    for wrong in ({"max_sequences": 4}, {"max_tokens": 4}, {"max_sequences": 0, "max_tokens": 4}):
        with pytest.raises(ShapeError):
            AttentionPlan(**HEADS, device="cuda", **wrong)
    with pytest.raises(ShapeError, match="for a plan on CUDA only"):
        AttentionPlan(**HEADS, max_sequences=4, max_tokens=4)
    for device in ("cuda:99", "gpu", "cuda:-1"):
        with pytest.raises(DeviceError):
            AttentionPlan(**HEADS, device=device)
