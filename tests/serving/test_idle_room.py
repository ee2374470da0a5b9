"""Memory of idle runs: none gives its blocks up for what all of them together cannot make room for."""

import random

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, StateSpec
from pagecore.serving import Request, Scheduler
from pagecore.serving.scheduling.request import State
from pagecore.storage import Plane
from tests.serving.runs import advance, drain

HASH = (Plane("hash", (1,), "int32", per="sequence"),)
SPECS = {
    "one group": [AttentionSpec(1, 8)],
    "two groups": [AttentionSpec(1, 8), AttentionSpec(1, 8, window=8)],
    "states": [AttentionSpec(1, 8), StateSpec(HASH, chunk=4, interval=4)],
    "states not in place": [AttentionSpec(1, 8), StateSpec(HASH, chunk=4, interval=4, in_place=False)],
}


def made(specs="one group", num_idle=2, rows=8, num_states=60, **options):
    """Return a scheduler over 8 blocks of 4 tokens in each group, of which idle runs hold 2 each."""
    states = {"num_states": num_states} if specs.startswith("states") else {}
    cache = PagedKVCache(
        SPECS[specs], num_blocks=9, block_size=4, max_sequences=rows, device="none", prefix_cache=False, **states
    )
    scheduler = Scheduler(cache, headroom=0.0, **options)
    for number in range(num_idle):
        scheduler.add(Request(number, np.arange(6) + 100 * number, 3, resumable=True))
    drain(scheduler)
    assert (scheduler.num_idle, cache.num_available) == (num_idle, 8 - 2 * num_idle)
    return scheduler


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize(("length", "reclaimed"), [(12, 0), (16, 1), (28, 2), (29, 0)])
def test_an_admission_takes_blocks_of_idle_runs_only_if_they_suffice(specs, length, reclaimed):
    """A running request holds a block, and 3 are free: with those of both idle runs a prompt has 7."""
    scheduler = made(specs)
    first = scheduler.add(Request(2, [2], 4))
    advance(scheduler)
    second = scheduler.add(Request(3, range(length), 1))
    (runs,) = advance(scheduler)
    assert (runs, scheduler.num_reclaimed) == ([first, second][: 1 + (length < 29)], reclaimed)
    drain(scheduler, lambda _: scheduler.check_invariants())
    assert (first.state, second.state) == (State.FINISHED, State.FINISHED)
    assert scheduler.num_reclaimed == max(reclaimed, 2 * (length == 29)), "it is alone once the first has ended"


def test_of_several_requests_idle_runs_make_room_for_those_that_fit():
    scheduler = made()
    first = scheduler.add(Request(2, [2], 9))
    advance(scheduler)
    second, third = (scheduler.add(Request(3 + i, range(100 * i, 100 * i + 16), 1)) for i in range(2))
    (runs,) = advance(scheduler)
    assert (runs, third.state, scheduler.num_reclaimed) == ([first, second], State.WAITING, 1)


@pytest.mark.parametrize(("length", "reclaimed", "preempted"), [(8, 0, 0), (16, 1, 0), (28, 2, 1), (29, 0, 0)])
def test_a_larger_priority_takes_blocks_only_if_idle_and_smaller_ones_suffice(length, reclaimed, preempted):
    """Requests of the same and of a smaller priority hold a block each: with idle ones, a prompt has 7 blocks."""
    scheduler = made(policy="priority", preemption_threshold=0)
    for number, priority in ((2, 1), (3, 0)):
        scheduler.add(Request(number, [number], 4, priority=priority))
    advance(scheduler)
    scheduler.add(Request(4, range(length), 1, priority=1))
    advance(scheduler)
    assert (scheduler.num_reclaimed, scheduler.num_preemptions) == (reclaimed, preempted)


