"""The scheduler over a cache with cross attention: every output depends on the encoder tokens that it attends to."""

import numpy as np
import pytest

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.errors import OutOfBlocks, OutOfRows, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving.scheduling.request import Request, RequestError
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec, CrossSpec

OWN = AttentionSpec(1, 8, dtype="float32", num_query_heads=1)
POISON = np.nan


def encoded(request):
    """Return the keys and values of the encoder output of a request: the mean of the values identifies it."""
    seed = hash(request.cross_digest) if request.cross_digest is not None else request.id
    values = np.random.default_rng(abs(seed)).normal(size=(request.cross_tokens, 1, 8)).astype(np.float32)
    return np.zeros_like(values), values


class Transcriber:
    """An engine whose next token is a hash of the mean of the encoder's values and of the tokens so far."""

    def __init__(self, num_blocks=(33, 13), num_swapped=0, max_sequences=6, **options):
        layers = [OWN, CrossSpec(1, 8, dtype="float32", num_query_heads=1, max_tokens=20)]
        self.cache = PagedKVCache(layers, block_size=4, num_blocks=list(num_blocks), max_sequences=max_sequences)
        for layer in range(2):
            for name in ("key", "value"):
                self.cache.plane(name, layer).numpy()[...] = POISON
        space = SwapSpace(self.cache, num_blocks=num_swapped) if num_swapped else None
        self.scheduler = Scheduler(self.cache, swap_space=space, **options)
        self.runs, self.written = [], 0

    def add(self, *arguments, **options):
        run = self.scheduler.add(Request(*arguments, **options))
        self.runs.append(run)
        return run

    def drain(self, num_steps=10_000):
        while num_steps and (step := self.scheduler.schedule()) is not None:
            num_steps -= 1
            batch = step.batch
            self.write(step)
            heard = np.asarray(self.cache.attend(1, np.ones((batch.num_tokens, 1, 8), np.float32), batch))
            ends = np.cumsum(step.counts) - 1
            self.scheduler.commit(step)
            self.runs += [run for run in step.outputs if run not in self.runs]
            ids = []
            for run, row in zip(step.outputs, step.output_rows, strict=True):
                mean = encoded(run.request)[1].mean(axis=(0, 1)) if run.request.cross_tokens else 0
                np.testing.assert_allclose(heard[ends[row], 0], mean, rtol=0, atol=1e-5)
                ids.append(int(abs(heard[ends[row], 0, 0]) * 1000) % 997)
            self.scheduler.accept(step, np.array(ids, np.int64))
            self.cache.check_invariants()
            self.scheduler.check_invariants()

    def write(self, step):
        new, at = np.asarray(step.batch.cross.new_lens), 0
        keys = np.zeros((int(new.sum()), 1, 8), np.float32)
        values = np.full_like(keys, POISON)
        for row, run in enumerate(step.runs):
            if new[row]:
                assert new[row] == run.request.cross_tokens
                values[at : at + new[row]] = encoded(run.request)[1]
                at += new[row]
        tokens = np.ones((step.batch.num_tokens, 1, 8), np.float32)
        self.cache.write(0, tokens, tokens, step.batch)
        if at:
            self.cache.write(1, keys, values, step.batch)
        self.written += at


@pytest.mark.parametrize("options", [{}, {"num_swapped": 20}, {"max_tokens_per_step": 7}])
def test_every_run_hears_its_own_encoder_output(options):
    engine = Transcriber(num_blocks=(14, 16), **options)
    random = np.random.default_rng(3)
    for i in range(9):
        engine.add(i, random.integers(0, 9, int(random.integers(1, 12))), int(random.integers(1, 14)),
                   samples=1 + i % 2, cross_tokens=int(random.integers(1, 21)) if i % 4 else 0)  # fmt: skip
    engine.drain()
    assert all(run.has_ended for run in engine.runs)
    assert engine.scheduler.num_preemptions > 0
    assert engine.cache.num_sequences == 0
    assert not (engine.cache.block_map(1).holders > 0).any()


