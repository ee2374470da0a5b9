"""Live block map of a run in the terminal."""

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
    from pagecore.serving.scheduling.scheduler import Scheduler

__all__ = ["LiveMap"]

REFRESHES_PER_SECOND = 10
# Lines that are not part of a map: counters, legend, the renderable of the caller, and the line of the cursor.
OTHER_LINES = 6
# Colours for terminals with sixteen colours, where several colours of the palette would look the same.
FEW_COLOURS = ("yellow", "bright_cyan", "green", "bright_yellow", "blue", "red", "bright_magenta")
CELL_WIDTH_MAX = 4


class LiveMap(AbstractContextManager["LiveMap"]):
    """A watcher that shows the run that holds each block, at most ten times a second; only on a terminal.

    A block is one to four characters wide. If the blocks do not fit, equally spaced blocks are shown. A run keeps its
    colour for life; without colours, each run is a letter.

    Parameters
    ----------
    console : rich.console.Console
    below : renderable, optional
        Shown under the map, such as a progress bar.
    clock : callable
        Returns the time in seconds.
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
        """Update the map after one step of a run."""
        if not self.is_shown or self._clock() < self._due:
            return
        numbers = self._numbers.update(scheduler)
        self._choose_colours(set(numbers.values()))
        # Rendered in this thread, which runs the scheduler; the refreshing thread only prints the result.
        self._map = self._render(scheduler, metrics, numbers)
        self._due = self._clock() + 1 / REFRESHES_PER_SECOND

    def _choose_colours(self, running: set[int]) -> None:
        """Give each new run the colour that the fewest running runs have, and free the colours of ended runs."""
        known = self._numbers.known()
        self._colours = {number: colour for number, colour in self._colours.items() if number in known}
        used = [0] * len(PALETTE)
        for number, colour in self._colours.items():
            used[colour] += number in running
        for number in sorted(running - self._colours.keys()):
            best = min(range(len(PALETTE)), key=lambda colour: (used[colour], (colour - number) % len(PALETTE)))
            self._colours[number] = best
            used[best] += 1

    def _render(self, scheduler: Scheduler, metrics: Metrics, numbers: dict[object, int]) -> Group:
        cache, stats = scheduler.cache, scheduler.cache.stats()
        counters = (
            f"step {metrics.steps:,}   blocks held {stats.utilization:.0%}   fragmentation {stats.fragmentation:.1%}   "
            f"running {scheduler.num_running}   waiting {scheduler.num_waiting}   "
            f"preemptions {scheduler.num_preemptions:,} ({scheduler.num_swaps:,} swapped out)"
        )
        if cache.has_prefix_cache:
            counters += f"   hits {scheduler.reuse.token_hit_rate:.0%}   evicted {metrics.evicted_blocks:,}"
        if stats.num_states:
            counters += f"   state slots held {stats.num_states - stats.num_free_states:,} of {stats.num_states:,}"
        width = self._console.width
        # A cache whose layers all keep states has no group.
        lines = max(1, (self._console.height - OTHER_LINES) // max(cache.num_groups, 1) - 1)
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
        """Return lines of cells; equal neighbours are one piece of text."""
        text = Text(no_wrap=True, overflow="crop", end="")
        for start in range(0, len(cells), cells_a_line):
            for number, equal in groupby(cells[start : start + cells_a_line].tolist()):
                glyph, style = self._look(number)
                text.append(glyph * (cell_width * len(list(equal))), style)
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
    """Return one line, cropped on a narrow terminal."""
    return Text(text, style, no_wrap=True, overflow="crop")
