"""`Scheduler.wait_for`: runs that wait for a load of their prefix, or for an import, while others pass them."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import InvalidSequence, OutOfRows, ShapeError, UnsupportedOption
from pagecore.serving import QueueFull, Request, Scheduler
from pagecore.serving.scheduling.request import State
from pagecore.tiers import (
    Deadline,
    DiskStore,
    Fingerprint,
    Guard,
    HostTier,
    SocketTransport,
    Tiers,
    export_sequence,
    start_import,
)
from tests.faults import PAGECORE, is_full, lines_of, raise_at
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain, expected, next_token, request
from tests.serving.served import Server, answer
from tests.serving.test_scheduler_model import FakeLoad

SERVING = PAGECORE / "serving"
TOKEN = 8  # tokens of a block in the tests with real bytes


def waiting_run(scheduler, one, **options):
    """Return a run that waits for a load, and the load."""
    run = scheduler.add(one)
    load = FakeLoad(scheduler.cache, run.tokens, run, options.get("count"))
    scheduler.wait_for(run, load)
    return run, load


def test_others_pass_a_run_that_loads_and_it_keeps_its_place():
    """Steps as in vLLM's test_interleaved_lifecycle."""
    scheduler = Scheduler(FakeCache(40), max_tokens_per_step=16)
    run, load = waiting_run(scheduler, request(0, 5, 3))
    assert scheduler.schedule() is None
    assert (scheduler.num_waiting, scheduler.num_loading, scheduler.loading) == (1, 1, (run,))
    others = [scheduler.add(request(number, 5, 3)) for number in (1, 2)]
    assert advance(scheduler) == [others]
    late = scheduler.add(request(3, 16, 3))
    load.end()
    assert scheduler.loading == (run,), "schedule has not seen the end"
    step = scheduler.schedule()
    assert (step.runs, step.counts) == ([*others, run, late], [1, 1, 5, 9])
    assert (load.releases, scheduler.num_loading) == (1, 0)
    scheduler.abandon(step)
    assert {one.request.id: one.tokens.tolist() for one in drain(scheduler)} == {
        number: expected(request(number, 16 if number == 3 else 5, 3), 0) for number in range(4)
    }


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_late_run_and_a_large_priority_wait_for_their_loads(policy):
    scheduler = Scheduler(FakeCache(40), policy=policy, max_wait_steps=1, max_running=1)
    run, load = waiting_run(scheduler, Request(0, [1, 2], 2, priority=9))
    others = [scheduler.add(Request(number, [number], 2)) for number in (1, 2)]
    assert [one for step in advance(scheduler, 4) for one in step] == [others[0]] * 2 + [others[1]] * 2
    assert scheduler.schedule() is None
    load.end()
    assert drain(scheduler) == [run]


@pytest.mark.parametrize("ends", [False, True])
def test_a_cancelled_or_displaced_run_gives_its_load_up(ends):
    scheduler = Scheduler(FakeCache(40), policy="priority", max_queued=1)
    run, load = waiting_run(scheduler, Request(0, [1], 2))
    if ends:
        load.end()
        scheduler._roster.end_loads()
    other = scheduler.add(Request(1, [1], 2, priority=1))
    assert (other.displaced, run.state) == (run, State.CANCELLED)
    assert (load.has_ended, load.releases, scheduler.num_loading) == (True, 1, 0)
    second = FakeLoad(scheduler.cache, other.tokens, other, 1)
    scheduler.wait_for(other, second)
    assert scheduler.cancel(other)
    assert (second.has_ended, second.releases, list(scheduler.cache.sequences)) == (True, 1, [])
    scheduler.check_invariants()


def test_imports_count_for_max_running():
    """As in vLLM's test_async_loads_count_toward_active_request_limit; loads from stores take no row here."""
    scheduler = Scheduler(FakeCache(40), max_running=2)
    loads = [waiting_run(scheduler, request(number, 6, 2), count=5)[1] for number in range(2)]
    other = scheduler.add(request(2, 6, 2))
    assert scheduler.schedule() is None
    loads[0].end()
    (runs,) = advance(scheduler)
    assert ([run.request.id for run in runs], other.state) == ([0], State.WAITING)
    loads[1].end()
    assert [run.request.id for run in drain(scheduler)] == [0, 1, 2]