def test_admission_waits_for_blocks_of_encoder_tokens():
    engine = Transcriber(num_blocks=(33, 11))  # ten blocks hold two outputs of 20 tokens
    for i in range(5):
        engine.add(i, [1, 2, 3], 6, cross_tokens=20)
    step = engine.scheduler.schedule()
    assert [run.request.id for run in step.runs] == [0, 1]
    assert engine.scheduler.num_waiting == 3
    engine.scheduler.abandon(step)
    engine.drain()
    assert engine.scheduler.num_preemptions == 0
    assert engine.written == 100


def run_one_of_two_samples(engine, number, priority):
    """Add a request of two samples, run them for two steps, and end one; return the other."""
    engine.add(number, [1, 2, 3], 6, samples=2, cross_tokens=20, priority=priority)
    engine.drain(num_steps=2)
    first, second = engine.scheduler.running
    engine.scheduler.cancel(first)
    return second


def leave_output_to_a_swapped_run(engine):
    """Swap out one of two samples and end the other: their output stays on the device for a swapped run alone."""
    engine.add(0, [1, 2, 3], 6, samples=2, cross_tokens=20)
    engine.drain(num_steps=2)
    first, second = engine.scheduler.running
    engine.scheduler.preempt([second], swap=True)
    engine.scheduler.cancel(first)
    assert second.held.is_swapped
    return second


def test_outputs_of_swapped_runs_give_their_rows_to_new_runs():
    engine = Transcriber(num_blocks=(33, 31), num_swapped=20, max_sequences=2, policy="priority")
    swapped = leave_output_to_a_swapped_run(engine)
    new = [engine.add(i, [1, 2, 3], 6, cross_tokens=20, priority=1) for i in (1, 2)]
    engine.drain()
    assert [run.num_generated for run in (swapped, *new)] == [6, 6, 6]
    assert not (engine.cache.block_map(1).holders > 0).any()


def test_outputs_of_swapped_runs_give_their_rows_to_a_run_that_returns():
    engine = Transcriber(num_blocks=(33, 31), num_swapped=40, max_sequences=2, policy="priority")
    swapped = leave_output_to_a_swapped_run(engine)
    returning = run_one_of_two_samples(engine, 1, priority=1)
    engine.scheduler.preempt([returning], swap=True)
    running = run_one_of_two_samples(engine, 2, priority=2)
    engine.drain()
    assert [run.num_generated for run in (swapped, returning, running)] == [6, 6, 6]


def test_outputs_of_swapped_runs_give_their_blocks_to_a_request_that_goes_first():
    engine = Transcriber(num_blocks=(33, 6), num_swapped=20, policy="priority")  # five blocks hold one output
    swapped = leave_output_to_a_swapped_run(engine)
    first = engine.add(1, [1, 2, 3], 6, cross_tokens=20, priority=1)
    engine.drain()
    assert [run.num_generated for run in (first, swapped)] == [6, 6]


@pytest.mark.parametrize(
    ("num_blocks", "lengths", "error", "is_passed"),
    [
        ((9, 13), [32], OutOfBlocks, False),
        ((33, 31), [1] * 6, OutOfRows, False),
        ((9, 6), [32], OutOfBlocks, True),  # encoder blocks are short, too
    ],
)
def test_swapped_runs_keep_their_tokens_when_more_than_outputs_is_short(num_blocks, lengths, error, is_passed):
    engine = Transcriber(num_blocks=num_blocks, num_swapped=20, policy="priority")
    swapped = leave_output_to_a_swapped_run(engine)
    if is_passed:
        engine.add(1, [1, 2, 3], 6, cross_tokens=20, priority=1)
    outside = [engine.cache.add_sequence(np.zeros(length, int), cross_tokens=0) for length in lengths]
    engine.cache.commit(engine.cache.prepare(outside, lengths))
    with pytest.raises(error):
        engine.scheduler.schedule()
    assert swapped.held.is_swapped
    assert swapped.held.num_computed_tokens == 4
    for sequence in outside:
        engine.cache.remove(sequence)
    engine.drain()
    assert swapped.num_generated == 6


