"""Timeline: the block maps of equally spaced steps, in bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.errors import ShapeError
from pagecore.serving.pictures.timeline import CACHED, FREE, RunNumbers, Timeline, cells_of, name_of
from pagecore.serving.scheduling.request import State
from tests.serving.pictures.pictured import FULL, WINDOWED, serve

pytestmark = pytest.mark.slow


class Recorder:
    """Record of every step by plain loops: the oracle of a timeline."""

    def __init__(self):
        self.maps = []
        self.preemptions = []
        self.swaps = []

    def __call__(self, scheduler, metrics):
        groups = []
        for group, blocks in enumerate(scheduler.cache.num_blocks):
            table = np.asarray(scheduler.cache.block_table(group))
            holders = [[] for _ in range(blocks)]
            # In the order in which their sequences were made, as in the block map.
            made = scheduler.cache.block_map(group).sequences
            for run in sorted(scheduler.holders, key=lambda run: made.index(run.sequence.id)):
                for block in table[run.sequence.row].tolist():
                    holders[block].append(run)
            kept = scheduler.cache.block_map(group).cached
            groups.append([found or ["cached"] * held for found, held in zip(holders, kept.tolist(), strict=True)][1:])
        self.maps.append(groups)
        self.preemptions.append(scheduler.num_preemptions)


def describe_block(holders):
    """Describe a block by its holders."""
    if not holders:
        return "free"
    if holders == ["cached"]:
        return "cached"
    return ("shared " if len(holders) > 1 else "") + name_of(holders[0])


def describe_cell(timeline, number):
    """Describe a cell in the same words."""
    if number in (FREE, CACHED):
        return "free" if number == FREE else "cached"
    return ("shared " if number < 0 else "") + timeline.names[abs(number)]


@pytest.mark.parametrize(("columns", "rows"), [(2, 1), (4, 7), (16, 100), (64, 25), (1000, 24)])
@pytest.mark.parametrize("layers", [FULL, [FULL, WINDOWED]], ids=["one group", "two groups"])
def test_a_timeline_keeps_the_block_maps_at_the_ends_of_equal_spans(columns, rows, layers):
    recorder, timeline = Recorder(), Timeline(columns, rows)
    serve([recorder, timeline], layers=layers, num_blocks=26 if layers is FULL else [26, 20])
    assert timeline.steps == len(recorder.maps) > 100
    assert timeline.num_columns == timeline.steps // timeline.stride < columns
    assert timeline.stride == 1 or timeline.num_columns >= columns // 2
    for group in range(timeline.num_groups):
        cells, step = timeline.cells(group), timeline.block_step(group)
        for column in range(timeline.num_columns):
            expected = recorder.maps[(column + 1) * timeline.stride - 1][group][::step]
            assert [describe_cell(timeline, number) for number in cells[:, column].tolist()] == [
                *map(describe_block, expected)
            ]
        assert len(cells) <= rows


@pytest.mark.parametrize("columns", [2, 8, 1000])
def test_every_eviction_is_counted_in_its_span(columns):
    evicted, timeline = [], Timeline(columns)
    scheduler, _ = serve([lambda scheduler, _: evicted.append(scheduler.cache.stats().num_evicted_blocks), timeline])
    assert timeline.has_prefix_cache
    each = np.diff([0, *evicted])
    spans = [each[start : start + timeline.stride].sum() for start in range(0, timeline.steps, timeline.stride)]
    assert timeline.evictions()[: len(spans)] == spans
    assert sum(timeline.evictions()) == scheduler.cache.stats().num_evicted_blocks > 10


@pytest.mark.parametrize("columns", [2, 8, 1000])
def test_every_preemption_is_counted_in_its_span(columns):
    recorder, timeline = Recorder(), Timeline(columns)
    scheduler, _ = serve([recorder, timeline])
    assert scheduler.num_preemptions > 3
    each = np.diff([0, *recorder.preemptions])
    spans = [each[start : start + timeline.stride].sum() for start in range(0, timeline.steps, timeline.stride)]
    assert timeline.preemptions()[: len(spans)] == spans
    assert sum(timeline.preemptions()) == scheduler.num_preemptions
    assert not any(timeline.swaps())


def test_swaps_are_counted_among_the_preemptions():
    timeline = Timeline()

    def pretend(scheduler, metrics):
        if metrics.steps % 10 == 0:
            scheduler._roster.num_preemptions += 1
            scheduler._roster.num_swaps += 1

    scheduler, metrics = serve([pretend, timeline])
    assert sum(timeline.swaps()) == metrics.steps // 10
    assert sum(timeline.recomputed()) == scheduler.num_preemptions - scheduler.num_swaps > 0
    assert timeline.swaps()[9] == timeline.swaps()[19] == 1


def test_a_run_keeps_its_number_through_a_preemption_and_no_two_share_one():
    numbers = RunNumbers()
    runs, preempted = {}, set()

    def watch(scheduler, metrics):
        by_sequence = numbers.update(scheduler)
        assert (
            by_sequence.keys()
            == {run.sequence.id for run in scheduler.holders}
            >= {run.sequence.id for run in scheduler.running}
        )
        for run in scheduler.holders:
            number = by_sequence[run.sequence.id]
            assert runs.setdefault(number, run) is run
        preempted.update(run for run in runs.values() if run.state is State.WAITING)

    serve([watch], count=150)
    assert len(preempted) > 20
    assert sorted(runs) == list(range(1, numbers.next))
    assert len({id(run) for run in runs.values()}) == len(runs)


def test_a_timeline_forgets_runs_and_names_that_it_no_longer_shows():
    timeline = Timeline(4, 8)
    most = []

    def watch(scheduler, metrics):
        most.append((len(timeline.names), len(timeline._numbers.known())))

    serve([timeline, watch], count=150, max_running=4)
    names, known = (max(column) for column in zip(*most, strict=True))
    assert known <= 2 * 4 + 64 + 4
    assert names <= 4 * 8 + known
    assert timeline.stride > 64


def test_numbers_of_cancelled_runs_are_forgotten_as_those_of_finished_ones():
    numbers, most = RunNumbers(), []

    def watch(scheduler, metrics):
        numbers.update(scheduler)
        most.append(len(numbers.known()))
        for run in list(scheduler.running):
            scheduler.cancel(run)

    serve([watch], count=120, max_running=4)
    assert numbers.next > 120
    assert max(most) <= 2 * 4 + 64 + 4


def test_a_timeline_names_every_run_that_it_shows_including_runs_with_only_shared_blocks():
    timelines = [Timeline(64, rows) for rows in (1, 2, 25)]

    def watch(scheduler, metrics):
        for timeline in timelines:
            shown = {abs(number) for number in timeline.cells(0).ravel().tolist()}
            assert shown - {FREE, -CACHED} <= timeline.names.keys()

    serve([*timelines, watch], count=100)


@pytest.mark.slow
def test_the_memory_of_a_timeline_does_not_grow_with_the_run():
    def peak(count):
        timeline = Timeline(16, 16)
        held = []
        tracemalloc.start()
        try:
            serve([timeline, lambda *_: held.append(tracemalloc.get_traced_memory()[0])], count=count)
        finally:
            tracemalloc.stop()
        return max(held) - held[0]

    serve([Timeline(16, 16)], count=30)  # loads what is loaded at the first use
    # The requests, their reused tokens by medium and the metrics grow with the run, by about a hundred bytes a step.
    assert peak(90) < peak(30) + 35_000


@pytest.mark.parametrize("columns", [-2, 0, 1, 3])
def test_an_odd_number_of_columns_is_refused(columns):
    with pytest.raises(ShapeError, match=f"columns is {columns}"):
        Timeline(columns)


def test_a_timeline_without_rows_is_refused():
    with pytest.raises(ShapeError, match="rows is 0"):
        Timeline(2, 0)


def test_a_timeline_without_steps_is_empty():
    timeline = Timeline()
    assert (timeline.steps, timeline.num_columns, timeline.num_groups, timeline.num_blocks) == (0, 0, 0, ())
    assert timeline.preemptions() == timeline.swaps() == timeline.evictions() == [0]
    assert (timeline.has_prefix_cache, timeline.hit_rate) == (False, 0)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), step=st.integers(1, 9))
def test_cells_are_equally_spaced_blocks_from_block_1_on(seed, step):
    random = np.random.default_rng(seed)

    class Map:
        sequences = ("a", "stranger", "b")
        holders = random.integers(0, 4, 20)
        cached = random.integers(0, 2, 20).astype(bool)
        owner = np.where(holders > 0, random.integers(0, 3, 20), -1)

    cells = cells_of(Map, {"a": 5, "b": 9}, step).tolist()
    for number, block in zip(cells, range(1, 20, step), strict=True):
        expected = {-1: 0, 0: 5, 1: 0, 2: 9}[Map.owner[block]]
        if not expected:
            assert number == (CACHED if Map.holders[block] or Map.cached[block] else FREE)
        else:
            assert number == (-expected if Map.holders[block] > 1 else expected)
