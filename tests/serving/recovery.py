"""An engine that recovers: a fault may interrupt every call of its scheduler."""

import numpy as np

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.serving.scheduling.request import State
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.scheduling.step import StepState
from pagecore.storage import AttentionSpec
from tests.serving.runs import expected, next_token, request, sampled

# name: blocks of the pool, blocks of the swap space, and prompt, new tokens, samples and shared tokens of each request.
# All but "prefix" preempt; "queue" admits several requests in one step.
SCENARIOS = {
    "recompute": (8, None, [(5, 6, 1, 0), (4, 5, 1, 0), (6, 4, 1, 0)]),
    "swap": (8, 20, [(5, 6, 1, 0), (4, 5, 1, 0), (6, 4, 1, 0)]),
    "samples": (8, 9, [(5, 4, 3, 0), (3, 5, 2, 0), (4, 0, 1, 0)]),
    "queue": (12, None, [(4, 2, 1, 0)] * 7),
    "prefix": (12, None, [(7, 3, 1, 6), (8, 0, 1, 6), (9, 4, 2, 6), (4, 3, 1, 0)]),
}


class Engine:
    """Serves the requests of a scenario; every call of the scheduler goes through `attempt`.

    `attempt(call)` returns True if the call returned, and False if a fault interrupted it. The step number `abandoned`
    is abandoned once, and request number `cancelled` is cancelled at step number 4.
    """

    def __init__(self, name, attempt, *, abandoned=2, cancelled=None, make=PagedKVCache, **options):
        num_blocks, swap_blocks, shapes = SCENARIOS[name]
        self.cache = make(AttentionSpec(1, 8), block_size=2, num_blocks=num_blocks, max_sequences=6, device="none")
        self.num_blocks = num_blocks
        space = None if swap_blocks is None else SwapSpace(self.cache, num_blocks=swap_blocks)
        self.scheduler = Scheduler(
            self.cache, max_running=6, max_tokens_per_step=24, headroom=0.0, swap_space=space, **options
        )
        self.requests = [
            request(number, prompt, new, samples, shared)
            for number, (prompt, new, samples, shared) in enumerate(shapes)
        ]
        self.attempt = attempt
        self.abandoned, self.cancelled = abandoned, cancelled
        self.faults = 0

    def do(self, call, has_happened):
        """Repeat a call until it has happened, once."""
        for _ in range(100_000):
            if self.attempt(call):
                return
            self.faults += 1
            self.scheduler.check_invariants()
            self.cache.check_invariants()
            if has_happened():
                return
        raise AssertionError("the call never happens")

    def serve(self):
        """Serve all requests; return the tokens of each run that ended, by request and sample."""
        scheduler, ended = self.scheduler, {}
        for one in self.requests:
            self.do(lambda one=one: scheduler.add(one), lambda one=one: self.queued(one) is not None)
        first = {run.request.id: run for run in scheduler.waiting}
        for number in range(1000):
            step = self.scheduled()
            if step is None:
                return ended
            if number == self.abandoned:
                self.do(lambda step=step: scheduler.abandon(step), lambda step=step: self.is_in(step, "abandoned"))
                continue
            if number == 4 and self.cancelled is not None:
                run = first[self.cancelled]
                self.do(lambda run=run: scheduler.cancel(run), lambda run=run: self.is_cancelled(run))
                ended[run.request.id, run.sample] = run.tokens.tolist()
            self.do(lambda step=step: self.commit(step), lambda step=step: self.is_in(step, "committed"))
            ids = self.sampled(step)
            self.do(
                lambda step=step, ids=ids: scheduler.accept(step, ids), lambda step=step: self.is_in(step, "accepted")
            )
            for run in step.finished:
                assert run.state is State.FINISHED
                assert (run.request.id, run.sample) not in ended
                ended[run.request.id, run.sample] = run.tokens.tolist()
        raise AssertionError("the scheduler makes no progress")

    def scheduled(self):
        """Return the next step, or None; the return value of `schedule` is lost if a fault comes late."""
        returned = []
        self.do(lambda: returned.append(self.schedule()), lambda: self.scheduler.step is not None)
        assert not returned or returned[0] is self.scheduler.step
        return self.scheduler.step

    def schedule(self):
        return self.scheduler.schedule()

    def commit(self, step):
        self.scheduler.commit(step)

    def sampled(self, step):
        return sampled(step)

    def queued(self, one):
        return next((run for run in self.scheduler.waiting if run.request is one), None)

    def is_in(self, step, state):
        """Return True if a step is in a state, after the scheduler has settled."""
        assert self.scheduler.step in (step, None)
        return step.state is StepState(state)

    def is_cancelled(self, run):
        self.scheduler.check_invariants()
        return run.state is State.CANCELLED

    def check_end(self, ended):
        """Assert that all requests were served as without faults, and that nothing is held."""
        for one in self.requests:
            for sample in range(one.samples if one.max_new_tokens else 1):
                whole = expected(one, sample)
                if one.id == self.cancelled:
                    if sample == 0:
                        assert ended[one.id, 0] == whole[: len(ended[one.id, 0])]
                else:
                    assert ended[one.id, sample] == whole
        scheduler = self.scheduler
        scheduler.check_invariants()
        self.cache.check_invariants()
        assert self.cache.num_sequences == scheduler.num_running == scheduler.num_waiting == 0
        assert self.cache.num_available == self.num_blocks - 1
        assert self.cache.stats().num_swapped_blocks == 0
        if self.cancelled is None:  # a run may be cancelled before its admission
            assert scheduler.reuse.prefix_query_tokens == sum(len(one.prompt) for one in self.requests)
            assert scheduler.num_forks == sum(one.samples - 1 for one in self.requests if one.max_new_tokens)


