"""Calls of idle runs that an exception interrupts at any line have happened or not."""

import pytest

from pagecore import AttentionSpec, PagedKVCache, SwapSpace
from pagecore.serving import Request, Scheduler
from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.runs import drain, next_token
from tests.serving.turns import idle_run, step_of, text_of

SERVING = PAGECORE / "serving"


def made_idle(how):
    """Return a scheduler and an idle run whose sequence is on the device, swapped or gone, or before its `accept`."""
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=30), overlap=how == "ahead")
    if how == "ahead":
        run = scheduler.add(Request(0, range(6), 9, stop_token_ids=[next_token(range(6), 0)], resumable=True))
        scheduler.commit(scheduler.schedule())
        scheduler.commit(scheduler.schedule())
        return scheduler, run
    if how == "drafted":  # the sequence has computed a draft after the end of the turn
        run = scheduler.add(Request(0, [1, 2, 3], 4, stop_token_ids=[11], resumable=True))
        step_of(scheduler, 10)
        step_of(scheduler, [11, 12, 13], drafts={run: [11, 12]}, accepted=[3])
        return scheduler, run
    run = idle_run(scheduler)
    if how in ("swapped", "gone"):
        scheduler.preempt_all(swap=how == "swapped")
    return scheduler, run


EXTENSIONS = {
    "parked": {},
    "drafted": {},
    "dropped": {"drop_last": True},
    "swapped": {},
    "gone": {},
    "spans": {"spans": [(0, 1, 5)]},
}


CALLS = {
    "extend": lambda scheduler, run, how: scheduler.extend(
        run, [7, 8][: 1 if how == "drafted" else 2], **EXTENSIONS[how]
    ),
    "finish": lambda scheduler, run, _: scheduler.finish(run),
    "preempt_all": lambda scheduler, *_: scheduler.preempt_all(),
    "accept": lambda scheduler, *_: scheduler.accept(scheduler.steps[0], [next_token(range(6), 0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "how"),
    [*(("extend", how) for how in EXTENSIONS), ("finish", "parked"), ("finish", "swapped"), ("preempt_all", "parked"),
     ("accept", "ahead")],
)  # fmt: skip
def test_an_interrupted_call_has_happened_or_not(call, how):
    """An exception at each event of the call, or at every third; it is repeated if it has not happened."""
    scheduler, run = made_idle(how)
    events = lines_of(lambda: CALLS[call](scheduler, run, how), SERVING)
    end, happened = run.state, set()
    for event in range(1, events + 1, 1 if is_full() else 3):
        scheduler, run = made_idle(how)
        before = run.state
        raise_at(lambda scheduler=scheduler, run=run: CALLS[call](scheduler, run, how), event, SERVING)
        scheduler.check_invariants()
        scheduler.cache.check_invariants()
        happened.add(run.state)
        if run.state is before and (call != "accept" or len(scheduler.steps) == 2):
            CALLS[call](scheduler, run, how)
        assert run.state is end
        if call == "extend":
            drain(scheduler)
            first = text_of((range(6), 3))[: 8 if how == "dropped" else 9]
            whole = ([1, 2, 3, 10, 11, 7], 4) if how == "drafted" else ([*first, 7, 8], 3)
            assert run.tokens.tolist() == text_of(whole)
            assert scheduler.add(Request(7, [7], 1)).arrival > run.arrival, "no two runs have one arrival"
    assert happened == {before, end}