@pytest.mark.parametrize(("count", "admitted"), [(5, [0, 1]), (4, [0])])
def test_an_import_with_one_token_left_runs_while_prompts_are_held_back(count, admitted):
    scheduler = Scheduler(FakeCache(40))
    scheduler.add(request(0, 5, 9))
    advance(scheduler)
    _, load = waiting_run(scheduler, request(1, 6, 9), count=count)
    load.end()
    step = scheduler.schedule(hold_prompts=True)
    assert [run.request.id for run in step.runs] == admitted
    assert step.counts == [1] * len(admitted)
    scheduler.abandon(step)
    assert len(drain(scheduler)) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_waits_for_the_blocks_of_an_import_instead_of_failing(fails):
    cache = FakeCache(9, prefix_cache=False)
    scheduler = Scheduler(cache, headroom=0.0)
    _, load = waiting_run(scheduler, request(0, 20, 2), count=19)
    other = scheduler.add(request(1, 8, 8))
    advance(scheduler, 5)
    assert scheduler.schedule() is None, "it lacks a block, and is alone"
    load.end(fails=fails)
    ended = drain(scheduler)
    assert [run.tokens.tolist() for run in ended] == [expected(run.request, 0) for run in ended]
    assert (len(ended), other.num_preemptions) == (2, 0)
    assert scheduler.num_reclaimed == (0 if fails else 1), "the import waits for its admission, and gives its blocks up"


@pytest.mark.parametrize("count", [0, 3, 8, 9, 100])
def test_a_run_continues_with_the_sequence_of_an_import(count):
    scheduler = Scheduler(FakeCache(40))
    run, load = waiting_run(scheduler, request(0, 9, 3), count=count)
    load.end()
    step = scheduler.schedule()
    assert step.counts == [9 - min(count, 8)], "the last token is computed for its output"
    scheduler.abandon(step)
    drain(scheduler)
    assert run.tokens.tolist() == expected(run.request, 0)
    assert scheduler.reuse.prefix_query_tokens == 0


def test_an_import_of_a_single_token_is_computed_again():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=9, block_size=4, device="none")
    scheduler = Scheduler(cache)
    run, load = waiting_run(scheduler, request(0, 1, 3))
    sequence = cache.add_sequence(run.tokens, id=run)
    cache.commit(cache.prepare([sequence], 1))
    load.end()
    assert scheduler.schedule().counts == [1]


def test_a_sequence_with_other_tokens_is_dropped():
    cache = FakeCache(40, prefix_cache=False)
    scheduler = Scheduler(cache)
    run = scheduler.add(request(0, 9, 3))
    load = FakeLoad(cache, [*range(8), 77], run, 9)
    scheduler.wait_for(run, load)
    load.end()
    assert scheduler.schedule().counts == [9]


def state_of(scheduler):
    """Return what a caller can see of a scheduler over a fake cache, and all that its cache holds."""
    cache, figures = scheduler.cache, scheduler.figures()
    groups = scheduler.running, scheduler.waiting, scheduler.holders, scheduler.idle, scheduler.loading, scheduler.steps
    runs = {run: (run.state, run.tokens.tolist(), run.held, run.goes_first) for run in (*groups[0], *groups[1])}
    held = {run: (one.ids[:], one.num_computed_tokens, one.blocks[:]) for run, one in cache.sequences.items()}
    counts = scheduler.num_waiting_tokens, scheduler.num_reclaimed, scheduler.num_preemptions, scheduler.reuse
    return groups, runs, held, counts, figures, cache.free[:], cache.holders[:], dict(cache.tree)


