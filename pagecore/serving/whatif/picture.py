"""Picture of a what-if: the curves, and the trace over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagecore.serving.pictures.palette import INK, PALETTE
from pagecore.serving.tables import human_bytes
from pagecore.serving.whatif.page import curve_name
from pagecore.serving.whatif.report import WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 100


def save_picture(result: WhatIf, path: Path) -> None:
    """Draw the results and write them as PNG; the global state of matplotlib is not changed.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((10, 4.2 if result.timeline is None else 11), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 if result.timeline is None else 3, 1, squeeze=False)[:, 0]
    figure.suptitle(f"What if: {result.trace}", color=INK, weight="bold")
    _curves(axes[0], result)
    if result.timeline is not None:
        _over_time(axes[1], axes[2], result)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=DPI)


def _curves(ax: Axes, result: WhatIf) -> None:
    for i, curve in enumerate(result.curves):
        style = "-" if curve.method == "exact" else "o-"
        rates = [100 * rate for rate in curve.hit_rate]
        ax.plot(curve.memory, rates, style, ms=3, color=PALETTE[i % len(PALETTE)], label=curve_name(result, i))
    ax.axhline(100 * result.unbounded_hit_rate, color=INK, lw=0.8, ls="--", label="without eviction")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _position: human_bytes(value))
    ax.set_xlabel("memory")
    ax.set_ylabel("hit rate, %")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False)


def _over_time(upper: Axes, lower: Axes, result: WhatIf) -> None:
    timeline = result.timeline
    assert timeline is not None
    size = result.curves[0].block_size * result.bytes_per_token
    upper.plot(timeline.seconds, [count * size for count in timeline.num_blocks], color=PALETTE[0])
    upper.yaxis.set_major_formatter(lambda value, _position: human_bytes(value))
    upper.set_ylabel("distinct blocks")
    upper.set_ylim(bottom=0)
    for i, (memory, rates) in enumerate(zip(result.timeline_memory, timeline.hit_rates, strict=True)):
        known = [float("nan") if rate is None else 100 * rate for rate in rates]
        lower.plot(timeline.seconds, known, lw=1, color=PALETTE[i % len(PALETTE)], label=human_bytes(memory))
    lower.set_xlabel("time, s")
    lower.set_ylabel("hit rate, %")
    lower.legend(frameon=False)
