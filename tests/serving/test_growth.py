"""Work of the scheduler as the number of requests grows: cache calls, rows in these calls, lines of Python."""

import numpy as np
import pytest

from pagecore.cache import PagedKVCache, SwapSpace
from pagecore.serving.scheduling.request import Request
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.storage import AttentionSpec
from tests.faults import PAGECORE, lines_of

SMALL, LARGE = 64, 512


class CountingCache(PagedKVCache):
    """A cache that counts its calls and the sequences in them."""

    calls = rows = 0

    def count(self, rows=1):
        self.calls += 1
        self.rows += rows

    def add_sequence(self, *arguments, **options):
        self.count()
        return super().add_sequence(*arguments, **options)

    @property
    def sequences(self):
        self.count()
        return super().sequences

    def match_length(self, *arguments, **options):
        self.count()
        return super().match_length(*arguments, **options)

    def remove(self, sequence):
        self.count()
        super().remove(sequence)

    def swap_in(self, sequences):
        self.count()
        super().swap_in(sequences)

    def try_swap_out(self, sequences, space):
        self.count()
        return super().try_swap_out(sequences, space)

    def shortage(self, sequences, counts, **options):
        self.count(len(sequences))
        return super().shortage(sequences, counts, **options)

    def try_prepare(self, sequences, counts, out=None):
        self.count(len(sequences))
        return super().try_prepare(sequences, counts, out)


def made(number, *, num_blocks, prompt, new, block_size=4, samples=1, requests=None, swap=False):
    """Return a scheduler of `number` concurrent requests and a pool with `num_blocks` blocks for each."""
    cache = CountingCache(
        AttentionSpec(1, 8),
        num_blocks=num_blocks * number + 2,
        block_size=block_size,
        max_sequences=number,
        max_tokens_per_sequence=64,
        device="none",
    )
    space = SwapSpace(cache, num_blocks=64 * number) if swap else None
    scheduler = Scheduler(cache, max_running=number, max_tokens_per_step=number * 64, headroom=0.0, swap_space=space)
    for one in range(number if requests is None else requests):
        scheduler.add(Request(one, np.arange(prompt) + 100 * one, new, samples))
    return scheduler


def drain(scheduler):
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 7, np.int32))


def admitted(number):
    """Admit all requests in one step."""
    scheduler = made(number, num_blocks=4, prompt=8, new=4)
    return scheduler, scheduler.schedule


def half_admitted(number):
    """Admit the half of the requests that fits."""
    scheduler = made(number, num_blocks=1, prompt=8, new=1)
    return scheduler, scheduler.schedule


def preempted(number):
    """Preempt half of the running requests in one step."""
    scheduler = made(number, num_blocks=1, prompt=4, new=6)
    step = scheduler.schedule()
    assert len(step.runs) == number
    scheduler.commit(step)
    scheduler.accept(step, np.full(number, 7, np.int32))
    return scheduler, scheduler.schedule


def stormed(number):
    """Serve requests that grow to twice the size of the pool, with recomputation."""
    scheduler = made(number, num_blocks=2, prompt=8, new=12)
    return scheduler, lambda: drain(scheduler)


def swapped(number):
    """Serve requests that grow to twice the size of the pool, with a swap space."""
    scheduler = made(number, num_blocks=2, prompt=8, new=12, swap=True)
    return scheduler, lambda: drain(scheduler)


def sampled(number):
    """Serve one request whose samples are forked and preempted."""
    scheduler = made(number, num_blocks=2, prompt=8, new=9, samples=number, requests=1)
    return scheduler, lambda: drain(scheduler)


def cancelled(number):
    """Cancel all requests, of which a third is running."""
    scheduler = made(number, num_blocks=1, prompt=9, new=1)
    scheduler.abandon(scheduler.schedule())
    runs = scheduler.running + scheduler.waiting
    return scheduler, lambda: [scheduler.cancel(run) for run in reversed(runs)]


LOADS = [admitted, half_admitted, preempted, stormed, swapped, sampled, cancelled]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.__name__)
def test_work_grows_in_proportion_to_the_requests(load):
    figures = []
    for number in (SMALL, LARGE):
        scheduler, call = load(number)
        calls, rows = scheduler.cache.calls, scheduler.cache.rows
        lines = lines_of(call, PAGECORE / "serving")
        figures.append((scheduler.cache.calls - calls, scheduler.cache.rows - rows, lines))
    # The margin of a tenth is for the logarithmic number of stages and rounds.
    growth = [large / small for small, large in zip(*figures, strict=True)]
    assert max(growth) < 1.1 * LARGE / SMALL, (figures, growth)