def test_waits_that_are_refused_change_nothing():
    scheduler = Scheduler(FakeCache(10, max_sequences=4), headroom=0.0)
    idle = scheduler.add(Request(0, range(5), 3, resumable=True))
    drain(scheduler)
    run, load = waiting_run(scheduler, request(1, 5, 3), count=2)
    running, swapped = scheduler.add(request(2, 5, 9)), scheduler.add(Request(3, range(50, 55), 3, resumable=True))
    advance(scheduler, 3)
    scheduler.extend(swapped, [7])
    pinned = scheduler.add(request(4, 30, 2))
    advance(scheduler)
    fresh = scheduler.add(request(5, 5, 3))
    assert [one.held is None for one in (pinned, fresh)] == [False, True]
    before = state_of(scheduler)
    for chosen in (run, running, idle, swapped):
        with pytest.raises(InvalidSequence, match="cannot wait for a load"):
            scheduler.wait_for(chosen, load)
        with pytest.raises(InvalidSequence, match="cannot wait for a load"):
            scheduler.make_import_room(chosen)
        assert state_of(scheduler) == before
    for chosen in (pinned, fresh):
        with pytest.raises(UnsupportedOption, match="without has_ended; pass what"):
            scheduler.wait_for(chosen, object())
        for count in (0, 31, True):
            with pytest.raises(ShapeError, match="num_tokens"):
                scheduler.make_import_room(chosen, count)
        for call in (Scheduler(FakeCache(9)).wait_for, lambda one, _: Scheduler(FakeCache(9)).make_import_room(one)):
            with pytest.raises(InvalidSequence, match="wait for it there"):
                call(chosen, load)
        assert state_of(scheduler) == before
    with pytest.raises(InvalidSequence, match="waits for an import; cancel the import"):
        scheduler.preempt_all()
    assert state_of(scheduler) == before
    load.end()
    assert len(drain(scheduler)) == 5
    scheduler.check_invariants()


@pytest.mark.parametrize("ends", ["import", "sample"])
def test_a_commit_without_rows_for_samples_changes_nothing_and_can_be_repeated(ends):
    cache = FakeCache(40, max_sequences=3)
    scheduler = Scheduler(cache)
    first = scheduler.add(request(0, 5, 3, 3))
    step = scheduler.schedule()
    run, load = waiting_run(scheduler, request(1, 5, 3), count=3)
    with pytest.raises(OutOfRows, match="need 2 rows, and 1 of 3 are free: imports"):
        scheduler.commit(step)
    scheduler.check_invariants()
    assert (first.num_tokens_left, scheduler.num_loading) == (5, 1)
    assert scheduler.cancel(run if ends == "import" else step.outputs[1])
    scheduler.commit(step)
    scheduler.accept(step, [next_token(range(5), sample) for sample in range(3)])
    load.end()
    ended = drain(scheduler)
    assert len(ended) == 3
    assert scheduler.num_forks == (2 if ends == "import" else 1)


def test_idle_runs_give_their_rows_to_samples_if_an_import_has_taken_one():
    scheduler = Scheduler(FakeCache(40, max_sequences=3))
    idle = scheduler.add(Request(0, range(5), 3, resumable=True))
    drain(scheduler)
    scheduler.add(request(1, 5, 3, 2))
    step = scheduler.schedule()
    waiting_run(scheduler, request(2, 5, 3), count=3)
    scheduler.commit(step)
    assert (scheduler.num_reclaimed, scheduler.num_forks, scheduler.idle) == (1, 1, (idle,))
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("given", "wanted", "count"),
    [
        ({}, {}, 1),
        ({"namespace": "tenant"}, {}, 12),
        ({}, {"namespace": "tenant"}, 12),
        ({"spans": [(0, 2, b"image")]}, {}, 12),
        ({}, {"spans": [(0, 2, b"image")]}, 12),
        ({"spans": [(0, 2, b"other")]}, {"spans": [(0, 2, b"image")]}, 12),
        ({"spans": [(0, 2, b"image")], "namespace": 3}, {"spans": [(0, 2, b"image")], "namespace": 3}, 1),
        ({"spans": []}, {}, 1),
    ],
)
def test_a_sequence_of_another_namespace_or_other_spans_is_dropped(given, wanted, count):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=40, block_size=4, device="none")
    scheduler = Scheduler(cache)
    run = scheduler.add(Request(0, range(12), 3, **wanted))
    load = FakeLoad(None, [], None, None, **given)
    scheduler.wait_for(run, load)
    sequence = cache.add_sequence(range(12), id=run, **given)
    cache.commit(cache.prepare([sequence], 11))
    load.end()
    # Blocks that the import has published under the keys of the run are still cached.
    assert scheduler.schedule().counts == [count]