class DraftEngine(Engine):
    """Serves a scenario with drafts, of which each row accepts a number that depends on its length."""

    def schedule(self):
        return self.scheduler.schedule(3)

    def accepted(self, step):
        counts = step.counts[: step.num_decodes] + [1] * (len(step.outputs) - step.num_decodes)
        lengths = [0 if run.held is None else run.held.num_tokens for run in step.outputs]
        return [1 + length * 7 % count for length, count in zip(lengths, counts, strict=True)]

    def commit(self, step):
        self.scheduler.commit(step, self.accepted(step) if step.has_drafts else None)

    def sampled(self, step):
        rows = []
        for run, count in zip(step.outputs, step.accepted or [1] * len(step.outputs), strict=True):
            text, gained = [] if run.held is None else run.held.tokens.tolist(), []
            for _ in range(count):
                gained.append(next_token([*text, *gained], run.sample))
            rows.append(gained)
        return rows


class OverlapEngine(Engine):
    """Serves a scenario with overlap by one step; a step ahead is abandoned once."""

    def __init__(self, name, attempt, **options):
        super().__init__(name, attempt, overlap=True, **options)

    def serve(self):
        scheduler, ended, cancelled = self.scheduler, {}, False
        for one in self.requests:
            self.do(lambda one=one: scheduler.add(one), lambda one=one: self.queued(one) is not None)
        first = {run.request.id: run for run in scheduler.waiting}
        previous = ids = None
        for number in range(1000):
            step, fresh = self.scheduled_after(previous), None
            if step is None and previous is None:
                return ended
            if number >= 4 and self.cancelled is not None and not cancelled:
                cancelled, run = True, first[self.cancelled]
                self.do(lambda run=run: scheduler.cancel(run), lambda run=run: self.is_cancelled(run))
                if run.state is State.CANCELLED:
                    ended[run.request.id, run.sample] = run.tokens.tolist()
            if step is not None and number == self.abandoned:
                self.do(lambda step=step: scheduler.abandon(step), lambda step=step: step.state is StepState.ABANDONED)
                step = None
            if step is not None:
                fresh = sampled_ahead(step, ids)
            if previous is not None:
                self.do(
                    lambda step=previous, ids=ids: scheduler.accept(step, ids),
                    lambda step=previous: step.state is StepState.ACCEPTED,
                )
                for run in previous.finished:
                    assert (run.request.id, run.sample) not in ended
                    ended[run.request.id, run.sample] = run.tokens.tolist()
            if step is not None:
                self.do(lambda step=step: scheduler.commit(step), lambda step=step: step.state is StepState.COMMITTED)
            previous, ids = step, fresh
            if step is None and not scheduler.num_running + scheduler.num_waiting:
                return ended
        raise AssertionError("the scheduler makes no progress")

    def scheduled_after(self, previous):
        """Return the next step, or None if the ids of `previous` are needed first, or at the end."""
        returned = []
        self.do(lambda: returned.append(self.scheduler.schedule()), lambda: self.scheduler.step not in (None, previous))
        assert not returned or returned[0] in (None, self.scheduler.step)
        return None if self.scheduler.step is previous else self.scheduler.step


def sampled_ahead(step, previous_ids):
    """Return the ids of a step that is not committed; `previous_ids` fill the tokens that it did not know."""
    unknown = dict(zip(step.unknown_positions.tolist(), step.unknown_outputs.tolist(), strict=True))
    ids = []
    for run, row in zip(step.outputs, step.output_rows, strict=True):
        source = step.runs[row].held
        text = [] if source is None else np.asarray(source.tokens).tolist()
        if row in unknown and row < step.num_decodes:
            text.append(previous_ids[unknown[row]])
        ids.append(next_token(text, run.sample))
    return ids
