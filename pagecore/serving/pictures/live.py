"""The block map in the terminal, while a run is under way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import groupby
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from pagecore.serving.pictures.palette import PALETTE
from pagecore.serving.pictures.timeline import CACHED, FREE, RunNumbers, cells_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rich.console import Console, RenderableType

    from pagecore.serving.metrics import Metrics
    from pagecore.serving.pictures.timeline import Cells
    from pagecore.serving.scheduler import Scheduler

__all__ = ["LiveMap"]

REFRESHES_PER_SECOND = 10
# Lines that are not map: counters, the legend, what the caller shows below, and the cursor's own.
OTHER_LINES = 6
# For terminals of sixteen colours, where those of the palette would fall together.
FEW_COLOURS = ("yellow", "bright_cyan", "green", "bright_yellow", "blue", "red", "bright_magenta")
CELL_WIDTH_MAX = 4


class LiveMap(AbstractContextManager["LiveMap"]):
    """A watcher that shows who holds which block, at most ten times a second; on no terminal it shows nothing.

    A block is one character, several where there is room, or one of several blocks, equally spaced, where there is not.
    A run keeps its colour over its life; where there are no colours it has a letter instead.

    Parameters
    ----------
    console : rich.console.Console
    below : renderable, optional
        Shown under the map: a progress bar.
    clock : callable
        Seconds.
    """

    def __init__(self, console: Console, below: RenderableType = "", clock: Callable[[], float] = monotonic) -> None:
        self.is_shown = console.is_terminal and not console.is_dumb_terminal
        self._console = console
        self._below = below
        self._clock = clock
        self._due = clock()
        self._numbers = RunNumbers()
        self._colours: dict[int, int] = {}
        self._map: RenderableType = ""
        self._live = Live(
            console=console,
            get_renderable=lambda: Group(self._map, self._below),
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> LiveMap:
        if self.is_shown:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        """Take in one step of a run."""
        if not self.is_shown or self._clock() < self._due:
            return
        numbers = self._numbers.update(scheduler)
        self._choose_colours(set(numbers.values()))
        # Made here, where nobody writes to the cache; the refreshing thread only prints it.
        self._map = self._drawn(scheduler, metrics, numbers)
        self._due = self._clock() + 1 / REFRESHES_PER_SECOND

    def _choose_colours(self, running: set[int]) -> None:
        """Each new run gets the colour that the fewest others have; those that ended or were preempted leave theirs."""
        known = self._numbers.known()
        self._colours = {number: colour for number, colour in self._colours.items() if number in known}
        used = [0] * len(PALETTE)
        for number, colour in self._colours.items():
            used[colour] += number in running
        for number in sorted(running - self._colours.keys()):
            best = min(range(len(PALETTE)), key=lambda colour: (used[colour], (colour - number) % len(PALETTE)))
            self._colours[number] = best
            used[best] += 1

    def _drawn(self, scheduler: Scheduler, metrics: Metrics, numbers: dict[object, int]) -> Group:
        cache, stats = scheduler.cache, scheduler.cache.stats()
        counters = (
            f"step {metrics.steps:,}   blocks held {stats.utilization:.0%}   waste inside {stats.fragmentation:.1%}   "
            f"running {scheduler.num_running}   waiting {scheduler.num_waiting}   "
            f"preemptions {scheduler.num_preemptions:,} ({scheduler.num_swaps:,} swapped out)"
        )
        if cache.has_prefix_cache:
            counters += f"   hits {scheduler.reuse.token_hit_rate:.0%}   evicted {metrics.evicted_blocks:,}"
        width = self._console.width
        lines = max(1, (self._console.height - OTHER_LINES) // cache.num_groups - 1)
        maps: list[RenderableType] = []
        for group, blocks in enumerate(cache.num_blocks):
            cell_width = max(1, min(lines * width // (blocks - 1), CELL_WIDTH_MAX, width))
            cells_a_line = width // cell_width
            step = -(-(blocks - 1) // (lines * cells_a_line))
            shown = f", one in {step} shown" if step > 1 else ""
            maps.append(_line(f"group {group}: {blocks - 1:,} blocks{shown}", "dim"))
            maps.append(self._cells(cells_of(cache.block_map(group), numbers, step), cells_a_line, cell_width))
        return Group(_line(counters), *maps, self._legend())

    def _cells(self, cells: Cells, cells_a_line: int, cell_width: int) -> Text:
        """Lines of cells; neighbours that are the same are one piece of text."""
        text = Text(no_wrap=True, overflow="crop", end="")
        for start in range(0, len(cells), cells_a_line):
            for number, same in groupby(cells[start : start + cells_a_line].tolist()):
                glyph, style = self._look(number)
                text.append(glyph * (cell_width * len(list(same))), style)
            text.append("\n")
        return text

    def _look(self, number: int) -> tuple[str, str]:
        held, shared, cached, free = "█▒░·" if self._console.encoding.startswith("utf") else "#%:."
        if number == FREE:
            return free, "dim"
        if number == CACHED:
            return cached, "dim"
        if number < FREE:
            return shared, "bold"
        colour = self._colours[number]
        if self._console.no_color or self._console.color_system is None:
            return chr(ord("A") + colour), ""
        return held, (FEW_COLOURS if self._console.color_system in ("standard", "windows") else PALETTE)[colour]

    def _legend(self) -> Text:
        legend = _line("")
        for number, text in ((FREE - 1, " shared by several   "), (CACHED, " cached   "), (FREE, " free")):
            legend.append(*self._look(number)).append(text)
        return legend


def _line(text: str, style: str = "") -> Text:
    """One line that a narrow terminal cuts off."""
    return Text(text, style, no_wrap=True, overflow="crop")
