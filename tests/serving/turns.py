"""Runs with several turns: steps, runs that are idle, and the tokens after their turns."""

import numpy as np

from pagecore.serving import Request
from pagecore.serving.scheduling.request import State
from tests.serving.runs import drain, next_token

STOP = 900


def step_of(scheduler, *ids, drafts=None, accepted=None):
    """Run a step whose outputs gain `ids`; return the tokens of its rows."""
    step = scheduler.schedule(drafts)
    scheduler.commit(step, accepted)
    scheduler.accept(step, list(ids))
    return step.counts


def idle_run(scheduler, number=0, prompt=6, new=3, **options):
    """Return a run that has generated `new` tokens and is idle."""
    ids = np.arange(prompt) + 100 * number
    run = scheduler.add(Request(number, ids, new, resumable=True, **options))
    drain(scheduler)
    assert run.state is State.IDLE
    return run


def text_of(*turns, sample=0):
    """Return the tokens after turns of (input, generated tokens)."""
    text = []
    for given, count in turns:
        text += list(given)
        for _ in range(count):
            text.append(next_token(text, sample))
    return text
