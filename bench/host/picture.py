"""A picture of decode attention: GB/s of each shape and of its controls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.figures import Figure
from bench.host.attention_controls import READ

INK, GREY, GRID, BLUE = "#333333", "#767676", "#DDDDDD", "#0072B2"
# Marker and colour of pagecore and of the controls, in order of appearance (colours of Okabe and Ito, 2008).
LOOKS = (("o", BLUE), ("|", INK), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#CC79A7"), ("v", "#E69F00"))
OURS = "pagecore"
DPI = 110
# Inches: panel width, line height, letter width, top margin, bottom margin, gap between panels.
PANEL_IN, LINE_IN, LETTER_IN, TOP_IN, BOTTOM_IN, GAP_IN = 3.0, 0.2, 0.066, 1.15, 0.6, 0.25


def save(figures: Sequence[Figure], path: Path, machine: str) -> None:
    """Draw the figures with a read of their bytes as a control, as PNG; needs matplotlib, but no display.

    Each dtype and number of threads has a panel, with a line for each shape: pagecore and every control.
    """
    draw([figure for figure in figures if READ in figure.controls], machine).savefig(path, format="png", dpi=DPI)


def draw(figures: Sequence[Figure], machine: str) -> Any:
    """Return the picture of figures with `nbytes`, and with `dtype` and `threads` among their sizes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    panels = list(dict.fromkeys(_panel(figure) for figure in figures))
    shapes = list(dict.fromkeys(_shape(figure) for figure in figures))
    names = [OURS, *dict.fromkeys(name for figure in figures for name in figure.controls)]
    left = 0.3 + LETTER_IN * max(map(len, [*shapes, "sequences x context, heads x dim"]))
    width = left + max(1, len(panels)) * (PANEL_IN + GAP_IN)
    height = TOP_IN + max(4, len(shapes) + 1) * LINE_IN + BOTTOM_IN
    picture = Picture((width, height))
    FigureCanvasAgg(picture)
    title = f"Decode attention: {machine}"
    picture.text(0.15 / width, 1 - 0.35 / height, title, fontsize=13, weight="bold", color=INK)
    axes: list[Any] = []
    for i, panel in enumerate(panels):
        x, tall = left + i * (PANEL_IN + GAP_IN), height - TOP_IN - BOTTOM_IN
        place = (x / width, BOTTOM_IN / height, PANEL_IN / width, tall / height)
        ax = picture.add_axes(place, sharex=axes[0] if axes else None, sharey=axes[0] if axes else None)
        axes.append(ax)
        _plain(ax, panel)
        for figure in figures:
            if _panel(figure) == panel:
                _draw_line(ax, shapes.index(_shape(figure)), figure, names)
        ax.tick_params(labelleft=i == 0)
    if axes:
        axes[0].set_yticks(range(len(shapes)), shapes)
        axes[0].set_ylim(len(shapes) - 0.4, -0.6)
        axes[0].set_xlim(left=0)
        above = ((left - 0.1) / width, 1 - (TOP_IN - 0.09) / height)
        picture.text(*above, "sequences x context, heads x dim", fontsize=8.5, color=INK, ha="right")
    _legend(picture, names)
    return picture


def _panel(figure: Figure) -> str:
    threads = figure.sizes["threads"]
    return f"{figure.sizes['dtype']}, {threads} thread{'' if threads == 1 else 's'}"


def _shape(figure: Figure) -> str:
    """Return the figure's name without the parts that the panel shows."""
    return figure.name.removeprefix("decode ").removesuffix(f", {_panel(figure)}")


def _draw_line(ax: Any, y: int, figure: Figure, names: list[str]) -> None:
    rates = {OURS: figure.gb_per_s(figure.subject)}
    rates |= {name: figure.gb_per_s(control.time) for name, control in figure.controls.items()}
    ax.plot([min(rates.values()), max(rates.values())], [y, y], color=GRID, linewidth=1, zorder=1)
    for name, rate in rates.items():
        ax.plot([rate], [y], zorder=3 if name == OURS else 2, **_look(names.index(name)))


def _look(i: int) -> dict[str, Any]:
    marker, colour = LOOKS[i % len(LOOKS)]
    size = 10 if marker == "|" else 6 if i == 0 else 5
    return {"marker": marker, "color": colour, "markersize": size, "markeredgewidth": 1.6, "linestyle": "none"}


def _plain(ax: Any, title: str) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=8)
    ax.set_title(title, loc="left", fontsize=9.5, color=INK)
    ax.set_xlabel("key and value read, GB/s", fontsize=8.5, color=INK)
    ax.grid(axis="x", color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def _legend(picture: Any, names: list[str]) -> None:
    from matplotlib.lines import Line2D

    width, height = picture.get_size_inches()
    handles = [Line2D([], [], **_look(i)) for i in range(len(names))]
    picture.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.05 / width, 1 - 0.45 / height),
        ncols=len(names),
        frameon=False,
        fontsize=8.5,
    )
