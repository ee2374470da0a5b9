"""A run as one picture: how full the cache was, who waited, who was preempted, who held which block."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.metrics import Series
from pagecore.serving.pictures.palette import PALETTE, colours_of, labels_of, readable_on
from pagecore.serving.pictures.timeline import CACHED, FREE, Cells, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]

INK, GREY, GRID = "#333333", "#767676", "#DDDDDD"
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
FREE_COLOUR, CACHED_COLOUR, SHARED_COLOUR = "#FFFFFF", "#CFCFCF", "#222222"
DPI = 100
# Margins, the gap between two panels with the title in it, and what all block maps have together.
WIDTH_IN, LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, GAP_IN, MAP_HEIGHT_IN = 10.0, 0.75, 0.25, 0.75, 0.9, 0.45, 5.8


def save(timeline: Timeline, path: str | Path, title: str) -> None:
    """Draw a run and write it as PNG.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    draw(timeline, title).savefig(path, format="png", dpi=DPI)


def draw(timeline: Timeline, title: str) -> Figure:
    """The picture of a run; needs matplotlib, but no display, and leaves its global state alone.

    The panels share the axis of steps: use of the blocks; running and waiting sequences; preemptions; with a prefix
    cache, the share of the prompts that was reused, and evictions; and a block map for each group of layers, in which
    each run has one colour from its first block to its last.
    """
    figure, axes = _panels(timeline)
    figure.text(LEFT_IN / WIDTH_IN, 1 - 0.32 / figure.get_figheight(), title, fontsize=13, weight="bold", color=INK)
    _draw_use(axes[0], timeline)
    _draw_queue(axes[1], timeline)
    _draw_preemptions(axes[2], timeline)
    if timeline.has_prefix_cache:
        _draw_hits(axes[3], timeline)
        _draw_evictions(axes[4], timeline)
    colours = colours_of(timeline.cells(group) for group in range(timeline.num_groups))
    for group, ax in enumerate(axes[-max(1, timeline.num_groups) :]):
        _draw_map(figure, ax, timeline, group, colours)
    axes[-1].set_xlabel("step", fontsize=8.5, color=INK)
    axes[-1].set_xlim(0, max(1, timeline.steps))
    figure.align_ylabels(axes)
    _legend_of_maps(figure)
    return figure


def _panels(timeline: Timeline) -> tuple[Figure, list[Axes]]:
    """An empty figure with its panels one below the other, at places in inches that do not depend on what they show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    maps = max(1, timeline.num_groups)
    heights = [1.5, 1.2, _height_of_bars(timeline.preemptions())]
    if timeline.has_prefix_cache:
        heights += [0.9, _height_of_bars(timeline.evictions())]
    heights += [max(1.5, MAP_HEIGHT_IN / maps)] * maps
    height = TOP_IN + sum(heights) + GAP_IN * (len(heights) - 1) + BOTTOM_IN
    figure = Figure((WIDTH_IN, height))
    FigureCanvasAgg(figure)
    axes: list[Axes] = []
    y = height - TOP_IN
    for panel in heights:
        y -= panel
        place = (LEFT_IN / WIDTH_IN, y / height, 1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN, panel / height)
        axes.append(figure.add_axes(place, sharex=axes[0] if axes else None))
        _plain(axes[-1])
        axes[-1].tick_params(labelbottom=len(axes) == len(heights))
        y -= GAP_IN
    return figure, axes


def _height_of_bars(counts: list[int]) -> float:
    """Inches; low where there is nothing to show."""
    return 0.8 if any(counts) else 0.3


def _plain(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_axisbelow(True)


def _titled(ax: Axes, title: str, unit: str, pad: float = 6.0) -> None:
    ax.set_title(title, loc="left", fontsize=9.5, color=INK, pad=pad)
    ax.set_ylabel(unit, fontsize=8.5, color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.6)


def _legend(ax: Axes) -> None:
    """On the title's line at the right, where no line can run through it."""
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4, frameon=False, fontsize=8.5, borderaxespad=0.0)


def _steps(series: Series, steps: int) -> tuple[list[float], list[float]]:
    """A series as the edges and values of a staircase."""
    values = series.values()
    edges = [min(i * series.stride, steps) for i in range(len(values) + 1)]
    return [float(edge) for edge in edges], values


