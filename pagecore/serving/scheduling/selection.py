"""Selection of a step's rows: decodes, chunks of prompts, admissions, and what gives way while blocks are short.

If blocks or state slots are short, idle runs give theirs up. Then runs return the blocks that they hold for rejected
drafts, decodes bring fewer drafts to the step, and runs that wait for another turn give up what they hold: no run is
preempted for a draft. If only the blocks of windows are short, prompts bring fewer tokens to the step: each step lets
windows release blocks. If other blocks or state slots are short, or one token of each prompt is still too much, runs
are preempted: the last admitted first, or as the policy and the ratio of future tokens say. With a threshold of
priorities, runs are preempted for admissions, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from pagecore.errors import OutOfBlocks, OutOfRows
from pagecore.serving.scheduling.admission import Admission
from pagecore.serving.scheduling.drafts import fitted_limits
from pagecore.serving.scheduling.priority import find_victims, freed_blocks
from pagecore.serving.scheduling.rows import StepRows, list_decodes, select
from pagecore.storage.checks import ceil_div

if TYPE_CHECKING:
    from pagecore.cache import PagedKVCache
    from pagecore.serving.scheduling.drafts import Drafts
    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["prepare_step"]


def prepare_step(
    roster: Roster, limits: Limits, drafts: Drafts | None = None, *, hold_prompts: bool = False
) -> StepRows | None:
    """Choose the rows of the next step and prepare the roster's batch for them; the roster must not be empty.

    Returns None for a step ahead of ids that are not accepted if it would have no rows, or if runs would have to be
    preempted: the accepted ids may end runs, whose blocks are then free. Returns None also if imports hold what the
    next run lacks. With `hold_prompts` the rows have one token each and drafts, if runs decode, unless the last decode
    gives way.

    Raises
    ------
    OutOfBlocks, OutOfRows
        As `Scheduler.schedule`.
    """
    while True:
        try:
            return _decodes_or_all(roster, limits, drafts, hold_prompts)
        except (OutOfBlocks, OutOfRows):
            roster.settle()
            roster.undo_delays()
            if roster.reclaim_next():
                continue
            if roster.steps or roster.num_arriving:
                return None
            if not roster.lacks_encoder_room(limits.prompt_tokens) or not roster.release_encoder_output():
                raise


def _decodes_or_all(roster: Roster, limits: Limits, drafts: Drafts | None, hold_prompts: bool) -> StepRows | None:
    """Return rows that hold prompts back, if that is wanted and runs decode; else what `_prepared_rows` returns."""
    if hold_prompts and list_decodes(roster):
        holding = replace(limits, holds_prompts=True, preemption_threshold=None)
        rows = _prepared_rows(roster, holding, drafts)
        if rows is not None or roster.steps:
            return rows
    return _prepared_rows(roster, limits, drafts)


def _prepared_rows(roster: Roster, limits: Limits, drafts: Drafts | None) -> StepRows | None:
    """Return the rows within the limits, prepared; None if none are left, or for a step ahead as `prepare_step`."""
    cache = roster.cache
    is_ahead = bool(roster.steps)
    rows = _choose_rows(roster, limits, drafts, is_ahead)
    if rows is None:
        return None
    while rows.runs and not _is_prepared(roster, rows):
        if roster.parked:
            roster.reclaim_next()
        elif roster.pinned:
            for run in list(roster.pinned):
                roster.unpin(run)
        elif (
            _return_spare_blocks(roster)
            or _shorten_drafts(cache, rows)
            or roster.reclaim_next()
            or _shorten_prompts(cache, rows, limits)
        ):
            continue
        elif is_ahead:
            roster.undo_delays()
            return None
        elif len(roster.running) <= 1:
            cache.prepare(rows.sequences, rows.counts, out=roster.batch)
            break
        else:
            _preempt(roster, limits, cache.shortage(rows.sequences, rows.counts))
            rows = _rows_of_running(roster, limits, drafts)
    return rows if rows.runs else None


def _is_prepared(roster: Roster, rows: StepRows) -> bool:
    """Prepare the roster's batch for the rows; return False if blocks or state slots are short."""
    rows.options = rows.draft_options() if rows.has_drafts else {}
    return roster.cache.try_prepare(rows.sequences, rows.counts, out=roster.batch, **rows.options) is not None


def _rows_of_running(roster: Roster, limits: Limits, drafts: Drafts | None) -> StepRows:
    """Return the rows of the running runs; without drafts if trees alone leave a span without room."""
    rows, _ = select(roster, fitted_limits(limits, drafts, roster.running), drafts)
    return select(roster, limits)[0] if rows.trees_delay_span else rows