def test_spans_that_a_run_gets_while_it_loads_make_an_import_useless():
    cache = FakeCache(40)
    scheduler = Scheduler(cache)
    run, load = waiting_run(scheduler, request(0, 9, 3), count=8)
    scheduler.extend(run, [7, 7, 7], spans=[(0, 2, b"image")])
    load.end()
    scheduler._roster.end_loads()
    assert (run.held, list(cache.sequences)) == (None, [])


def test_preemption_sees_that_an_import_has_ended():
    scheduler = Scheduler(FakeCache(40))
    run, load = waiting_run(scheduler, request(0, 9, 3), count=8)
    load.end()
    assert scheduler.preempt([run], swap=False) == []
    assert (run.held, scheduler.num_loading, scheduler.waiting) == (None, 0, (run,))


@pytest.mark.parametrize("was_admitted", [False, True])
def test_a_run_whose_import_has_arrived_counts_for_the_queue_until_its_first_admission(was_admitted):
    scheduler = Scheduler(FakeCache(40), max_queued=1)
    run = scheduler.add(request(0, 9, 3))
    if was_admitted:
        advance(scheduler)
        scheduler.preempt_all(swap=False)
        scheduler.add(request(1, 5, 3))
    load = FakeLoad(scheduler.cache, run.tokens, run, 3)
    scheduler.wait_for(run, load)
    load.end()
    scheduler._roster.end_loads()
    with pytest.raises(QueueFull):
        scheduler.add(request(2, 5, 3))


@pytest.mark.parametrize("is_open", [False, True])
def test_room_for_an_import_comes_from_idle_runs_and_spares_rows_of_samples(is_open):
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=12, block_size=4, max_sequences=4, device="none")
    scheduler = Scheduler(cache, headroom=0.0)
    for number in range(2):
        scheduler.add(request(number, 6, 3, namespace=number))
        scheduler.add(Request(10 + number, np.arange(6) + 50 * number, 2, resumable=True))
    drain(scheduler)
    assert scheduler.num_idle == 2
    scheduler.add(request(3, 5, 3, 2))
    step = scheduler.schedule()
    if not is_open:
        scheduler.commit(step)
        scheduler.accept(step, [1, 2])
    run, late = scheduler.add(request(4, 33, 2)), scheduler.add(request(5, 5, 2))
    assert scheduler.make_import_room(run, 32)
    assert scheduler.num_reclaimed == 2, "the first for the row, the second for blocks"
    sequence = cache.add_sequence(run.tokens, id=run)
    arrival = cache.prepare_arrival(sequence, 32)
    scheduler.wait_for(run, load := FakeLoad(None, [], None, None))
    assert scheduler.make_import_room(late, 4)
    other = cache.add_sequence(late.tokens, id=late)
    with pytest.raises(InvalidSequence, match="cannot wait for a load"):
        scheduler.make_import_room(run)
    scheduler.wait_for(late, FakeLoad(None, [], None, None))
    assert not scheduler.make_import_room(scheduler.add(request(6, 5, 2))), "two rows are those of samples"
    scheduler.cancel(late)
    assert other.id not in cache.sequences
    if is_open:
        scheduler.commit(step)
        scheduler.accept(step, [1, 2])
    cache.commit(arrival)
    load.end()
    scheduler.check_invariants()
    assert run in drain(scheduler)


def stored(folder, tokens):
    """Return tiers whose disk alone has a prefix."""
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=33, block_size=TOKEN)
    fingerprint = Fingerprint.of(cache, model="loads")
    disk = Guard(DiskStore(folder, fingerprint=fingerprint, max_bytes="1MiB"), deadline=Deadline(10.0))
    tiers = Tiers(cache, HostTier(cache, num_blocks=33), [disk], fingerprint=fingerprint, min_tokens=TOKEN)
    with tiers.add_sequence(tokens) as sequence:
        cache.commit(cache.prepare([sequence], len(tokens)))
    tiers.drain()
    cache.clear_prefix_cache()
    tiers.host.clear()
    return cache, tiers


