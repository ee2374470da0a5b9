"""Panel of the block map: the run that holds each block, over the steps of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagecore.serving.pictures.palette import (
    CACHED_COLOUR,
    FREE_COLOUR,
    GREY,
    PALETTE,
    RED,
    SHARED_COLOUR,
    labels_of,
    readable_on,
)
from pagecore.serving.pictures.panels import edges, titled
from pagecore.serving.pictures.timeline import CACHED, FREE, Cells, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_map", "draw_map_legend"]


def draw_map(figure: Figure, ax: Axes, timeline: Timeline, group: int, colours: dict[int, int]) -> None:
    """Draw the block map of one group; `colours` maps each run to its place in the palette."""
    from matplotlib.ticker import MaxNLocator

    if not timeline.num_groups:
        titled(ax, "Block map", "block")
        ax.set_ylim(0, 1)
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no step was run", transform=ax.transAxes, ha="center", va="center", fontsize=9, color=GREY)
        return
    blocks, step = timeline.num_blocks[group] - 1, timeline.block_step(group)
    name = f"Block map of group {group}" if timeline.num_groups > 1 else "Block map"
    sampled = f", one in {step} shown" if step > 1 else ""
    titled(
        ax, f"{name}: {_counted(blocks, 'block')} of {_counted(timeline.block_size, 'token')}{sampled}", "block", pad=11
    )
    ax.grid(visible=False)
    # The axis of a pool of one block has a single integer tick.
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    cells = timeline.cells(group)
    # Cell i is centred on its block number, so that each tick points at the middle of the block.
    bottom, top = 1 - step / 2, 1 + (cells.shape[0] - 0.5) * step
    if cells.size:
        extent = (0, cells.shape[1] * timeline.stride, bottom, top)
        ax.imshow(_image(cells, colours), extent=extent, origin="lower", aspect="auto", interpolation="nearest")
        _label_runs(figure, ax, timeline, group, colours)
    ax.set_ylim(bottom, top)
    marks = [edge for edge, count in zip(edges(timeline), timeline.preemptions(), strict=False) if count]
    above = 1 + 0.055 / (ax.get_position().height * figure.get_figheight())
    (triangles,) = ax.plot(
        marks, [above] * len(marks), "v", color=RED, markersize=4.5, transform=ax.get_xaxis_transform()
    )
    triangles.set_clip_on(False)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _image(cells: Cells, colours: dict[int, int]) -> NDArray[np.uint8]:
    """Return the cells as RGB, uint8 ``[rows, columns, 3]``."""
    numbers, inverse = np.unique(cells, return_inverse=True)
    shown = np.array([list(bytes.fromhex(_colour(number, colours)[1:])) for number in numbers.tolist()], np.uint8)
    return shown[inverse.reshape(cells.shape)]


def _colour(number: int, colours: dict[int, int]) -> str:
    if number == CACHED:
        return CACHED_COLOUR
    if number < FREE:
        return SHARED_COLOUR
    return PALETTE[colours[number]] if number > FREE else FREE_COLOUR


def _label_runs(figure: Figure, ax: Axes, timeline: Timeline, group: int, colours: dict[int, int]) -> None:
    """Write the name of each run into its cells if it fits; shared cells show the name of the request."""
    cells, step, place = timeline.cells(group), timeline.block_step(group), ax.get_position()
    height_in, width_in = place.height * figure.get_figheight(), place.width * figure.get_figwidth()
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


def draw_map_legend(figure: Figure, left: float) -> None:
    """Draw the legend of the block maps' colours below all panels; `left` is its left edge, a share of the width."""
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
        bbox_to_anchor=(left, 0.08 / figure.get_figheight()),
        borderaxespad=0.0,
        ncols=5,
        frameon=False,
        fontsize=8.5,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