def _choose_rows(roster: Roster, limits: Limits, drafts: Drafts | None, is_ahead: bool) -> StepRows | None:
    """Return the rows of running and admitted runs; None if runs would give way to a larger priority while ahead.

    There are no drafts if trees alone leave a span without room.
    """
    running = [] if limits.preemption_threshold is None else list(roster.running)
    while True:
        roster.delays = {}
        fitted = fitted_limits(limits, drafts, roster.running)
        rows, budget = select(roster, fitted, drafts)
        admission = Admission(roster, rows, budget, fitted) if roster.num_ready else None
        if admission is not None:
            admission.admit()
        if rows.trees_delay_span:
            roster.undo_delays()
            return _choose_rows(roster, limits, None, is_ahead)
        if admission is None:
            return rows
        victims = find_victims(running, roster, fitted, admission)
        if not victims:
            break
        roster.undo_delays()
        if is_ahead:
            return None
        for run in victims:
            roster.preempt(run, is_retraction=False)
            running.remove(run)
    if not rows.runs and not is_ahead and not roster.num_arriving:
        _refuse_to_stall(roster, limits, admission.stopped_at or roster.head)
    return rows


def _shorten_drafts(cache: PagedKVCache, rows: StepRows) -> bool:
    """Cut drafts to the most a row for which there are blocks, to none if that does not help; False without drafts."""
    if not rows.has_drafts:
        return False
    prompts = rows.counts[rows.num_decodes :]
    fits, too_many = 0, max(rows.decode_counts) - 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if cache.shortage(rows.sequences, [min(count, 1 + middle) for count in rows.decode_counts] + prompts):
            too_many = middle
        else:
            fits = middle
    rows.cut_drafts(fits)
    return True


def _return_spare_blocks(roster: Roster) -> bool:
    """Release the blocks that runs hold for drafts that were rejected; return False if there are none."""
    if not roster.speculation.num_drafts:
        return False
    size = roster.cache.block_size
    held = [run.sequence for run in roster.running]
    spare = [one for one in held if one.capacity > ceil_div(one.num_computed_tokens + 1, size) * size]
    if not spare:
        return False
    # A cache whose layers all keep states has no blocks: the capacity of its rows does not change.
    before = [one.capacity for one in spare]
    roster.cache.truncate(spare, [max(one.num_tokens, one.num_computed_tokens) for one in spare])
    return [one.capacity for one in spare] != before


def _shorten_prompts(cache: PagedKVCache, rows: StepRows, limits: Limits) -> bool:
    """Cut the chunks of prompts to the most tokens for which windows have blocks; return False if none helps."""
    prompts = rows.runs[rows.num_decodes :]
    longest = max(rows.counts[rows.num_decodes :], default=1)
    if longest == 1 or cache.shortage(rows.sequences, rows.counts, step_tokens=1):
        return False

    def cut(most: int) -> list[int]:
        counts = [min(count, most) for count in rows.counts[rows.num_decodes :]]
        if limits.parts.chooses_ends:
            counts = limits.parts.cut(prompts, counts)
        return rows.decode_counts + counts

    fits, too_many = 0, longest
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if cache.shortage(rows.sequences, cut(middle)):
            too_many = middle
        else:
            fits = middle
    counts = cut(fits)
    if not any(counts[rows.num_decodes :]) or cache.shortage(rows.sequences, counts):
        return False
    rows.cut_prompts(counts)
    return True


def _preempt(roster: Roster, limits: Limits, missing: int) -> None:
    """Preempt runs until `missing` blocks may be free, and at least one run; one run stays.

    A preempted run frees at most the blocks of its known tokens, and fewer where it shares them. The estimate is
    therefore an upper bound, and no run is preempted that could stay: the caller prepares again, and calls again if
    blocks, or the state slots that `missing` counts as blocks, are still short.
    """
    freed = 0
    for run in _victims(roster, limits):
        freed += freed_blocks(run, roster.cache.block_size)
        roster.preempt(run)
        if freed >= missing:
            return


def _victims(roster: Roster, limits: Limits) -> list[Run]:
    """Return the running runs but one, the next one to preempt first.

    The last admitted run gives way first. With a ratio of future tokens the run with the fewest generated tokens does,
    and of several the one with the longest prompt. Under the policy "priority" the smallest priority comes first, and
    the runs that came late come last.
    """
    victims = list(roster.running)[::-1]
    if limits.ratios is not None:
        victims.sort(key=lambda run: (run.num_generated, -len(run.request.prompt)))
    if limits.policy == "priority":
        victims.sort(key=lambda run: (run.came_late, run.request.priority))
    return victims[:-1]


def _refuse_to_stall(roster: Roster, limits: Limits, run: Run) -> NoReturn:
    """Raise OutOfBlocks: nothing runs and the next run does not fit, although it fits an empty pool."""
    available = roster.cache.num_available
    needed = available + roster.cache.shortage([run.sequence], [run.num_tokens_left], step_tokens=limits.prompt_tokens)
    held = "blocks or state slots" if roster.cache.num_states else "blocks"
    raise OutOfBlocks(
        f"request {run.request.id} needs {needed} {held} for {len(run.tokens)} tokens; {available} are available "
        f"although nothing runs: {held} are held outside the scheduler; remove what holds them",
        needed,
        available,
    )
