"""Requests with images and with priorities of their blocks: the scheduler passes both to the cache."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving import Request, Scheduler

PROMPT = [1] * 8 + [9] * 8 + [2] * 8
CAT, DOG = [(8, 16, b"cat")], [(8, 16, b"dog")]


def make(num_blocks=65, cache=None, **options):
    cache = cache or PagedKVCache(AttentionSpec(1, 8), num_blocks=num_blocks, block_size=4, device="none")
    return Scheduler(cache, max_running=8, max_tokens_per_step=256, **options)


def serve(scheduler, *requests):
    """Serve requests that arrive together; return the tokens that were computed for each."""
    runs, counts = [scheduler.add(request) for request in requests], {}
    while (step := scheduler.schedule()) is not None:
        for run, count in zip(step.runs, step.counts, strict=True):
            counts[run] = counts.get(run, 0) + int(count)
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
    scheduler.cache.check_invariants()
    return [counts[run] for run in runs]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_equal_prompts_share_what_precedes_another_image(policy):
    scheduler = make(policy=policy)
    assert serve(scheduler, Request(0, PROMPT, 1, spans=CAT)) == [24]
    assert serve(scheduler, Request(1, PROMPT, 1, spans=DOG)) == [16]
    assert serve(scheduler, Request(2, PROMPT, 1, spans=iter(CAT)), Request(3, PROMPT, 1)) == [4, 16]
    assert serve(scheduler, Request(4, PROMPT, 1, spans=DOG)) == [4]


def test_requests_of_one_step_wait_only_for_the_same_image():
    requests = [
        Request(number, PROMPT, 1, spans=spans) for number, spans in enumerate([CAT, DOG, CAT, None, None, DOG])
    ]
    assert serve(make(), *requests) == [24, 24, 4, 24, 4, 4]


def test_preempted_requests_keep_their_images():
    scheduler = make(num_blocks=15)
    requests = [Request(number, PROMPT, 16, spans=spans) for number, spans in enumerate([CAT, DOG, CAT])]
    serve(scheduler, *requests)
    assert scheduler.cache.match_length([*PROMPT, 0], spans=CAT) + scheduler.cache.match_length([*PROMPT, 0], spans=DOG)
    assert scheduler.cache.match_length([*PROMPT, 0]) <= 8


def test_spans_are_kept_as_a_tuple_and_checked():
    assert Request(0, PROMPT, 1, spans=iter(CAT)).spans == tuple(CAT)
    for spans, error in [
        (3, ShapeError),
        ([(5, 2, b"x")], ShapeError),
        ([(1, 2)], ShapeError),
        ([(1, 2, 0.5)], UnsupportedDtype),
    ]:
        with pytest.raises(error):
            Request(0, PROMPT, 1, spans=spans)


def test_the_priority_of_a_request_decides_how_long_its_blocks_stay():
    now = [0.0]
    cache = PagedKVCache(
        AttentionSpec(1, 8),
        num_blocks=17,
        block_size=4,
        device="none",
        eviction_policy="priority",
        clock=lambda: now[0],
    )
    scheduler = make(cache=cache)
    serve(scheduler, Request(0, [1] * 24, 1, cache_priority=[(0, 8, 90), (8, None, 5)], cache_time_to_live=60.0))
    serve(scheduler, Request(1, [2] * 24, 1, cache_priority=50))
    serve(scheduler, Request(2, [3] * 32, 1))  # takes four blocks
    assert [cache.match_length([token] * 25) for token in (1, 2)] == [8, 24]
    now[0] = 61.0
    serve(scheduler, Request(3, [4] * 40, 1, cache_priority=100))
    assert [cache.match_length([token] * 25) for token in (1, 2)] == [0, 24]


def test_retention_that_the_cache_does_not_serve_is_refused_before_the_request_is_queued():
    scheduler = make()
    for options, error in [
        ({"cache_priority": 5}, UnsupportedOption),
        ({"cache_time_to_live": 5.0}, UnsupportedOption),
    ]:
        with pytest.raises(error):
            scheduler.add(Request(0, PROMPT, 1, **options))
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=17, eviction_policy="priority", device="none")
    scheduler = make(cache=cache)
    for priority in (101, "high", [(0, 4)], [(4, 2, 5)]):
        with pytest.raises(ShapeError):
            scheduler.add(Request(0, PROMPT, 1, cache_priority=priority))
    assert not scheduler.waiting
