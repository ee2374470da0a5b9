"""A state machine compares every decision of the scheduler with a plain-Python model."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagecore.errors import InvalidSequence, ShapeError
from pagecore.serving.scheduling.request import QueueFull, Request, RequestError, State
from pagecore.serving.scheduling.scheduler import Scheduler
from tests.faults import is_full
from tests.machines import drawn
from tests.serving.fake_cache import FakeBatch, FakeSpace
from tests.serving.model.fifo_cache import FifoCache
from tests.serving.model.scheduler import SchedulerModel
from tests.serving.runs import next_token

DRAFT, SPAN = 4_000, 6_000
STOPS = tuple(range(0, 1009, 9))


def name(run):
    return run.request.id, run.sample


def scheduler_holders(scheduler):
    """Return the names of the runs that hold a row but do not run."""
    return [name(run) for run in scheduler.holders[scheduler.num_running :]]


class FakeLoad:
    """A load that brings nothing, or a sequence under an id: the first `count` of its tokens are computed."""

    def __init__(self, cache, tokens, id, count, *, namespace=None, spans=None):
        self.namespace, self.spans = namespace, spans
        self.cache, self.sequence, self.batch, self.has_ended, self.releases = cache, None, FakeBatch(1, 1000), False, 0
        if count is None:
            return
        self.sequence = cache.add_sequence(tokens, id=id, namespace=namespace, spans=spans)
        count = min(count, len(tokens)) - self.sequence.num_computed_tokens
        if count > 0 and cache.try_prepare([self.sequence], [count], self.batch) is None:
            cache.remove(self.sequence)
            self.sequence = None

    def end(self, *, fails=False):
        if self.batch.in_flight:
            (self.cache.abandon if fails else self.cache.commit)(self.batch)
        if fails and self.sequence is not None:
            self.cache.remove(self.sequence)
        self.has_ended = True

    def cancel(self):
        if not self.has_ended:
            self.end(fails=True)
        elif self.sequence is not None and self.cache.sequences.get(self.sequence.id) is self.sequence:
            self.cache.remove(self.sequence)

    def release(self):
        self.releases += 1


class SchedulerMachine(RuleBasedStateMachine):
    max_drafts = 6
    imports = True

    @initialize(
        shape=st.tuples(st.integers(1, 4), st.integers(4, 24), st.integers(1, 6), st.integers(1, 30)),
        swap_blocks=st.sampled_from([None, None, 5, 30]),
        overlap=st.booleans(),
        policy=st.sampled_from(["fcfs", "fcfs", "lpm", "priority", "priority"]),
        max_wait=st.sampled_from([1, 5, 1000]),
        prefill=st.sampled_from([None, None, 3, 8]),
        chunk=st.sampled_from([None, None, 2, 5]),
        share=st.booleans(),
        ratio=st.sampled_from([None, None, 0.7, 0.3]),
        threshold=st.sampled_from([None, 0, 1]),
        queued=st.sampled_from([None, None, 1, 4]),
        encoder=st.sampled_from([None, None, 3, 8]),
    )
    def make(
        self, shape, swap_blocks, overlap, policy, max_wait, prefill, chunk, share, ratio, threshold, queued, encoder
    ):  # fmt: skip
        block_size, num_blocks, max_running, max_tokens = shape
        threshold = threshold if policy == "priority" else None
        # The scheduler pins the prefixes of several requests before it swaps the first of them in; the model does not.
        reuse = swap_blocks is None
        caches = [FifoCache(num_blocks, block_size, max_sequences=8, prefix_cache=reuse) for _ in range(2)]
        spaces = [swap_blocks and FakeSpace(cache, swap_blocks) for cache in caches]
        self.start(
            caches, spaces, max_running=max_running, max_tokens=max_tokens, overlap=overlap, policy=policy,
            max_wait=max_wait, prefill=prefill, chunk=chunk, share=share and reuse, ratio=ratio, threshold=threshold,
            queued=queued, encoder=encoder,
        )  # fmt: skip

    def start(
        self, caches, spaces, *, max_running, max_tokens, overlap, policy, max_wait, prefill, chunk, share, ratio,
        states_per_run=None, threshold=None, checkpoints=None, queued=None, encoder=None,
    ):  # fmt: skip
        """Make scheduler and model; the first cache and space are those of the scheduler."""
        self.embeddings, self.encoder = set(), encoder
        self.scheduler = Scheduler(
            caches[0], swap_space=spaces[0], max_running=max_running, max_tokens_per_step=max_tokens, headroom=0.0,
            overlap=overlap, policy=policy, max_wait_steps=max_wait, max_prefill_tokens=prefill,
            chunked_prefill_size=chunk, share_prompts=share, new_token_ratio=ratio, states_per_run=states_per_run,
            preemption_threshold=threshold, prompt_checkpoints=checkpoints, max_queued=queued,
            max_encoder_tokens=encoder, embeddings=self.embeddings,
        )  # fmt: skip
        self.model = SchedulerModel(
            caches[1], space=spaces[1], max_running=max_running, max_tokens=max_tokens, overlap=overlap, policy=policy,
            max_wait=max_wait, prefill=prefill, chunk=chunk, share=share, ratio=ratio, states_per_run=states_per_run,
            threshold=threshold, checkpoints=checkpoints or 0, encoder=encoder, outputs=self.embeddings,
        )  # fmt: skip
        self.overlap, self.max_queued = overlap, queued
        self.steps, self.pairs, self.number = [], {}, 0
        self.loads, self.loaded = [], {}
        self.refused = self.displaced = 0
        self.choice = random.Random(0)

    def drafts_of(self):
        """Return drafts as the scheduler takes them, and as the model does."""
        most = self.choice.choice([0, 0, 1, 3, self.max_drafts])
        if self.max_drafts == 0 or not most:
            return None, None
        most = min(most, self.max_drafts)
        if self.choice.random() < 0.5:
            names = [*self.pairs, *((number, sample) for number, _ in self.pairs for sample in range(1, 4))]
            return most, dict.fromkeys(names, most)
        counts = {name: self.choice.randint(0, most) for name in sorted(self.pairs) if self.choice.random() < 0.8}
        runs = {self.pairs[name][0]: count for name, count in counts.items()}
        return {run: self.choice.choice([count, [DRAFT] * count]) for run, count in runs.items()}, counts

    def compute(self, step):
        """Compute a step, as a model does."""

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 40),
        new=st.integers(0, 10),
        samples=st.sampled_from([1, 1, 2, 3]),
        shared=st.sampled_from([0, 4, 9, 40]),
        stops=st.booleans(),
        least=st.integers(0, 3),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        reused=st.sampled_from([None, None, None, 0, 5, 12]),
        resumable=st.booleans(),
        edges=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9), st.integers(0, 5)), max_size=4),
    )
    def add(self, count, prompt, new, samples, shared, stops, least, ignore_eos, priority, reused, resumable, edges):
        for _ in range(count):
            ids = np.arange(prompt, dtype=np.int32) + 100 * self.number
            ids[:shared] = np.arange(prompt)[:shared]
            spans, end = [], 0
            for gap, length, digest in edges:
                spans.append((end + gap, end + gap + length, digest))
                end = spans[-1][1]
                ids[spans[-1][0] : end] = SPAN + digest
            request = Request(
                self.number, ids, new, samples, stop_token_ids=STOPS if stops else (),
                min_new_tokens=min(least, new), ignore_eos=ignore_eos, priority=priority, max_reused_tokens=reused,
                spans=spans or None, resumable=resumable,
            )  # fmt: skip
            limits = self.scheduler.max_length, self.scheduler.max_running
            if request.num_slots > limits[0] or samples > limits[1]:
                return
            longest = max((last - first for first, last, _ in spans if first < prompt), default=0)
            if self.encoder and longest > self.encoder:
                with pytest.raises(RequestError, match=f"needs {longest} encoder tokens"):
                    self.scheduler.add(request)
                return
            self.number += 1
            displaced = self.model.displaced_by(request, self.max_queued)
            if displaced == "full":
                with pytest.raises(QueueFull):
                    self.scheduler.add(request)
                self.refused += 1
                continue
            run = self.scheduler.add(request)
            assert run.displaced is (None if displaced is None else self.pairs[displaced.name][0])
            if displaced is not None:
                self.model.cancel(displaced)
                self.displaced += 1
            self.pairs[request.id, 0] = run, self.model.add(request)

    @precondition(
        lambda self: not self.steps or (self.overlap and len(self.steps) == 1 and self.steps[0][1].is_committed)
    )
    @rule(seed=st.integers(0, 2**20))
    def schedule(self, seed):
        self.choice.seed(seed)
        drafts, counts = self.drafts_of()
        hold = self.choice.random() < 0.2
        step = self.scheduler.schedule(drafts, hold_prompts=hold)
        expected = self.model.schedule(counts, hold)
        assert (step is None) == (expected is None)
        if step is None:
            return
        assert [name(run) for run in step.runs] == [row.name for row in expected.rows]
        assert step.counts == expected.counts
        assert step.num_decodes == expected.num_decodes
        assert step.encoder_spans == expected.encoder_spans
        assert [name(run) for run in step.outputs] == [row.name for row in expected.outputs]
        for run, row in zip(step.outputs, expected.outputs, strict=True):
            self.pairs[name(run)] = run, row
        starts = np.cumsum([0, *step.counts])
        unknown = dict(zip(step.unknown_positions.tolist(), step.unknown_outputs.tolist(), strict=True))
        for position, place in unknown.items():
            assert self.steps[-1][0].outputs[place] is step.runs[starts.tolist().index(position)]
        ids, places = np.asarray(step.batch.token_ids)[: starts[-1]], step.draft_positions.tolist()
        rows = enumerate(step.num_drafts)
        assert places == [starts[row] + place for row, count in rows for place in range(1, 1 + count)]
        for place, token in enumerate(ids.tolist()):
            assert (token < 0) == (place in unknown or (place in places and token != DRAFT)), place
        self.steps.append((step, expected))

    @precondition(lambda self: self.steps and not self.steps[-1][1].is_committed)
    @rule()
    def commit(self):
        step, expected = self.steps[-1]
        self.compute(step)
        self.embeddings.update(digest for *_, digest in step.encoder_spans if self.choice.random() < 0.8)
        if self.embeddings and self.choice.random() < 0.3:
            self.embeddings.pop()
        accepted = None
        if step.has_drafts:
            most = step.counts[: step.num_decodes] + [1] * (len(step.outputs) - step.num_decodes)
            accepted = [self.choice.choice([1, count, self.choice.randint(1, count)]) for count in most]
        self.scheduler.commit(step, accepted)
        self.model.commit(expected, accepted)
        expected.accepted = accepted or [1] * len(step.outputs)

    @precondition(lambda self: self.steps and not self.steps[-1][1].is_committed)
    @rule(is_rare=st.integers(0, 3))
    def abandon(self, is_rare):
        if not is_rare:
            step, expected = self.steps.pop()
            self.scheduler.abandon(step)
            self.model.abandon(expected)

    @precondition(lambda self: self.steps and self.steps[0][1].is_committed)
    @rule(flags=st.sampled_from([None, 3, 5]))
    def accept(self, flags):
        step, expected = self.steps.pop(0)
        ids, ended = [], []
        for place, (run, count) in enumerate(zip(step.outputs, expected.accepted, strict=True)):
            gained, text = [], [] if run.held is None else run.held.tokens.tolist()
            for _ in range(count):
                gained.append(next_token([*text, *gained], run.sample))
            ended.append(flags is not None and (gained[-1] + place) % flags == 0)
            if ended[-1]:
                del gained[self.choice.randint(1, count) :]
            ids.append(gained)
        is_flat = not step.has_drafts and self.choice.random() < 0.8
        given = [gained[0] for gained in ids] if is_flat else ids
        is_whole = ids and all(len(gained) == count for gained, count in zip(ids, expected.accepted, strict=True))
        if is_whole and not is_flat and self.choice.random() < 0.5:
            # A table, with ids that end runs after those that count.
            given = np.full((len(ids), max(expected.accepted) + 1), STOPS[1])
            for row, gained in zip(given, ids, strict=True):
                row[: len(gained)] = gained
        finished = self.scheduler.accept(step, given, None if flags is None else ended)
        assert [name(run) for run in finished] == self.model.accept(expected, ids, ended)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), is_rare=st.integers(0, 3))
    def cancel(self, data, is_rare):
        if not is_rare:
            run, row = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
            assert self.scheduler.cancel(run) is self.model.cancel(row)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=st.integers(0, 9), new=st.sampled_from([None, None, 1, 4]), drop=st.booleans())
    def extend(self, data, count, new, drop):
        names = [key for key, (run, _) in self.pairs.items() if run.state is State.IDLE] or list(self.pairs)
        run, row = self.pairs[data.draw(st.sampled_from(sorted(names)))]
        is_open = any(run in step.runs or run in step.outputs for step, _ in self.steps)
        known = (run.tokens if run.held is None else run.held.tokens).tolist()
        is_idle = row in self.model.idle
        known = known[:-1] if drop and is_idle and row.generated else known
        generated = 0 if is_idle else row.generated
        left = row.request.max_new_tokens - generated if new is None or not row.request.max_new_tokens else new
        spans = row.request.spans or ()
        longest = max((last - first for first, last, _ in spans if first < len(known) + count), default=0)
        is_long = len(known) + count + max(left - 1, 0) > self.scheduler.max_length
        is_refused = count == 0 or is_long or (self.encoder and longest > self.encoder)
        is_missing = row.sequence is None and row not in self.model.waiting and not is_idle
        if run.has_ended or is_open or is_missing or is_refused:
            with pytest.raises((InvalidSequence, ShapeError)):
                self.scheduler.extend(run, [700] * count, max_new_tokens=left)
            return
        self.scheduler.extend(run, [700] * count, max_new_tokens=left, drop_last=drop and is_idle)
        least = min(max(row.request.min_new_tokens - generated, 0), left)
        assert run.request.prompt.tolist() == known + [700] * count
        assert (run.request.max_new_tokens, run.request.min_new_tokens) == (left, least)
        if is_idle:
            self.model.resume(row, run.request, len(known))
        else:
            self.model.extend(row, run.request)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), is_rare=st.integers(0, 3))
    def finish(self, data, is_rare):
        if not is_rare:
            run, row = self.pairs[data.draw(st.sampled_from(sorted(self.pairs)))]
            assert self.scheduler.finish(run) is self.model.finish(row)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), count=st.sampled_from([None, 3, 9, 100]), is_foreign=st.integers(0, 4), asks=st.booleans())
    def wait_for(self, data, count, is_foreign, asks):
        names = [row.name for row in self.model.waiting if self.model.may_load(row)]
        run, row = self.pairs[data.draw(st.sampled_from(names or sorted(self.pairs)))]
        if not self.model.may_load(row):
            with pytest.raises(InvalidSequence, match="cannot wait for a load"):
                self.scheduler.wait_for(run, FakeLoad(None, [], None, None))
            with pytest.raises(InvalidSequence, match="cannot wait for a load"):
                self.scheduler.make_import_room(run)
            return
        caches = self.scheduler.cache, self.model.cache
        brings = min(count or 1, len(row.tokens))
        if asks:
            has_room = self.scheduler.make_import_room(run, brings)
            assert has_room is self.model.make_import_room(row, brings)
            self.same()
        else:
            rows = self.model.max_running - self.model.free_rows() + len(self.model.victims())
            has_room = rows + 1 < min(caches[0].max_sequences, self.model.max_running + 1)
            has_room = has_room and row is not self.model.pinned
        count = count if self.imports and has_room else None
        tokens = [*row.tokens[:-1], 4_321] if is_foreign == 0 else row.tokens
        content = {
            "namespace": "other" if is_foreign == 1 else None,
            "spans": None if is_foreign == 2 else row.request.spans,
        }
        loads = [FakeLoad(cache, tokens, id, count, **content) for cache, id in zip(caches, (run, row), strict=True)]
        assert not asks or count is None or is_foreign < 2 or loads[0].sequence is not None, "there was room"
        self.scheduler.wait_for(run, loads[0])
        self.model.wait_for(row, loads[1])
        self.loads.append(loads)
        self.loaded[row] = loads[0]

    @precondition(lambda self: any(not load.has_ended for load, _ in self.loads))
    @rule(data=st.data(), fails=st.booleans())
    def end_load(self, data, fails):
        open_loads = [number for number, (load, _) in enumerate(self.loads) if not load.has_ended]
        for load in self.loads[data.draw(st.sampled_from(open_loads))]:
            load.end(fails=fails)

    @precondition(lambda self: not self.steps)
    @rule(swap=st.booleans(), is_rare=st.integers(0, 3))
    def preempt_all(self, swap, is_rare):
        if not is_rare:
            self.model.end_loads()
        if not is_rare and self.model.arriving:
            with pytest.raises(InvalidSequence, match="waits for an import"):
                self.scheduler.preempt_all(swap=swap)
        elif not is_rare:
            runs = self.scheduler.preempt_all(swap=swap)
            model = self.model
            assert [name(run) for run in runs] == model.send_back([*model.waiting, *model.running, *model.idle], swap)
            held = self.scheduler.cache.sequences.values()
            assert all(each.is_swapped for each in held) if swap else not held
            assert not scheduler_holders(self.scheduler)

    @precondition(lambda self: self.pairs and not self.steps)
    @rule(data=st.data(), swap=st.booleans(), is_rare=st.integers(0, 3))
    def preempt(self, data, swap, is_rare):
        if not is_rare:
            self.model.end_loads()
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.pairs)), max_size=4))
            chosen = [key for key in chosen if self.pairs[key][1] not in self.model.loading]
            runs, rows = [self.pairs[key][0] for key in chosen], [self.pairs[key][1] for key in chosen]
            assert [name(run) for run in self.scheduler.preempt(runs, swap=swap)] == self.model.send_back(rows, swap)

    @rule(turns=st.integers(1, 6), seed=st.integers(0, 2**20))
    def turn(self, turns, seed=0):
        """Run whole steps, as an engine does."""
        for number in range(turns):
            if not self.steps or (self.overlap and len(self.steps) == 1 and self.steps[0][1].is_committed):
                self.schedule(seed + number)
            if self.steps and self.steps[0][1].is_committed:
                self.accept(None)
            if self.steps and not self.steps[-1][1].is_committed:
                self.commit()
                if not self.overlap:
                    self.accept(None)

    @invariant()
    def same(self):
        if not hasattr(self, "model"):
            return
        scheduler, model = self.scheduler, self.model
        scheduler.check_invariants()
        assert [name(run) for run in scheduler.running] == [row.name for row in model.running]
        assert [name(run) for run in scheduler.waiting] == [row.name for row in model.waiting]
        pinned = [row for row in model.waiting if row is model.pinned]
        assert scheduler_holders(scheduler) == [row.name for row in pinned + model.victims()]
        assert [name(run) for run in scheduler.loading] == [row.name for row in model.loading]
        for row, load in list(self.loaded.items()):
            is_kept = row in model.loading or row in model.loaded
            assert (load.releases == 0) == is_kept, "released at the admission, or at the end"
            if not is_kept:
                del self.loaded[row]
        assert [name(run) for run in scheduler.idle] == [row.name for row in model.idle]
        assert (scheduler.num_idle, scheduler.num_reclaimed) == (len(model.idle), model.reclaimed)
        assert (scheduler.num_preemptions, scheduler.num_swaps) == (model.preemptions, model.swaps)
        assert (scheduler.num_refused, scheduler.num_displaced) == (self.refused, self.displaced)
        assert scheduler.new_token_ratio == scheduler.figures().new_token_ratio == model.ratio
        assert scheduler.cache.num_available == model.cache.num_available
        counts = scheduler.speculation
        assert [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens] == model.drafted
        for run, row in self.pairs.values():
            assert run.state.value == row.state
            assert run.num_generated == row.generated
            if run.has_ended or run.state is State.IDLE:
                assert run.tokens.tolist() == row.tokens

    def teardown(self):
        """Serve what is left; nothing starves and nothing stays."""
        if not hasattr(self, "model"):
            return
        for loads in self.loads:
            for load in loads:
                load.end() if not load.has_ended else None
        for number in range(3000):
            self.turn(1, number)
            self.same()
            if not self.steps and not self.model.running and not self.model.waiting:
                break
        for run, row in self.pairs.values():
            assert self.scheduler.finish(run) is self.model.finish(row)
        assert not self.scheduler.running + self.scheduler.waiting
        assert not list(self.scheduler.cache.sequences)
        for run, row in self.pairs.values():
            text = run.request.prompt.tolist()
            for token in row.tokens[len(text) :]:
                assert token == next_token(text, run.sample)
                text.append(token)
            assert run.tokens.tolist() == text


TestSchedulerModel = pytest.mark.slow(drawn(SchedulerMachine))
TestSchedulerModel.settings = settings(
    max_examples=1000 if is_full() else 36, stateful_step_count=60 if is_full() else 25, deadline=None
)
