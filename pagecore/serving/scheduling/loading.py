"""Runs of the queue that wait for a load: a prefix from a store, or a sequence that another process hands over.

L1: a run in `loading` is in the queue, without a sequence of its own. Admissions pass it over, and it keeps its place.
    An import may have taken a row and blocks under its name; the row counts like that of an admitted run.
L2: a load is released once its run is admitted, so that what it brought stays until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagecore.cache.prefix.retention import validate_spans
from pagecore.errors import InvalidSequence
from pagecore.serving.scheduling.idle import IdleRuns, knows_all

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache, Sequence, SwapSpace
    from pagecore.serving.scheduling.request import Request, Run

__all__ = ["Load", "LoadingRuns"]


class Load(Protocol):
    """A load that a run waits for: a `pagecore.tiers.Request`, or a `SequenceImport`. No method may raise.

    A load that brings a sequence has the attributes `namespace`, `spans` and `cross_digest` with which the sequence was
    added; a missing one counts as None.
    """

    @property
    def has_ended(self) -> bool:
        """True once nothing arrives any more, or too late to wait for it."""

    def cancel(self) -> None:
        """Give the load up; it may be called again, and after the end."""

    def release(self) -> None:
        """End the hold on what was loaded; it may be called again."""


class LoadingRuns(IdleRuns):
    """The runs that wait for loads, a part of the queue; the base of `AdmittedRuns`.

    Attributes
    ----------
    loading : dict of Run to Load
        The runs that wait, in the order in which their loads began.
    loaded : dict of Run to Load
        The runs whose loads have ended and that are not admitted yet.
    """

    def __init__(self, cache: PagedKVCache, swap_space: SwapSpace | None, policy: str) -> None:
        super().__init__(cache, swap_space, policy)
        self.loading: dict[Run, Load] = {}
        self.loaded: dict[Run, Load] = {}

    @property
    def num_ready(self) -> int:
        """Number of runs in the queue that wait for no load."""
        return len(self.waiting) - len(self.loading)

    @property
    def num_arriving(self) -> int:
        """Number of rows that imports have taken for runs of the queue."""
        return sum(self.found(run) is not None for run in self.loading) if self.loading else 0

    @property
    def head(self) -> Run:
        """The first run of the queue that waits for no load; there must be one."""
        return next(run for run in self.waiting if run not in self.loading)

    def end_loads(self) -> None:
        """Let the runs whose loads have ended be admitted."""
        for run, load in list(self.loading.items()):
            if load.has_ended:
                self._arrive(run, load)

    def _arrive(self, run: Run, load: Load) -> None:
        """End the wait of a run, which continues with the sequence that an import has brought, if there is one."""
        held, tokens = self.found(run), run.tokens
        waiting_tokens, news = self.num_waiting_tokens, self.news + 1

        def call() -> None:
            if held is not None and _is_beginning(held, run, load) and self.cut_or_remove(held, len(tokens) - 1):
                self.cache.append_tokens([held], [tokens[held.num_tokens :].tolist()])
            elif held is not None and self.found(run) is held:
                self.cache.remove(held)

        def took_effect() -> bool:
            found = self.found(run)
            return found is None or (_is_beginning(found, run, load) and knows_all(found, tokens, len(tokens) - 1))

        def record() -> None:
            found = run.held = self.found(run)
            if found is not None:
                self.continuing[run] = None
                self.num_waiting_tokens = waiting_tokens - found.num_computed_tokens
            run.matched_at = -1
            self.news = news
            self.loaded[run] = load
            self.loading.pop(run, None)

        self._journal.run(call, took_effect, record)

    def release_load(self, run: Run) -> None:
        """Give up the load of a run, or release it at its end. A part of a transition: it may be repeated."""
        load = self.loading.get(run, self.loaded.get(run))
        if load is None:
            return
        if run in self.loading:
            load.cancel()
        load.release()
        self.loading.pop(run, None)
        self.loaded.pop(run, None)

    def _leave_cache(self, run: Run) -> None:
        """Remove the sequence of a run; an import may be removing its own."""
        held = self.found(run)
        if held is None:
            return
        try:
            self.cache.remove(held)
        except InvalidSequence:
            if run not in self.loading:
                raise


def _is_beginning(held: Sequence, run: Run, load: Load) -> bool:
    """Return True if a sequence that a load has brought has tokens of the run, from the first on, and its content."""
    return _has_content_of(load, run.request) and np.array_equal(held.tokens, run.tokens[: held.num_tokens])


def _has_content_of(load: Load, request: Request) -> bool:
    """Return True if namespace, spans and encoder's input of a load are those of a request: the keys of its blocks."""
    spans = validate_spans(getattr(load, "spans", None) or ())
    return (
        getattr(load, "namespace", None) == request.namespace
        and getattr(load, "cross_digest", None) == request.cross_digest
        and sorted(spans, key=_start) == sorted(request.spans or (), key=_start)
    )


def _start(span: tuple[int, int, bytes | int]) -> int:
    return span[0]
