"""Picture of a run: the content of its panels, and a layout without overlaps."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.serving.metrics import Metrics
from pagecore.serving.pictures.palette import CACHED_COLOUR, PALETTE
from pagecore.serving.pictures.timeline import CACHED, FREE, Timeline
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.capabilities import require
from tests.serving.pictures.pictured import FULL, WINDOWED, serve

pytestmark = pytest.mark.slow

require("matplotlib")

from matplotlib.colors import to_hex  # noqa: E402

from pagecore.serving.pictures.plot import draw, save  # noqa: E402


def run(layers=FULL, columns=64, rows=384, **options):
    timeline = Timeline(columns, rows)
    scheduler, metrics = serve([timeline], layers=layers, **options)
    return SimpleNamespace(timeline=timeline, scheduler=scheduler, metrics=metrics)


@pytest.fixture(scope="module")
def two_groups():
    ran = run([FULL, WINDOWED], num_blocks=[26, 20])
    ran.figure = draw(ran.timeline, "two groups")
    return ran


def titles(figure):
    return [ax.get_title(loc="left") for ax in figure.axes]


def hexes(image):
    """Return the colours of the cells of an image, row by row from below."""
    return [[to_hex(np.asarray(cell) / 255).upper() for cell in row] for row in image.get_array()]


def test_a_picture_has_its_panels_with_titles_units_and_one_axis_of_steps(two_groups):
    figure, stride = two_groups.figure, two_groups.timeline.stride
    assert titles(figure) == [
        "Use of the blocks",
        "Sequences",
        f"Preemptions in each {stride} steps",
        "Prompt tokens reused",
        f"Cached blocks evicted in each {stride} steps",
        "Block map of group 0: 25 blocks of 4 tokens",
        "Block map of group 1: 19 blocks of 4 tokens",
    ]
    assert [ax.get_ylabel() for ax in figure.axes] == ["%", "count", "count", "%", "count", "block", "block"]
    assert [ax.get_xlabel() for ax in figure.axes] == [*[""] * 6, "step"]
    assert {ax.get_xlim() for ax in figure.axes} == {(0, two_groups.timeline.steps)}
    assert any(text.get_text() == "two groups" for text in figure.texts)


def test_the_block_map_shows_runs_in_their_colours_shared_dark_cached_grey_and_free_white(two_groups):
    timeline, colours = two_groups.timeline, {}
    for group, ax in enumerate(two_groups.figure.axes[5:]):
        cells, (image,) = timeline.cells(group), ax.images
        shown = hexes(image)
        for row, column in np.ndindex(cells.shape):
            number, colour = int(cells[row, column]), shown[row][column]
            if number == FREE:
                assert colour == "#FFFFFF"
            elif number == CACHED:
                assert colour == CACHED_COLOUR == "#CFCFCF"
            elif number < 0:
                assert colour == "#222222"
            else:
                assert colours.setdefault(number, colour) == colour
                assert colour in PALETTE
        assert ((cells < 0) & (cells != CACHED)).any()
        assert (cells == FREE).any()
        assert (cells == CACHED).any()
    assert len(set(colours.values())) == len(PALETTE)


def test_a_cell_of_the_block_map_is_drawn_at_its_block_and_its_steps(two_groups):
    for group, ax in enumerate(two_groups.figure.axes[5:]):
        timeline, (image,) = two_groups.timeline, ax.images
        left, right, bottom, top = image.get_extent()
        rows, columns = timeline.cells(group).shape
        assert (left, right) == (0, columns * timeline.stride)
        assert (bottom, top) == (0.5, timeline.num_blocks[group] - 0.5) == ax.get_ylim()
        assert rows == timeline.num_blocks[group] - 1
        assert image.origin == "lower"


def test_the_title_of_a_sampled_pool_names_the_share_of_blocks_shown():
    timeline = run(rows=10).timeline
    ax = draw(timeline, "").axes[5]
    assert ax.get_title(loc="left") == "Block map: 25 blocks of 4 tokens, one in 3 shown"
    assert ax.images[0].get_array().shape[0] == 9
    # Each row covers three blocks and is centred on the first of them; the last row is block 25.
    assert ax.get_ylim() == (-0.5, 26.5)


def test_preemptions_are_bars_with_their_sum_and_marks_above_each_block_map(two_groups):
    counts, stride = two_groups.timeline.preemptions(), two_groups.timeline.stride
    ax = two_groups.figure.axes[2]
    (bars,) = ax.patches
    assert bars.get_data().values.tolist() == counts[: len(bars.get_data().values)]
    assert sum(bars.get_data().values) == two_groups.scheduler.num_preemptions > 0
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [f"recomputed ({sum(counts)})"]
    expected = [column * stride for column, count in enumerate(counts) if count]
    for each in two_groups.figure.axes[5:]:
        (marks,) = each.lines
        assert marks.get_xdata().tolist() == expected
        assert not marks.get_clip_on()
        assert min(marks.get_ydata()) > 1


@pytest.mark.parametrize("columns", [2, 16, 1000])
def test_the_bars_reach_the_last_step_and_count_every_preemption(columns):
    ran = run(columns=columns)
    (bars,) = draw(ran.timeline, "").axes[2].patches
    assert bars.get_data().edges[-1] == ran.metrics.steps
    assert sum(bars.get_data().values) == ran.scheduler.num_preemptions


def test_swaps_are_stacked_on_preemptions():
    timeline = Timeline(1000)

    def pretend(scheduler, metrics):
        if metrics.steps % 20 == 0:
            scheduler._roster.num_preemptions += 1
            scheduler._roster.num_swaps += 1

    serve([pretend, timeline])
    recomputed, swapped = draw(timeline, "").axes[2].patches
    assert recomputed.get_data().values.tolist() == timeline.recomputed()[:-1]
    assert (swapped.get_data().values - swapped.get_data().baseline).tolist() == timeline.swaps()[:-1]


def test_the_lines_are_the_metrics(two_groups):
    metrics = two_groups.metrics
    _, used, waste = two_groups.figure.axes[0].patches
    running, waiting = two_groups.figure.axes[1].patches
    for line, series, scale in (
        (used, metrics.utilization, 100),
        (waste, metrics.fragmentation, 100),
        (running, metrics.running, 1),
        (waiting, metrics.waiting, 1),
    ):
        assert line.get_data().values == pytest.approx(scale * np.array(series.values()))
        assert line.get_data().edges[-1] == metrics.steps
    legend = [text.get_text() for text in two_groups.figure.axes[0].get_legend().get_texts()]
    assert legend[0] == f"blocks held (mean {metrics.utilization_mean:.1%}, peak {metrics.utilization_peak:.1%})"


def test_hits_are_a_line_with_gaps_and_evictions_bars_with_their_sum(two_groups):
    timeline, metrics = two_groups.timeline, two_groups.metrics
    (line,), (bars,) = (ax.patches for ax in two_groups.figure.axes[3:5])
    queries, hits = metrics.prefix_query.values(), metrics.prefix_hit.values()
    assert line.get_data().edges[-1] == metrics.steps
    for value, query, hit in zip(line.get_data().values, queries, hits, strict=True):
        assert (np.isnan(value) and query == hit == 0) or value == pytest.approx(100 * hit / query)
    assert any(hits)
    assert 0 in queries
    reuse = two_groups.scheduler.reuse
    share = reuse.prefix_hit_tokens / reuse.prefix_query_tokens
    assert two_groups.figure.axes[3].get_legend().get_texts()[0].get_text() == f"tokens (all: {share:.1%})"
    assert bars.get_data().values.tolist() == timeline.evictions()[: len(bars.get_data().values)]
    assert sum(bars.get_data().values) == metrics.evicted_blocks > 0


def test_without_a_prefix_cache_there_are_no_panels_of_hits_and_evictions():
    figure = draw(run(prefix_cache=False).timeline, "")
    assert [title.split()[0] for title in titles(figure)] == ["Use", "Sequences", "Preemptions", "Block"]


def test_names_of_runs_are_inside_their_own_cells(two_groups):
    labelled = 0
    for group, ax in enumerate(two_groups.figure.axes[5:]):
        cells = two_groups.timeline.cells(group)
        for text in ax.texts:
            step, block = text.get_position()
            number = int(cells[round(block) - 1, int(step / two_groups.timeline.stride)])
            name = two_groups.timeline.names[abs(number)]
            assert text.get_text() == (name if number > 0 else name.split(".")[0])
            labelled += 1
    assert labelled > 10


def shown_texts(figure):
    """Yield every visible text outside the maps."""
    for ax in figure.axes:
        ticks = [(ax.get_ylim(), ax.get_yticks(), ax.get_yticklabels())]
        if ax is figure.axes[-1]:
            ticks.append((ax.get_xlim(), ax.get_xticks(), ax.get_xticklabels()))
        for (low, high), places, labels in ticks:
            yield from (label for place, label in zip(places, labels, strict=True) if low <= place <= high)
        yield from [ax._left_title, ax.xaxis.label, ax.yaxis.label]
        yield from ax.get_legend().get_texts() if ax.get_legend() else []
    yield from [*figure.texts, *figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("layers", "num_blocks"),
    [(FULL, 26), ([FULL, WINDOWED], 26), (FULL, 120), ([FULL, WINDOWED], 40_000)],
    ids=["one small group", "two small groups", "one group", "two large groups"],
)
def test_no_two_texts_of_a_picture_overlap_and_none_is_cut_off(layers, num_blocks):
    figure = draw(run(layers, num_blocks=num_blocks, max_running=20).timeline, "pagecore replay trace.jsonl")
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(figure) if text.get_text()]
    assert len(boxes) > 30
    for number, (name, box) in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, name
        for other, other_box in boxes[number + 1 :]:
            assert not box.overlaps(other_box), (name, other)
    for ax in figure.axes:
        for text in [ax._left_title, *(ax.get_legend().get_texts() if ax.get_legend() else [])]:
            assert not any(text.get_window_extent().overlaps(other.bbox) for other in figure.axes), text


def test_a_run_without_preemptions_has_a_low_panel_with_the_word_none():
    calm, busy = (draw(run(num_blocks=blocks).timeline, "") for blocks in (200, 26))
    assert [text.get_text() for text in calm.axes[2].texts] == ["none"]
    assert calm.axes[2].get_legend() is None
    assert calm.get_figheight() < busy.get_figheight()


def test_a_run_without_steps_can_be_drawn(tmp_path):
    save(Timeline(), tmp_path / "none", "nothing")
    assert (tmp_path / "none").read_bytes().startswith(b"\x89PNG\r\n")
    (text,) = draw(Timeline(), "nothing").axes[3].texts
    assert text.get_text() == "no step was run"


@pytest.mark.parametrize(("num_blocks", "title"), [(2, "1 block of 4 tokens"), (3, "2 blocks of 4 tokens")])
def test_each_block_of_a_tiny_pool_has_one_tick(num_blocks, title):
    timeline = Timeline()
    cache = PagedKVCache(FULL, block_size=4, num_blocks=num_blocks, device="none")
    scheduler, metrics = Scheduler(cache), Metrics()
    scheduler.add(Request(0, np.arange(3), 0))
    scheduler.commit(scheduler.schedule())
    metrics.observe(cache.stats(), 1, 0, scheduler.reuse)
    timeline(scheduler, metrics)
    ax = draw(timeline, "").axes[5]
    assert ax.get_title(loc="left") == f"Block map: {title}"
    names = [tick.get_text() for tick in ax.get_yticklabels() if 0.5 < tick.get_position()[1] < num_blocks - 0.5]
    assert names == [str(block) for block in range(1, num_blocks)]


def test_a_run_shorter_than_a_span_can_be_drawn():
    class OneStep(Timeline):
        def __call__(self, scheduler, metrics):
            if metrics.steps == 1:
                super().__call__(scheduler, metrics)

    timeline = OneStep()
    serve([timeline])
    figure = draw(timeline, "")
    assert figure.axes[5].images[0].get_array().shape[1] == 1


def test_the_file_is_a_png_whatever_its_name(tmp_path, two_groups):
    save(two_groups.timeline, tmp_path / "c.JPG", "x")
    assert (tmp_path / "c.JPG").read_bytes().startswith(b"\x89PNG\r\n")


def test_drawing_needs_no_display_and_does_not_import_pyplot():
    code = (
        "import sys\n"
        "from pagecore.serving.pictures.plot import draw\n"
        "from pagecore.serving.pictures.timeline import Timeline\n"
        "assert 'matplotlib' not in sys.modules\n"
        "draw(Timeline(), 'x')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
