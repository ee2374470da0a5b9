"""One picture of a run: use of the cache, queue, preemptions, reuse, and the owner of each block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagecore.serving.pictures.map_panel import draw_map, draw_map_legend
from pagecore.serving.pictures.palette import INK, colours_of
from pagecore.serving.pictures.panels import (
    draw_evictions,
    draw_hits,
    draw_preemptions,
    draw_queue,
    draw_use,
    plain,
)
from pagecore.serving.pictures.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]

DPI = 100
# Margins, the gap between two panels with the title in it, and the height that the block maps share.
WIDTH_IN, LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN, GAP_IN, MAP_HEIGHT_IN = 10.0, 0.75, 0.25, 0.75, 0.9, 0.45, 5.8


def save(timeline: Timeline, path: str | Path, title: str) -> None:
    """Draw a run and write the picture as PNG.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    draw(timeline, title).savefig(path, format="png", dpi=DPI)


def draw(timeline: Timeline, title: str) -> Figure:
    """Draw a run. Requires matplotlib, but no display; the global state of matplotlib is not changed.

    The panels share the axis of steps: use of the blocks; running and waiting sequences; preemptions; with a prefix
    cache, the share of prompt tokens reused and the evictions; and a block map for each group of layers, in which each
    run keeps one colour.

    Parameters
    ----------
    timeline : Timeline
        The recorded run.
    title : str
        Title of the picture.

    Returns
    -------
    matplotlib.figure.Figure
    """
    figure, axes = _panels(timeline)
    figure.text(LEFT_IN / WIDTH_IN, 1 - 0.32 / figure.get_figheight(), title, fontsize=13, weight="bold", color=INK)
    draw_use(axes[0], timeline)
    draw_queue(axes[1], timeline)
    draw_preemptions(axes[2], timeline)
    if timeline.has_prefix_cache:
        draw_hits(axes[3], timeline)
        draw_evictions(axes[4], timeline)
    colours = colours_of(timeline.cells(group) for group in range(timeline.num_groups))
    for group, ax in enumerate(axes[-max(1, timeline.num_groups) :]):
        draw_map(figure, ax, timeline, group, colours)
    axes[-1].set_xlabel("step", fontsize=8.5, color=INK)
    axes[-1].set_xlim(0, max(1, timeline.steps))
    figure.align_ylabels(axes)
    draw_map_legend(figure, LEFT_IN / WIDTH_IN)
    return figure


def _panels(timeline: Timeline) -> tuple[Figure, list[Axes]]:
    """Return a figure with empty panels stacked at fixed positions in inches, independent of their labels."""
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
        plain(axes[-1])
        axes[-1].tick_params(labelbottom=len(axes) == len(heights))
        y -= GAP_IN
    return figure, axes


def _height_of_bars(counts: list[int]) -> float:
    """Return the height of a panel of bars in inches; panels without bars are low."""
    return 0.8 if any(counts) else 0.3
