"""Calls of a scheduler from several threads."""

import sys
import threading
import time

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.cache.state._state import Held, StateLock
from pagecore.serving import Request, Scheduler
from pagecore.serving.scheduling import step_calls

SPEC = AttentionSpec(num_kv_heads=1, head_dim=8)


def make_scheduler(**options):
    cache = PagedKVCache(SPEC, num_blocks=33, block_size=4, device="none")
    return Scheduler(cache, max_running=4, max_tokens_per_step=16, **options)


def read_all(scheduler):
    """Read every property that other threads are likely to look at."""
    counts = scheduler.num_running, scheduler.num_waiting, scheduler.num_idle, scheduler.num_waiting_tokens
    return counts, scheduler.running, scheduler.waiting, scheduler.holders, scheduler.step


def during(monkeypatch, name, call, wait=0.05):
    """Let another thread make `call` while `schedule` is between its prepare and its return; return the threads."""
    threads = []
    own = getattr(step_calls, name)

    def interposed(*args):
        threads.append(threading.Thread(target=call))
        threads[-1].start()
        threads[-1].join(timeout=wait)  # it ends here only if it does not wait for `schedule`
        return own(*args)

    monkeypatch.setattr(step_calls, name, interposed)
    return threads


@pytest.mark.parametrize(
    "call",
    [read_all, lambda scheduler: scheduler.add(Request(1, range(3), 2)), Scheduler.check_invariants],
    ids=["read", "add", "check"],
)
def test_a_call_of_another_thread_leaves_the_step_that_schedule_makes(monkeypatch, call):
    scheduler = make_scheduler()
    scheduler.add(Request(0, range(10), 2))
    threads = during(monkeypatch, "list_outputs", lambda: call(scheduler))
    step = scheduler.schedule()
    for thread in threads:
        thread.join()
    assert len(threads) == 1
    assert step.batch.in_flight
    assert scheduler.step is step
    scheduler.commit(step)
    scheduler.accept(step, [5])
    scheduler.check_invariants()


@pytest.mark.parametrize("name", ["list_outputs", "find_decodes"])
def test_a_signal_handler_that_reads_in_the_middle_of_schedule_leaves_its_step_open(monkeypatch, name):
    scheduler, seen = make_scheduler(), []
    scheduler.add(Request(0, range(10), 2))
    own = getattr(step_calls, name)

    def interposed(*args):
        seen.append(read_all(scheduler))
        return own(*args)

    monkeypatch.setattr(step_calls, name, interposed)
    step = scheduler.schedule()
    assert scheduler.step is step
    assert seen[0][-1] is None
    scheduler.commit(step)
    scheduler.accept(step, [5])
    scheduler.check_invariants()


def test_embeddings_that_read_counts_leave_the_step_open():
    class Watched:
        def __contains__(self, digest):
            return scheduler.num_running < 0

    scheduler = make_scheduler(embeddings=Watched())
    scheduler.add(Request(0, range(10), 2, spans=[(2, 6, b"image")]))
    step = scheduler.schedule()
    assert [span.digest for span in step.encoder_spans] == [b"image"]
    scheduler.commit(step)
    scheduler.accept(step, [5])


def test_figures_do_not_wait_for_a_call(monkeypatch):
    scheduler = make_scheduler()
    scheduler.add(Request(0, range(10), 2))
    seen = []
    during(monkeypatch, "list_outputs", lambda: seen.append(scheduler.figures().num_running), wait=60)
    scheduler.schedule()
    assert seen == [1]


def test_a_released_lock_goes_to_a_thread_that_waits_for_it():
    """The releasing thread has the GIL: it would have the lock again before another one wakes."""
    lock = StateLock()

    def hold(name, order):
        with Held(lock):
            order.append(name)

    def order_of_holds():
        held, order = Held(lock), []
        waiting = threading.Thread(target=hold, args=("waiting", order))
        waiting.start()
        time.sleep(0.02)  # it waits by then, unless the machine is busy
        del held
        hold("releasing", order)
        waiting.join()
        return order

    assert any(order_of_holds() == ["waiting", "releasing"] for _ in range(50))


def test_threads_add_cancel_and_read_while_another_one_serves():
    scheduler, interval = make_scheduler(), sys.getswitchinterval()
    runs, failures, per_thread = [], [], 60

    def ask(number):
        random = np.random.default_rng(number)
        try:
            for index in range(per_thread):
                prompt = random.integers(0, 9, int(random.integers(1, 40)))
                run = scheduler.add(Request((number, index), prompt, int(random.integers(1, 6))))
                runs.append(run)
                read_all(scheduler)
                if random.random() < 0.2:
                    scheduler.cancel(run)
        except BaseException as error:
            failures.append(error)
            raise

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) or scheduler.num_running or scheduler.num_waiting:
            step = scheduler.schedule()
            if step is not None:
                scheduler.commit(step)
                scheduler.accept(step, np.zeros(len(step.outputs), np.int32))
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert len(runs) == 3 * per_thread
    assert {run.state.value for run in runs} == {"finished", "cancelled"}
    assert scheduler.cache.num_sequences == 0
    scheduler.check_invariants()
