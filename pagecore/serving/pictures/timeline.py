"""Record of the run that held each block, for a run of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagecore.errors import ShapeError
from pagecore.serving.scheduling.request import Run
from pagecore.storage.checks import INT32_MAX, require_int

if TYPE_CHECKING:
    from pagecore.cache import BlockMap
    from pagecore.serving.metrics import Metrics
    from pagecore.serving.scheduling.scheduler import Scheduler

__all__ = ["CACHED", "FREE", "Cells", "RunNumbers", "Timeline", "Watcher", "cells_of"]

# Called once a step, after the commit and before finished runs are removed, like `Metrics.observe`.
Watcher: TypeAlias = "Callable[[Scheduler, Metrics], None]"
Cells: TypeAlias = NDArray[np.int32]

# A cell is the number, 1 or more, of the run that holds a block. If several runs hold the block, the cell is the
# negated number of the first one. FREE is a free block. CACHED is a block held by the prefix cache alone, or by a
# sequence that does not belong to the scheduler.
FREE = 0
CACHED = -INT32_MAX


class RunNumbers:
    """Numbers of runs: each run keeps its number for life, preemptions included, and no number is reused."""

    def __init__(self) -> None:
        self._numbers: dict[Run, int] = {}
        self.next = 1

    def update(self, scheduler: Scheduler) -> dict[object, int]:
        """Number the new runs, and return the numbers of all runs in the cache, by the id of their sequence."""
        numbers, holders = self._numbers, scheduler.holders
        if len(numbers) > 2 * len(holders) + 64:
            numbers = self._numbers = {run: n for run, n in numbers.items() if not run.has_ended}
        for run in holders:
            if run not in numbers:
                numbers[run] = self.next
                self.next += 1
        return {run: numbers[run] for run in holders}  # the id of a sequence is its run

    def known(self) -> set[int]:
        """Return the numbers that `update` may return later: of runs that have not ended, and of some that have."""
        return set(self._numbers.values())


def name_of(run: Run) -> str:
    """Return the name of a run: its request, and its sample if there are several."""
    return f"{run.request.id}.{run.sample}" if run.request.samples > 1 else str(run.request.id)


def cells_of(block_map: BlockMap, numbers: dict[object, int], step: int = 1) -> Cells:
    """Return the cell of every `step`-th block, from block 1 on."""
    # The last entry is for owner -1, no sequence.
    by_owner = np.array([*(numbers.get(name, FREE) for name in block_map.sequences), FREE], np.int32)
    cells = by_owner[block_map.owner[1::step]]
    np.negative(cells, out=cells, where=block_map.holders[1::step] > 1)
    # Held by the prefix cache alone, or by a sequence that is not of the scheduler.
    cells[(cells == FREE) & (block_map.cached | (block_map.holders > 0))[1::step]] = CACHED
    return cells


class Timeline:
    """A watcher that keeps the block maps of equally spaced steps.

    A column is the block map at the end of a span of `stride` steps. Once there are `columns` of them, every second one
    is dropped and the stride doubles, as in `Series`. At most `rows` equally spaced blocks of each group are kept. The
    memory is bounded by columns and rows, and a step that is not kept costs almost nothing.

    Parameters
    ----------
    columns : int
        Maximum number of columns, even, at least 2.
    rows : int
        Maximum number of blocks kept of each group, at least 1.

    Attributes
    ----------
    steps, stride : int
        Steps seen, and steps of a column.
    metrics : Metrics or None
        Metrics of the run; None before the first step.
    names : dict of int to str
        Names of the runs in the cells, by number.

    Raises
    ------
    ShapeError
        `columns` or `rows` is out of range.
    """

    def __init__(self, columns: int = 256, rows: int = 384) -> None:
        self.columns, self.rows = require_int("columns", columns, 2), require_int("rows", rows)
        if self.columns % 2:
            raise ShapeError(f"columns is {columns}; expected an even number")
        self.steps = 0
        self.stride = 1
        self.metrics: Metrics | None = None
        self._scheduler: Scheduler | None = None
        self._numbers = RunNumbers()
        self.names: dict[int, str] = {}
        self._block_steps: list[int] = []
        self._cells: list[Cells] = []
        self._totals: list[tuple[int, int, int]] = []

    def __call__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        """Record one step of the run."""
        self.steps += 1
        if self.steps % self.stride:
            return
        if self._scheduler is None:
            self._begin(scheduler, metrics)
        unnamed = self._numbers.next
        numbers = self._numbers.update(scheduler)
        if self._numbers.next != unnamed:
            named = ((numbers[run], run) for run in scheduler.holders)
            self.names |= {number: name_of(run) for number, run in named if number >= unnamed}
        column = len(self._totals)
        for group, (cells, step) in enumerate(zip(self._cells, self._block_steps, strict=True)):
            cells[column] = cells_of(scheduler.cache.block_map(group), numbers, step)
        self._totals.append(_totals(scheduler, metrics))
        if len(self._totals) == self.columns:
            self._thin()

    @property
    def num_columns(self) -> int:
        """Number of columns recorded."""
        return len(self._totals)

    @property
    def num_groups(self) -> int:
        """Number of groups of the cache; 0 before the first step."""
        return len(self._cells)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Number of blocks of each group, the null block counted; empty before the first step."""
        return () if self._scheduler is None else self._scheduler.cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block; 0 before the first step."""
        return 0 if self._scheduler is None else self._scheduler.cache.block_size

    def block_step(self, group: int) -> int:
        """Return the distance of the recorded blocks: row i of the cells is block ``1 + i * block_step(group)``."""
        return self._block_steps[group]

    def cells(self, group: int) -> Cells:
        """Return the cells of a group, int32 ``[rows, num_columns]``; each column is the end of a span.

        A cell is FREE, CACHED, or the number of the run that holds the block; negative, of the first run, if several
        hold it.
        """
        return self._cells[group][: self.num_columns].T

    @property
    def has_prefix_cache(self) -> bool:
        """True if the cache reuses prefixes; False before the first step."""
        return self._scheduler is not None and self._scheduler.cache.has_prefix_cache

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was reused; 0 before the first step."""
        return 0.0 if self._scheduler is None else self._scheduler.reuse.token_hit_rate

    def preemptions(self) -> list[int]:
        """Return the preemptions of both kinds in the span of each column, then those after the last span."""
        return self._spans(0)

    def recomputed(self) -> list[int]:
        """Return the preemptions with recomputation, in the spans of `preemptions`."""
        return [both - swapped for both, swapped in zip(self.preemptions(), self.swaps(), strict=True)]

    def swaps(self) -> list[int]:
        """Return the preemptions that swapped the run out, in the spans of `preemptions`."""
        return self._spans(1)

    def evictions(self) -> list[int]:
        """Return the blocks evicted from the prefix cache, in the spans of `preemptions`."""
        return self._spans(2)

    def _spans(self, which: int) -> list[int]:
        if self._scheduler is None or self.metrics is None:
            return [0]
        totals = [0, *(counts[which] for counts in self._totals), _totals(self._scheduler, self.metrics)[which]]
        return [later - earlier for earlier, later in pairwise(totals)]

    def _begin(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self._scheduler, self.metrics = scheduler, metrics
        for blocks in scheduler.cache.num_blocks:
            step = -(-(blocks - 1) // self.rows)
            self._block_steps.append(step)
            self._cells.append(np.zeros((self.columns, -(-(blocks - 1) // step)), np.int32))

    def _thin(self) -> None:
        """Drop every second column; each remaining one is the end of a span twice as long."""
        self.stride *= 2
        half = self.columns // 2
        for cells in self._cells:
            cells[:half] = cells[1::2].copy()
        self._totals = self._totals[1::2]
        seen = self._numbers.known().union(*(np.unique(np.abs(cells[:half])).tolist() for cells in self._cells))
        self.names = {number: name for number, name in self.names.items() if number in seen}


def _totals(scheduler: Scheduler, metrics: Metrics) -> tuple[int, int, int]:
    """Return preemptions, swaps and evicted blocks so far."""
    return scheduler.num_preemptions, scheduler.num_swaps, metrics.evicted_blocks
