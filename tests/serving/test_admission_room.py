"""Room for whole prompts: an admission counts the blocks of a prompt, those that it reuses included, once."""

import random

import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.serving import Request, Scheduler
from tests.serving.runs import advance, drain

BLOCK = 4


def made(num_blocks, specs=None, **options):
    options = {"headroom": 0.0, "max_tokens_per_step": 8} | options
    states = {} if specs is None else {"num_states": 12}
    cache = PagedKVCache(
        specs or AttentionSpec(1, 8), block_size=BLOCK, num_blocks=num_blocks + 1, max_sequences=8, device="none",
        **states,
    )  # fmt: skip
    return cache, Scheduler(cache, **options)


def cached(cache, tokens):
    """Leave a prefix in the cache that nothing uses."""
    with cache.add_sequence(tokens) as sequence:
        cache.commit(cache.prepare([sequence], len(tokens) - sequence.num_cached_tokens))


def test_a_prompt_whose_first_part_fits_waits_until_all_of_it_does():
    """As vLLM's `scheduler_reserve_full_isl`: parts of 8 tokens, and 24 of the first prompt's tokens are to come."""
    _, scheduler = made(10)
    first = scheduler.add(Request(0, range(32), 1))
    second = scheduler.add(Request(1, range(100, 112), 1))
    third = scheduler.add(Request(2, range(200, 204), 1))
    runs = advance(scheduler, 5)
    assert runs[:4] == [[first]] * 4, "8 of 10 blocks are the first prompt's; the third waits in its place"
    assert runs[4] == [second]
    assert [len(run.tokens) for run in (second, third)] == [12, 4]
    assert drain(scheduler) == [second, third]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(("more", "is_admitted"), [(12, True), (13, False)])
def test_blocks_that_a_prompt_reuses_are_not_free_for_the_rest_of_it(more, is_admitted):
    """Of 10 blocks 1 is used and 6 are cached: a prompt that reuses these has 3 blocks for its other tokens."""
    cache, scheduler = made(10, max_tokens_per_step=64)
    cached(cache, range(24))
    other = scheduler.add(Request(0, [7], 2))
    advance(scheduler)
    assert (cache.num_available, cache.stats().num_evictable_blocks) == (9, 6)
    run = scheduler.add(Request(1, [*range(24), *range(50, 50 + more)], 1))
    (rows,) = advance(scheduler)
    assert rows == [other, run][: 1 + is_admitted]
    drain(scheduler)
    assert (run.num_reused_tokens, scheduler.num_preemptions) == (24, 0)


def test_a_prompt_does_not_count_the_cached_prefix_of_another_as_free():
    """Two prompts reuse 3 blocks each, and have 4 of their own: 14 of 13 blocks."""
    cache, scheduler = made(13, max_tokens_per_step=64)
    for start in (0, 100):
        cached(cache, range(start, start + 12))
    runs = [scheduler.add(Request(start, range(start, start + 28), 1)) for start in (0, 100)]
    assert advance(scheduler) == [runs[:1]]
    drain(scheduler)
    assert scheduler.num_preemptions == 0


def test_the_headroom_is_left_over_after_reused_blocks_too():
    for headroom, is_admitted in ((0.0, True), (0.1, False)):
        cache, scheduler = made(10, max_tokens_per_step=64, headroom=headroom)
        cached(cache, range(24))
        scheduler.add(Request(0, [7], 3))
        advance(scheduler)
        scheduler.add(Request(1, [*range(24), *range(50, 62)], 1))
        assert len(advance(scheduler)[0]) == 1 + is_admitted


@pytest.mark.parametrize("longest", [16, 80])
def test_the_headroom_is_a_share_of_the_pool_whatever_a_sequence_may_hold(longest):
    """20 blocks, of which half stay free: 10 prompts of a block each, and their answers grow."""
    cache = PagedKVCache(
        AttentionSpec(1, 8), block_size=BLOCK, num_blocks=21, max_sequences=20, max_tokens_per_sequence=longest,
        device="none",
    )  # fmt: skip
    scheduler = Scheduler(cache, headroom=0.5)
    for number in range(20):
        scheduler.add(Request(number, range(100 * number, 100 * number + BLOCK), 2))
    assert len(scheduler.schedule().runs) == 10


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("seed", range(10))
def test_prompts_that_generate_one_token_are_never_preempted(seed, kind):
    """Nothing grows past what its admission counted, whatever prompts share, and in however many parts they come."""
    choice = random.Random(seed)
    state = StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=BLOCK, interval=BLOCK)
    specs = None if kind == "attention" else [AttentionSpec(1, 8), state]
    cache, scheduler = made(choice.randint(8, 24), specs, share_prompts=seed % 2 == 0)
    heads = [[head] * choice.randint(4, 20) for head in range(3)]

    def step_on():
        prompts = [run for run in scheduler.running if run.prefilling]
        assert not cache.shortage([run.sequence for run in prompts], [run.num_tokens_left for run in prompts])
        if (step := scheduler.schedule()) is None:
            return False
        scheduler.check_invariants()
        scheduler.commit(step)
        scheduler.accept(step, [1] * len(step.outputs))
        return True

    for number in range(40):
        head = choice.choice(heads)
        tail = [100 + number] * choice.randint(1, 12)
        scheduler.add(Request(number, [*head[: choice.randint(1, len(head))], *tail], choice.randint(0, 1)))
        if choice.random() < 0.3:
            for _ in range(choice.randint(1, 3)):
                step_on()
    while step_on():
        pass
    assert scheduler.num_preemptions == 0
    assert scheduler.reuse.prefix_hit_tokens > 0