def _draw_use(ax: Axes, timeline: Timeline) -> None:
    _titled(ax, "Use of the blocks", "%")
    ax.set_ylim(0, 105)
    ax.set_yticks([0, 25, 50, 75, 100])
    metrics = timeline.metrics
    if metrics is None:
        return
    edges, used = _steps(metrics.utilization, metrics.steps)
    waste = _steps(metrics.fragmentation, metrics.steps)[1]
    ax.stairs(100 * np.array(used), edges, fill=True, color=BLUE, alpha=0.15)
    label = f"blocks held (mean {metrics.utilization_mean:.1%}, peak {metrics.utilization_peak:.1%})"
    ax.stairs(100 * np.array(used), edges, color=BLUE, linewidth=1.3, baseline=None, label=label)
    label = f"of those, slots without a token (mean {metrics.fragmentation_mean:.2%})"
    ax.stairs(100 * np.array(waste), edges, color=RED, linewidth=1.3, baseline=None, label=label)
    _legend(ax)


def _draw_queue(ax: Axes, timeline: Timeline) -> None:
    from matplotlib.ticker import MaxNLocator

    _titled(ax, "Sequences", "count")
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    metrics = timeline.metrics
    if metrics is None:
        return
    for series, colour, style, label in (
        (metrics.running, GREEN, "-", "running"),
        (metrics.waiting, GREY, "--", "waiting"),
    ):
        edges, values = _steps(series, metrics.steps)
        ax.stairs(values, edges, color=colour, linestyle=style, linewidth=1.4, baseline=None, label=label)
    ax.set_ylim(bottom=0)
    _legend(ax)


def _draw_preemptions(ax: Axes, timeline: Timeline) -> None:
    _titled(ax, f"Preemptions {_span(timeline)}", "count")
    parts = [(timeline.recomputed(), RED, "recomputed"), (timeline.swaps(), BLUE, "swapped out")]
    _draw_bars(ax, _edges(timeline), parts)


def _draw_hits(ax: Axes, timeline: Timeline) -> None:
    """Each span's share of the prompts that was reused; a gap where nobody was admitted for the first time."""
    _titled(ax, "Reused of the prompts admitted", "%")
    ax.set_ylim(0, 105)
    ax.set_yticks([0, 50, 100])
    metrics = timeline.metrics
    if metrics is None:
        return
    edges = _steps(metrics.prefix_hit, metrics.steps)[0]
    rates = [math.nan if rate is None else 100 * rate for rate in metrics.prefix_hit_rates()]
    ax.stairs(rates, edges, fill=True, color=GREEN, label=f"tokens (all: {timeline.hit_rate:.1%})")
    _legend(ax)


def _draw_evictions(ax: Axes, timeline: Timeline) -> None:
    _titled(ax, f"Cached blocks given up {_span(timeline)}", "count")
    _draw_bars(ax, _edges(timeline), [(timeline.evictions(), GREY, "evicted")])


def _span(timeline: Timeline) -> str:
    return "in each step" if timeline.stride == 1 else f"in each {timeline.stride} steps"


def _draw_bars(ax: Axes, edges: list[int], parts: list[tuple[list[int], str, str]]) -> None:
    """Counts of each span, one kind upon the other, with their sums in the legend; or the word that there were none."""
    from matplotlib.ticker import MaxNLocator

    ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    base = np.zeros(len(edges) - 1)
    for counts, colour, label in parts:
        total = sum(counts)
        if total:
            values = base + counts[: len(base)]
            ax.stairs(values, edges, baseline=base, fill=True, color=colour, label=f"{label} ({total:,})")
            base = values
    if base.any():
        ax.set_ylim(0, base.max() * 1.1)
        _legend(ax)
    else:
        ax.set_ylim(0, 1)
        ax.set_yticks([0])
        ax.text(0.5, 0.45, "none", transform=ax.transAxes, ha="center", va="center", fontsize=9, color=GREY)


def _edges(timeline: Timeline) -> list[int]:
    """Where the columns' spans begin and end, the unfinished one included."""
    edges = [i * timeline.stride for i in range(timeline.num_columns + 1)]
    return edges if edges[-1] == timeline.steps and timeline.steps else [*edges, max(1, timeline.steps)]


