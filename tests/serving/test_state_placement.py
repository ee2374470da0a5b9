"""Tokens that cached states save, compared with those of a cache that knows the requests to come."""

import numpy as np
import pytest

from bench.serving.state_placement import best_state_hits, informed_state_hits
from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec

STATE = StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=64, interval=256)


def text(random, low, high):
    return random.integers(0, 50_000, int(random.integers(low, high))).tolist()


def chats(random):
    """Return the turns of many short chats, in random order; some chats end, and others begin."""
    live, prompts = [], []
    for _ in range(500):
        if len(live) < 60 or random.random() < 0.15:
            if len(live) == 60:
                live.pop(int(random.integers(60)))
            live.append(text(random, 50, 600))
            chosen = live[-1]
        else:
            chosen = live[int(random.integers(len(live)))]
        prompts.append(list(chosen))
        chosen += text(random, 60, 500)
    return prompts


def document(random):
    """Return questions about one long text."""
    shared = text(random, 6000, 6001)
    return [shared + text(random, 20, 300) for _ in range(200)]


def agents(random):
    """Return prompts that continue one of the recent ones: a tree of branches."""
    nodes, prompts = [text(random, 500, 501)], []
    for _ in range(400):
        prompts.append(nodes[-min(int(random.geometric(0.02)), len(nodes))] + text(random, 80, 400))
        if len(prompts[-1]) < 6000:
            nodes.append(prompts[-1])
    return prompts


def shared_prompts(random):
    """Return prompts of which a few are asked for often and many seldom (Zipf)."""
    shared = [text(random, 300, 2500) for _ in range(200)]
    shares = 1 / np.arange(1, 201)
    picks = random.choice(200, 600, p=shares / shares.sum())
    return [shared[pick] + text(random, 30, 600) for pick in picks]


def served(prompts, slots):
    """Return the tokens that a cache reuses of prompts that it serves in turn."""
    blocks = sum(len(prompt) // 16 + 2 for prompt in prompts)
    cache = PagedKVCache(
        [AttentionSpec(1, 8), STATE],
        num_blocks=blocks,
        num_states=slots,
        max_sequences=2,
        max_tokens_per_sequence=16384,
        device="none",
    )
    hits = 0
    for prompt in prompts:
        with cache.add_sequence(prompt) as sequence:
            hits += sequence.num_computed_tokens
            cache.commit(cache.prepare([sequence], len(prompt) - sequence.num_computed_tokens))
    return hits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("traffic", "slots", "least"),
    [
        (chats, 200, 0.99),
        (chats, 60, 0.8),
        (document, 20, 0.99),
        (agents, 200, 0.95),
        (agents, 50, 0.84),
        (shared_prompts, 200, 0.99),
        (shared_prompts, 50, 0.955),
    ],
)
def test_hits_come_near_to_those_of_a_cache_that_knows_the_future(traffic, slots, least):
    prompts = traffic(np.random.default_rng(1))
    informed = sum(informed_state_hits(prompts, 64, slots - 2))
    assert least * informed <= served(prompts, slots) <= 1.01 * sum(best_state_hits(prompts, 64, slots - 2))


def test_the_second_request_with_a_shared_prompt_leaves_the_state_that_the_third_finds():
    shared = text(np.random.default_rng(0), 6000, 6001)
    prompts = [[*shared, number, *range(64)] for number in range(3)]
    assert best_state_hits(prompts, 64, 4) == [0, 5952, 5952]
    assert informed_state_hits(prompts, 64, 4) == [0, 0, 5952]
    assert served(prompts, 6) == 5952


def test_a_bound_keeps_the_states_that_are_asked_for_next():
    chats = [[one] * 200 for one in range(3)]
    prompts = [*chats, *(chat + [9] * 64 for chat in (chats[0], chats[2], chats[1]))]
    assert informed_state_hits(prompts, 64, 3) == [0, 0, 0, 192, 192, 192]
    assert informed_state_hits(prompts, 64, 1) == [0, 0, 0, 192, 0, 0]
