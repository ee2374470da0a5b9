"""The assertions of the scheduler's model that no run between two turns gives its blocks up for nothing."""

import numpy as np
import pytest

from pagecore.serving.scheduling.request import Request
from tests.serving.model.fifo_cache import FifoCache
from tests.serving.model.idle import ModelIdle
from tests.serving.model.scheduler import SchedulerModel


def served(model):
    step = model.schedule()
    model.commit(step)
    model.accept(step, [[9]] * len(step.outputs), [False] * len(step.outputs))


def made():
    """Return a model with 8 blocks of 4 tokens: two idle runs hold 2 blocks each, and a running one holds 1."""
    cache = FifoCache(9, 4, prefix_cache=False)
    model = SchedulerModel(
        cache, space=None, max_running=8, max_tokens=99, overlap=False, policy="fcfs", max_wait=99, prefill=None,
        chunk=None, share=False, ratio=None,
    )  # fmt: skip
    for number in range(2):
        model.add(Request(number, np.arange(6), 2, resumable=True))
    model.add(Request(2, [2], 9))
    for _ in range(2):
        served(model)
    assert (len(model.idle), len(model.running), cache.num_available) == (2, 1, 3)
    return model


def ask(model, tokens, by_import):
    row = model.add(Request(3, np.arange(tokens), 1))
    if by_import:
        model.make_import_room(row, tokens)
    else:
        served(model)


@pytest.mark.parametrize("by_import", [False, True])
def test_bounds_of_one_block_more_are_seen(by_import, monkeypatch):
    """The request needs 8 blocks, and with those of both idle runs there are 7."""
    model = made()
    ask(model, 29, by_import)
    assert model.reclaimed == 0
    exact = ModelIdle.held_by

    def one_more(model, rows, coming=None):
        return [count + bool(rows) for count in exact(model, rows, coming)]

    monkeypatch.setattr(ModelIdle, "held_by", one_more)
    with pytest.raises(AssertionError, match="gave way for nothing"):
        ask(made(), 29, by_import)


@pytest.mark.parametrize("by_import", [False, True])
def test_runs_give_way_for_a_request_that_fits_with_their_blocks(by_import):
    model = made()
    ask(model, 28, by_import)
    assert model.reclaimed == 2