def _draw_map(figure: Figure, ax: Axes, timeline: Timeline, group: int, colours: dict[int, int]) -> None:
    from matplotlib.ticker import MaxNLocator

    if not timeline.num_groups:
        _titled(ax, "Block map", "block")
        ax.set_ylim(0, 1)
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no step was run", transform=ax.transAxes, ha="center", va="center", fontsize=9, color=GREY)
        return
    blocks, step = timeline.num_blocks[group] - 1, timeline.block_step(group)
    name = f"Block map of group {group}" if timeline.num_groups > 1 else "Block map"
    sampled = f", one in {step} shown" if step > 1 else ""
    _titled(
        ax, f"{name}: {_counted(blocks, 'block')} of {_counted(timeline.block_size, 'token')}{sampled}", "block", pad=11
    )
    ax.grid(visible=False)
    # A pool of one block has room for one whole number only.
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    cells = timeline.cells(group)
    # Cell i is drawn around its block, so that a tick stands in the middle of the block that it names.
    bottom, top = 1 - step / 2, 1 + (cells.shape[0] - 0.5) * step
    if cells.size:
        extent = (0, cells.shape[1] * timeline.stride, bottom, top)
        ax.imshow(_image(cells, colours), extent=extent, origin="lower", aspect="auto", interpolation="nearest")
        _label_runs(figure, ax, timeline, group, colours)
    ax.set_ylim(bottom, top)
    marks = [edge for edge, count in zip(_edges(timeline), timeline.preemptions(), strict=False) if count]
    above = 1 + 0.055 / (ax.get_position().height * figure.get_figheight())
    (triangles,) = ax.plot(
        marks, [above] * len(marks), "v", color=RED, markersize=4.5, transform=ax.get_xaxis_transform()
    )
    triangles.set_clip_on(False)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _image(cells: Cells, colours: dict[int, int]) -> NDArray[np.uint8]:
    """The cells as RGB ``[rows, columns, 3]``."""
    numbers, places = np.unique(cells, return_inverse=True)
    shown = np.array([list(bytes.fromhex(_colour(number, colours)[1:])) for number in numbers.tolist()], np.uint8)
    return shown[places.reshape(cells.shape)]


def _colour(number: int, colours: dict[int, int]) -> str:
    if number == CACHED:
        return CACHED_COLOUR
    if number < FREE:
        return SHARED_COLOUR
    return PALETTE[colours[number]] if number > FREE else FREE_COLOUR


def _label_runs(figure: Figure, ax: Axes, timeline: Timeline, group: int, colours: dict[int, int]) -> None:
    """The name of each run where it has room for it; what is shared bears the request's."""
    cells, step, place = timeline.cells(group), timeline.block_step(group), ax.get_position()
    height_in, width_in = place.height * figure.get_figheight(), place.width * WIDTH_IN
    longest = max(map(len, timeline.names.values()), default=1)
    height = math.ceil(0.075 * cells.shape[0] / height_in)
    width = math.ceil((0.06 * longest + 0.03) * cells.shape[1] / width_in)
    for number, (row, column) in labels_of(cells, height, width).items():
        name = timeline.names[abs(number)]
        ax.text(
            (column + width / 2) * timeline.stride,
            1 + (row + (height - 1) / 2) * step,
            name if number > FREE else name.partition(".")[0],
            ha="center",
            va="center_baseline",
            fontsize=6,
            color=readable_on(_colour(number, colours)),
            clip_on=True,
        )


def _legend_of_maps(figure: Figure) -> None:
    """One legend below all: what the colours of the block maps mean."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        tuple(Patch(color=colour) for colour in PALETTE),
        Patch(color=SHARED_COLOUR),
        Patch(color=CACHED_COLOUR),
        Patch(facecolor=FREE_COLOUR, edgecolor=GREY),
        Line2D([], [], marker="v", color=RED, linestyle="none", markersize=5),
    ]
    labels = ["held by one sequence, named request.sample", "shared by several", "cached", "free", "preemption"]
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(LEFT_IN / WIDTH_IN, 0.08 / figure.get_figheight()),
        borderaxespad=0.0,
        ncols=5,
        frameon=False,
        fontsize=8.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
