"""Runs between two turns: their generation has ended, and they wait for further input.

I1: an idle run has no `held`. Its sequence, if it still has one, is that in `idle`: on the device if the run is in
    `parked`, in the swap space otherwise. The sequence knows a prefix of `Run.tokens`. It may have computed tokens
    after them: drafts that were accepted past the end of the turn, or the row of a step ahead.
I2: rows of the cache that idle and continuing runs hold never keep a run from being admitted: they give theirs up.

Idle runs give way first, the longest idle first. Runs of the queue that hold what they computed in an earlier turn, or
what an import has brought, give way next, in reverse order of the queue: by priority under that policy. As for
preempted runs, their sequences move to the swap space or are removed, and the prefix cache may keep their blocks. None
gives its blocks up for a request that has to wait while others run, because all of them hold too few: `Holdings` bounds
what each of them frees, in each group for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagecore.errors import InvalidSequence, OutOfBlocks, UnsupportedOption
from pagecore.serving.scheduling.holdings import Holdings
from pagecore.serving.scheduling.request import State
from pagecore.serving.scheduling.waiting import WaitingRuns
from pagecore.storage.checks import ceil_div

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from numpy.typing import NDArray

    from pagecore.cache import PagedKVCache, Sequence, SwapSpace
    from pagecore.serving.scheduling.request import Request, Run

__all__ = ["IdleRuns", "knows_all"]


class IdleRuns(WaitingRuns):
    """The idle runs, next to those of the queue; the base of `AdmittedRuns`.

    Attributes
    ----------
    swap_space : SwapSpace or None
    idle : dict of Run to (Sequence or None)
        The idle runs, in the order in which their turns ended.
    parked : dict of Run
        Those of them whose sequences are on the device, in the same order.
    num_reclaimed : int
        Number of times that a run between two turns gave its blocks up.
    """

    def __init__(self, cache: PagedKVCache, swap_space: SwapSpace | None, policy: str) -> None:
        super().__init__(cache, policy)
        self.swap_space = swap_space
        self.idle: dict[Run, Sequence | None] = {}
        self.parked: dict[Run, None] = {}
        self.num_reclaimed = 0
        self._holdings = Holdings(cache)

    def make_idle(self, run: Run) -> None:
        """Let a run whose tokens are complete become idle. A part of a transition: it may be repeated."""
        held = self.idle[run] = self.found(run)
        if held is not None:
            self.parked[run] = None
        run.state = State.IDLE
        run.held = None
        self.append_computed_ids(run)

    def append_computed_ids(self, run: Run) -> None:
        """Append the ids of the tokens that the sequence of an idle run has computed; may be repeated."""
        held = self.idle[run]
        if held is not None and not held.is_swapped:
            known, end = held.num_tokens, min(held.num_computed_tokens, len(run.tokens))
            if known < end:
                self.cache.append_tokens([held], [run.tokens[known:end].tolist()])

    def resume(self, run: Run, request: Request, kept: int, arrival: int) -> None:
        """Queue an idle run for another turn; the prompt of `request` begins with `kept` tokens of the run."""
        held, tokens = self.idle[run], request.prompt
        waiting_tokens = self.num_waiting_tokens
        has_other_spans = request.spans != run.request.spans

        def call() -> None:
            if held is not None and self.cut_or_remove(held, kept, is_useless=has_other_spans):
                self.cache.append_tokens([held], [tokens[held.num_tokens :].tolist()])

        def took_effect() -> bool:
            found = self.found(run)
            return found is None or (not has_other_spans and knows_all(found, tokens, kept))

        def record() -> None:
            run.held = self.found(run)
            run.take_request(request)
            run.tokens = tokens
            run.prefilling = True
            run.state = State.WAITING
            run.shared_at = run.matched_at = -1
            run.goes_first = False
            run.arrival = arrival
            run.waits_since = self.num_steps
            self.idle.pop(run, None)
            self.parked.pop(run, None)
            self.waiting[run] = self.continuing[run] = None
            self._sort(run)
            self.num_waiting_tokens = waiting_tokens + run.num_tokens_left

        self._journal.run(call, took_effect, record)

    def cut_or_remove(self, held: Sequence, kept: int, *, is_useless: bool = False) -> bool:
        """Cut a sequence to at most `kept` tokens; remove it and return False if that is not possible.

        Layers with states or windows cannot return to every length, and a swapped sequence to none.
        """
        if not is_useless and max(held.num_tokens, held.num_computed_tokens) <= kept:
            return True
        try:
            if not is_useless:
                self.cache.truncate([held], [kept])
                return True
        except (InvalidSequence, OutOfBlocks, UnsupportedOption):
            pass
        self.cache.remove(held)
        return False

    # -- what gives way --------------------------------------------------------------------------------------------

    def victims(self, keep: Container[Run] = ()) -> Iterator[Run]:
        """Yield the runs between two turns that hold blocks, in the order in which they give way; none of `keep`."""
        yield from self.parked
        if not self.continuing:
            return
        order = self.waiting if self.by_priority is None else self.by_priority
        for run in [one for one in reversed(order) if one in self.continuing]:
            if run.held is not None and not run.held.is_swapped and run not in keep and run not in self.pinned:
                yield run

    def reclaim_next(self, keep: Container[Run] = ()) -> bool:
        """Let one run between two turns give its blocks up; return False if there is none."""
        run = next(self.victims(keep), None) if self.parked or self.continuing else None
        if run is not None:
            self.reclaim(run)
        return run is not None

    def reclaim_blocks(
        self, missing: list[int], keep: Container[Run], *, must_suffice: bool, swaps: bool = False
    ) -> bool:
        """Let runs between two turns give up the `missing` blocks of each group, or fewer, at least those of one run.

        With `must_suffice` none gives way if all of them together hold too few in any group. No more runs give way than
        one after the other would, with `missing` counted again after each of them.

        Parameters
        ----------
        missing : list of int
            As from `PagedKVCache.shortages`.
        keep : container of Run
        must_suffice : bool
        swaps : bool
            True if `missing` includes a swap_in.

        Returns
        -------
        bool
            False if no run has given way.
        """
        wanted = np.array(missing)
        chosen: list[tuple[Run, NDArray[np.int64]]] = []
        reclaimable = np.zeros_like(wanted)
        for run in self.victims(keep):
            chosen.append((run, self._upper_bounds(run, swaps=swaps)))
            reclaimable += chosen[-1][1]
            if (reclaimable >= 2 * wanted).all():  # while the first of them give way, the others suffice
                break
        if must_suffice and (reclaimable < wanted).any():
            return False
        freed = np.zeros_like(wanted)
        for run, upper_bound in chosen:
            freed += upper_bound
            reclaimable -= upper_bound
            self.reclaim(run)
            if (freed >= wanted).all() or (must_suffice and (reclaimable < wanted).any()):
                break
        return bool(chosen)

    def can_free(self, missing: list[int], runs: Iterable[Run], *, swaps: bool = False) -> bool:
        """Return False if runs between two turns together hold too few of the `missing` blocks of any group.

        `missing` and `swaps` are those of `reclaim_blocks`.
        """
        wanted = np.array(missing)
        freed = np.zeros_like(wanted)
        for run in runs:
            if (freed >= wanted).all():
                return True
            freed += self._upper_bounds(run, swaps=swaps)
        return bool((freed >= wanted).all())

    def most_blocks(self, runs: Iterable[Run]) -> int:
        """Return the most blocks that runs between two turns free together, each in the group where it holds most."""
        return sum(self._holdings.most_blocks(run, self._held(run)) for run in runs)

    def _upper_bounds(self, run: Run, *, swaps: bool) -> NDArray[np.int64]:
        return np.array(self._holdings.upper_bounds(run, self._held(run), swaps=swaps))

    def _held(self, run: Run) -> Sequence:
        held = self.idle.get(run, run.held)
        assert held is not None
        return held

    def make_rows(self, wanted: int, keep: Container[Run]) -> None:
        """Reclaim runs until those that hold a row leave `wanted` rows of the cache; some of these are of `keep`."""
        victims = list(self.victims(keep))
        for run in victims[: max(len(victims) + wanted - self.cache.max_sequences, 0)]:
            self.reclaim(run)

    def reclaim(self, run: Run, *, swap: bool = True) -> None:
        """Move the sequence of a run between two turns to the swap space, or remove it."""
        is_idle = run in self.idle
        held = self.idle[run] if is_idle else run.sequence
        assert held is not None
        computed = 0 if is_idle else held.num_computed_tokens
        waiting_tokens, reclaimed, news = self.num_waiting_tokens, self.num_reclaimed + 1, self.news + 1
        # A sequence goes to the swap space only with tokens that it knows.
        space = self.swap_space if swap and held.num_computed_tokens <= held.num_tokens else None

        def call() -> None:
            if space is None or not self.cache.try_swap_out([held], space):
                self.cache.remove(held)

        def record() -> None:
            left = held if held.is_swapped else None
            if is_idle:
                self.idle[run] = left
            else:
                run.held = left
            self.parked.pop(run, None)
            self.num_waiting_tokens = waiting_tokens + (0 if left is not None else computed)
            self.num_reclaimed = reclaimed
            self.news = news

        self._journal.run(call, lambda: held.is_swapped or self.found(run) is None, record)

    def forget(self, run: Run) -> None:
        """Remove the sequence of an idle run that is swapped out."""
        held = self.idle[run]
        assert held is not None

        def record() -> None:
            self.idle[run] = None

        self._journal.run(lambda: self.cache.remove(held), lambda: self.found(run) is None, record)

    def make_swap_room(self, held: Sequence) -> None:
        """Let idle runs leave the swap space, oldest first, until a sequence of a running run may fit."""
        space = self.swap_space
        if space is None:
            return
        size = self.cache.block_size
        needed = ceil_div(held.num_computed_tokens, size)
        swapped = [(run, one) for run, one in self.idle.items() if one is not None and one.is_swapped]
        if space.num_available + sum(ceil_div(one.num_computed_tokens, size) for _, one in swapped) < needed:
            return  # it does not fit: no run gives its place up for nothing
        for run, _ in swapped:
            if space.num_available >= needed:
                return
            self.forget(run)


def knows_all(held: Sequence, tokens: NDArray[np.int32], kept: int) -> bool:
    """Return True if a sequence knows exactly `tokens` and has computed at most `kept` of them."""
    return (
        held.num_computed_tokens <= kept
        and held.num_tokens == len(tokens)
        and np.array_equal(np.asarray(held.tokens), tokens)
    )