@pytest.mark.parametrize("is_there", [True, False])
def test_a_prefix_from_a_store_arrives_while_others_are_served(tmp_path, is_there):
    prompt = np.arange(40) + (0 if is_there else 500)
    cache, tiers = stored(tmp_path, np.arange(40))
    with tiers:
        scheduler = Scheduler(cache)
        run, other = (scheduler.add(Request(number, prompt + 100 * number, 3)) for number in range(2))
        load = tiers.request(prompt, deadline=10.0)
        scheduler.wait_for(run, load)
        assert advance(scheduler) == [[other]]
        tiers.wait(load, 10)
        step = scheduler.schedule()
        assert step.counts == [1, 8 if is_there else 40]
        scheduler.abandon(step)
        drain(scheduler)
        assert (run.num_reused_tokens, run.hit_tokens.get("DISK", 0)) == ((32, 32) if is_there else (0, 0))
        assert not load.load.is_pinned
        tiers.check_invariants()


@pytest.mark.parametrize("how", ["whole", "cancelled", "lost"])
def test_a_decoder_continues_with_what_a_prefill_has_computed(how):
    prefill, decode = (Server(num_blocks=40, block_size=4) for _ in range(2))
    first = prefill.add(Request(0, range(11), 1, resumable=True))
    prefill.drain()
    prompt = first.tokens  # the prompt, and the first generated token
    with SocketTransport("tcp://127.0.0.1:0") as exporter, SocketTransport() as importer:
        manifest = export_sequence(prefill.cache, prefill.cache.sequences[first], transport=exporter, lease=30.0)
        run = decode.add(Request(0, prompt, 6))
        if how == "lost":
            exporter.withdraw(manifest.export)
        load = start_import(decode.cache, manifest, transport=importer, id=run)
        decode.scheduler.wait_for(run, load)
        if how == "cancelled":
            load.cancel()
        other = decode.add(Request(1, range(50, 60), 6))
        assert decode.turn()
        load._known.wait(10)
        assert load.poll()
        computed = decode.computed
        decode.turn()
        assert decode.computed - computed == (1 + 1 if how == "whole" else 1 + 12)
        decode.drain()
    assert run.tokens.tolist() == answer(Request(0, range(11), 7))
    assert other.tokens.tolist() == answer(other.request)
    decode.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["end", "cancel", "cancel after the end"])
@pytest.mark.parametrize("count", [None, 3, 100, -100])
def test_an_interrupted_end_has_happened_or_not(call, count):
    """An exception at each event of `schedule` or `cancel`, or at every third; the call is repeated."""

    def made():
        scheduler = Scheduler(FakeCache(40))
        run = scheduler.add(request(0, 9, 3))
        tokens = run.tokens if count is None or count > 0 else run.tokens + 50  # of equal length, and foreign
        load = FakeLoad(scheduler.cache, tokens, run, count and abs(count))
        scheduler.wait_for(run, load)
        if call != "cancel":
            load.end()
        if call == "cancel after the end":
            scheduler._roster.end_loads()
        return scheduler, run, load

    def act(scheduler, run):
        return scheduler._roster.end_loads() if call == "end" else scheduler.cancel(run)

    scheduler, run, _ = made()
    events = lines_of(lambda: act(scheduler, run), SERVING)
    for event in range(1, events + 1, 1 if is_full() else 3):
        scheduler, run, load = made()
        raise_at(lambda scheduler=scheduler, run=run: act(scheduler, run), event, SERVING)
        scheduler.check_invariants()
        act(scheduler, run)
        scheduler.check_invariants()
        ended = drain(scheduler)
        assert load.has_ended
        assert load.releases >= 1
        assert [one.tokens.tolist() for one in ended] == ([expected(run.request, 0)] if call == "end" else [])
        assert not scheduler.cache.sequences