def test_preempt_all_frees_outputs_of_swapped_runs():
    engine = Transcriber(num_swapped=20)
    swapped = leave_output_to_a_swapped_run(engine)
    engine.scheduler.preempt_all()
    assert not (engine.cache.block_map(1).holders > 0).any()
    engine.drain()
    assert swapped.num_generated == 6


def test_equal_digests_share_the_output_and_the_prefix():
    engine = Transcriber()
    for i in range(4):
        engine.add(i, range(9), 3, cross_tokens=20, cross_digest=b"one")
    engine.add(4, range(9), 3, cross_tokens=20, cross_digest=b"two")
    engine.add(5, range(9), 3, cross_tokens=20)
    for i in range(6, 9):
        engine.add(i, range(9), 3, cross_tokens=0)
    engine.drain()
    assert engine.written == 60
    assert [run.num_reused_tokens for run in engine.runs] == [0, 8, 8, 8, 0, 0, 0, 8, 8]


def test_requests_that_do_not_fit_the_cache_are_refused():
    scheduler = Transcriber().scheduler
    with pytest.raises(RequestError, match="21 encoder tokens; the cache serves 20"):
        scheduler.add(Request(1, [1], 1, cross_tokens=21))
    with pytest.raises(UnsupportedOption, match="no number of encoder tokens, and the cache has cross-attention"):
        scheduler.add(Request(1, [1], 1))
    plain = Scheduler(PagedKVCache(OWN, num_blocks=9))
    with pytest.raises(UnsupportedOption, match="5 encoder tokens, and the cache has no cross-attention layers"):
        plain.add(Request(1, [1], 1, cross_tokens=5))
    assert plain.num_waiting == scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cross_tokens": -1}, ShapeError),
        ({"cross_tokens": 0, "cross_digest": b"x"}, UnsupportedOption),
        ({"cross_tokens": 1.5}, ShapeError),
        ({"cross_tokens": True}, ShapeError),
        ({"cross_digest": b"x"}, UnsupportedOption),
        ({"cross_tokens": 3, "cross_digest": "x"}, UnsupportedDtype),
        ({"cross_tokens": 3, "cross_digest": True}, UnsupportedDtype),
    ],
)
def test_bad_encoder_tokens_of_a_request_are_refused(options, error):
    with pytest.raises(error, match="cross_"):
        Request(1, [1], 1, **options)


def test_encoder_outputs_of_cross_attention_count_once_for_a_digest():
    engine = Transcriber(max_encoder_tokens=20)
    digests, found = [b"a", b"a", b"b", None], []
    for number, digest in enumerate(digests):
        engine.add(number, [1, 2, 3], 2, cross_tokens=8, cross_digest=digest)
    scheduler = engine.scheduler
    while len(found) < 2:
        step = scheduler.schedule()
        found.append([run.request.id for run in step.runs])
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
    assert found == [[0, 1, 2], [0, 1, 2, 3]]
    for options in ({"cross_tokens": 18}, {"cross_tokens": 15, "spans": [(0, 3, b"cat"), (9, 40, b"dog")]}):
        with pytest.raises(RequestError, match="needs 18 encoder tokens in one step; a step may compute 17"):
            Transcriber(max_encoder_tokens=17).add(0, [1, 2, 3], 1, **options)


def test_steps_that_hold_prompts_back_write_no_encoder_output():
    engine = Transcriber()
    engine.add(0, [1, 2], 9, cross_tokens=12, cross_digest=b"x")
    engine.drain(num_steps=1)
    for number, tokens in enumerate([{"cross_tokens": 12, "cross_digest": b"x"}, {"cross_tokens": 0}], 1):
        engine.add(number, [5], 9, **tokens)
    engine.add(3, [5], 9, cross_tokens=16, cross_digest=b"y")
    engine.add(4, [5], 9, cross_tokens=0)
    step = engine.scheduler.schedule(hold_prompts=True)
    assert [run.request.id for run in step.runs] == [0, 1, 2]
    assert not np.asarray(step.batch.cross.new_lens).any()
    engine.scheduler.abandon(step)
    engine.drain()
    assert engine.written == 12 + 16