@pytest.mark.parametrize(("samples", "reclaimed"), [(1, 2), (2, 0)])
def test_a_larger_priority_that_cannot_have_its_rows_takes_no_blocks_either(samples, reclaimed):
    """A request of a smaller priority has one of two rows, and its block; with idle ones, that is room for a prompt."""
    scheduler = made(policy="priority", preemption_threshold=0, max_running=2)
    for number, priority in ((2, 1), (3, 0)):
        scheduler.add(Request(number, [number], 4, priority=priority))
    advance(scheduler)
    scheduler.add(Request(4, range(24), 1, samples, priority=1))
    advance(scheduler)
    assert (scheduler.num_reclaimed, scheduler.num_preemptions) == (reclaimed, samples == 1)


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize(("num_tokens", "has_room", "reclaimed"), [(12, True, 0), (13, True, 1), (29, False, 0)])
def test_an_import_takes_blocks_of_idle_runs_only_if_they_suffice(specs, num_tokens, has_room, reclaimed):
    scheduler = made(specs)
    scheduler.add(Request(2, [2], 9))
    advance(scheduler)
    run = scheduler.add(Request(3, range(30), 1))
    assert scheduler.make_import_room(run, num_tokens) is has_room
    assert scheduler.num_reclaimed == reclaimed
    scheduler.check_invariants()


@pytest.mark.parametrize(("num_tokens", "has_room", "reclaimed"), [(8, True, 1), (29, False, 1)])
def test_an_import_without_a_row_takes_that_of_the_oldest_idle_run(num_tokens, has_room, reclaimed):
    scheduler = made(num_idle=3, rows=4)
    scheduler.add(Request(3, [2], 9))
    advance(scheduler)
    run = scheduler.add(Request(4, range(30), 1))
    assert scheduler.make_import_room(run, num_tokens) is has_room
    assert scheduler.num_reclaimed == reclaimed


def test_a_run_that_holds_one_slot_of_a_state_keeps_it_from_an_import_that_needs_two():
    """Rows that do not write in place keep a second slot from their steps, but not from one after a cached state."""
    cache = PagedKVCache(
        SPECS["states not in place"], num_blocks=60, num_states=6, block_size=4, max_sequences=8, device="none"
    )
    scheduler = Scheduler(cache, headroom=0.0)
    for number, end in ((0, [8, 9, 10, 11]), (1, [7, 7, 7])):
        scheduler.add(Request(number, [*range(8), *end], 1, resumable=number == 1))
        advance(scheduler)
    for number in (2, 3):
        scheduler.add(Request(number, [number], 9))
        advance(scheduler)
    (idle,) = (cache.sequences[run] for run in scheduler.idle)
    assert (idle.num_cached_tokens, cache.checkpoint(idle), cache.stats().num_free_states) == (8, None, 0)
    run = scheduler.add(Request(4, range(50, 60), 2))
    assert not scheduler.make_import_room(run)
    assert scheduler.num_reclaimed == 0


@pytest.mark.parametrize("checkpoint_format", [None, "int8"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_slots_that_idle_runs_are_taken_to_free_are_those_that_they_free(seed, in_place, checkpoint_format):
    """Without a prefix cache no other holds them: what `stats` shows as free afterwards is the oracle."""
    choice = random.Random(seed)
    spec = StateSpec(
        (Plane("temporal", (1, 1, 32), "float32", per="sequence"),), chunk=4, interval=choice.choice([4, 8]),
        in_place=in_place, draft_tokens=2 * (seed % 2), checkpoint_format=checkpoint_format,
    )  # fmt: skip
    cache = PagedKVCache(
        [AttentionSpec(1, 8), spec], block_size=4, num_blocks=99, num_states=40, max_sequences=8, prefix_cache=False,
        device="none", **({} if checkpoint_format is None else {"num_checkpoints": 20}),
    )  # fmt: skip
    scheduler = Scheduler(cache, max_tokens_per_step=choice.choice([5, 16, 64]))
    for number in range(8):
        scheduler.add(Request(number, range(choice.randint(1, 20)), choice.randint(1, 12), resumable=True))
    drain(scheduler)
    roster = scheduler._roster
    for run, held in list(roster.idle.items()):
        with_checkpoint, alone = (roster._holdings.upper_bounds(run, held, swaps=swaps)[-1] for swaps in (True, False))
        (slot, _), before = cache.checkpoint(held) or (0, 0), cache.stats()
        has_own_slot = slot > 0 and (checkpoint_format is not None or slot != cache.state_slot(held))
        roster.reclaim(run)
        after = cache.stats()
        freed = after.num_free_states - before.num_free_states
        freed += after.num_free_checkpoints - before.num_free_checkpoints
        assert (with_checkpoint, alone) == (freed, freed - has_own_slot)
