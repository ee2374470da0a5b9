"""Panels of lines and bars: use, queue, preemptions, reuse and evictions over the steps of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pagecore.serving.metrics import Series
from pagecore.serving.pictures.palette import BLUE, GREEN, GREY, GRID, INK, RED
from pagecore.serving.pictures.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_evictions", "draw_hits", "draw_preemptions", "draw_queue", "draw_use", "edges", "plain", "titled"]


def plain(ax: Axes) -> None:
    """Style the spines and the axis of steps of a panel."""
    from matplotlib.ticker import MaxNLocator

    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_axisbelow(True)


def titled(ax: Axes, title: str, unit: str, pad: float = 6.0) -> None:
    """Set the title, the unit and the horizontal grid of a panel."""
    ax.set_title(title, loc="left", fontsize=9.5, color=INK, pad=pad)
    ax.set_ylabel(unit, fontsize=8.5, color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.6)


def _legend(ax: Axes) -> None:
    """Put the legend right of the title, where no curve can cross it."""
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4, frameon=False, fontsize=8.5, borderaxespad=0.0)


def _steps(series: Series, steps: int) -> tuple[list[float], list[float]]:
    """Return the edges and values of a series, for `Axes.stairs`."""
    values = series.values()
    edges = [min(i * series.stride, steps) for i in range(len(values) + 1)]
    return [float(edge) for edge in edges], values


def draw_use(ax: Axes, timeline: Timeline) -> None:
    """Draw the shares of blocks held and of their slots without a token."""
    titled(ax, "Use of the blocks", "%")
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
    label = f"their slots without a token (mean {metrics.fragmentation_mean:.2%})"
    ax.stairs(100 * np.array(waste), edges, color=RED, linewidth=1.3, baseline=None, label=label)
    _legend(ax)


def draw_queue(ax: Axes, timeline: Timeline) -> None:
    """Draw the numbers of running and waiting sequences."""
    from matplotlib.ticker import MaxNLocator

    titled(ax, "Sequences", "count")
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


def draw_preemptions(ax: Axes, timeline: Timeline) -> None:
    """Draw the preemptions of each span of steps, recomputed and swapped out."""
    titled(ax, f"Preemptions {_span(timeline)}", "count")
    parts = [(timeline.recomputed(), RED, "recomputed"), (timeline.swaps(), BLUE, "swapped out")]
    _draw_bars(ax, edges(timeline), parts)


def draw_hits(ax: Axes, timeline: Timeline) -> None:
    """Draw the share of prompt tokens reused in each span; a span without a first admission is a gap."""
    titled(ax, "Prompt tokens reused", "%")
    ax.set_ylim(0, 105)
    ax.set_yticks([0, 50, 100])
    metrics = timeline.metrics
    if metrics is None:
        return
    edges = _steps(metrics.prefix_hit, metrics.steps)[0]
    rates = [math.nan if rate is None else 100 * rate for rate in metrics.prefix_hit_rates()]
    ax.stairs(rates, edges, fill=True, color=GREEN, label=f"tokens (all: {timeline.hit_rate:.1%})")
    _legend(ax)


def draw_evictions(ax: Axes, timeline: Timeline) -> None:
    """Draw the blocks that the prefix cache evicted in each span of steps."""
    titled(ax, f"Cached blocks evicted {_span(timeline)}", "count")
    _draw_bars(ax, edges(timeline), [(timeline.evictions(), GREY, "evicted")])


def _span(timeline: Timeline) -> str:
    return "in each step" if timeline.stride == 1 else f"in each {timeline.stride} steps"


def _draw_bars(ax: Axes, edges: list[int], parts: list[tuple[list[int], str, str]]) -> None:
    """Stack the counts of each span, with their sums in the legend; write "none" if all are zero."""
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


def edges(timeline: Timeline) -> list[int]:
    """Return the steps at which the columns' spans begin and end, the unfinished span included."""
    edges = [i * timeline.stride for i in range(timeline.num_columns + 1)]
    return edges if edges[-1] == timeline.steps and timeline.steps else [*edges, max(1, timeline.steps)]
