"""Preemption by priority: runs that give way to a waiting request of a larger priority."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagecore.serving.scheduling.future import expected_blocks

if TYPE_CHECKING:
    from pagecore.serving.scheduling.admission import Admission
    from pagecore.serving.scheduling.limits import Limits
    from pagecore.serving.scheduling.request import Run
    from pagecore.serving.scheduling.roster import Roster

__all__ = ["find_victims", "freed_blocks"]


def find_victims(running: Iterable[Run], roster: Roster, limits: Limits, admission: Admission) -> list[Run]:
    """Return the runs that give way to the next run of the queue; an empty list if it needs none or not enough can.

    The smallest priority gives way first, and of equal ones the run that was admitted last. As in SGLang, priorities
    must differ by more than the threshold, and no run gives way if all of them would free too little. A run that came
    late stays: larger priorities would otherwise preempt it in the step after its admission, and starve it.
    """
    threshold = limits.preemption_threshold
    run = None if threshold is None else admission.next_run
    if threshold is None or run is None:
        return []
    most = run.request.priority - threshold
    newest_first = [one for one in running if one.request.priority < most and not one.came_late][::-1]
    if not newest_first:
        return []
    rows = admission.lacking_rows(run)
    if rows > sum(one.samples for one in newest_first):
        return []
    freed = {one: freed_blocks(one, roster.cache.block_size, roster.ratio) for one in newest_first}
    blocks = admission.lacking_blocks(run, sum(freed.values()))
    victims: list[Run] = []
    for victim in sorted(newest_first, key=lambda one: one.request.priority):
        if rows <= 0 and blocks <= 0:
            break
        rows -= victim.samples
        blocks -= freed[victim]
        victims.append(victim)
    return victims if rows <= 0 and blocks <= 0 else []


def freed_blocks(run: Run, block_size: int, ratio: float | None = None) -> int:
    """Return an upper bound of the blocks that a preemption frees: fewer if the run shares some.

    With a ratio of future tokens, those that admissions reserve for the run are included.
    """
    # Samples may have been about to copy the block that they share.
    return expected_blocks(run, block_size, ratio) + (run.request.samples > 1)
