"""Parts of prompts: where the steps of a prompt end in a cache with states, and what that lets others reuse."""

import math

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving import Request, Scheduler
from pagecore.serving.scheduling.parts import PromptParts, choose_parts
from pagecore.serving.scheduling.request import Run

STATE = StateSpec((Plane("temporal", (1,), "float32", per="sequence"),), chunk=64, interval=256)


def make_cache(specs=None, **options):
    return PagedKVCache(
        [AttentionSpec(1, 8), STATE] if specs is None else specs, num_blocks=20_000, max_sequences=8,
        max_tokens_per_sequence=65_536, device="none", **({"num_states": 100} if specs is None else {}), **options,
    )  # fmt: skip


def parts_of(scheduler, prompt):
    """Return the ends of the steps that compute a prompt, and the tokens that it reuses."""
    run = scheduler.add(Request(len(prompt), prompt, 0))
    ends = []
    while (step := scheduler.schedule()) is not None:
        ends.append(run.sequence.num_computed_tokens + step.counts[0])
        scheduler.commit(step)
        scheduler.accept(step, [])
    return ends, run.num_reused_tokens


@pytest.mark.parametrize(
    ("length", "checkpoints", "ends"),
    [
        (500, 4, [500]),
        (1000, 4, [1000]),  # 488 tokens before the last checkpoint are too few
        (1088, 4, [576, 1088]),
        (5000, 4, [2944, 4480, 5000]),
        (5000, 1, [4480, 5000]),
        (5000, 0, [5000]),
        (50_000, 4, [17_216, 41_792, 47_936, 49_472, 50_000]),
        (50_000, 2, [47_936, 49_472, 50_000]),
    ],
)
def test_parts_end_512_tokens_before_the_end_and_at_four_times_the_distance(length, checkpoints, ends):
    scheduler = Scheduler(make_cache(), max_tokens_per_step=65_536, prompt_checkpoints=checkpoints)
    assert parts_of(scheduler, np.arange(length)) == (ends, 0)
    assert all(end % 64 == 0 for end in ends[:-1])


def test_the_second_prompt_with_a_shared_beginning_reuses_most_of_it_and_the_third_all():
    shared = np.arange(5000)
    scheduler = Scheduler(make_cache(), max_tokens_per_step=65_536)
    found = [parts_of(scheduler, np.append(shared, np.full(300, 7000 + i))) for i in range(3)]
    # The second one has a state 512 tokens before its end, and leaves one where it parts from the first.
    assert found == [([3200, 4736, 5300], 0), ([4992, 5300], 4736), ([5300], 4992)]
    scheduler = Scheduler(make_cache(), max_tokens_per_step=65_536, prompt_checkpoints=0)
    found = [parts_of(scheduler, np.append(shared, np.full(300, 7000 + i))) for i in range(3)]
    assert [reused for _, reused in found] == [0, 0, 4992]


def test_a_prompt_that_leaves_another_keeps_a_state_there_and_at_its_end():
    scheduler = Scheduler(make_cache(), max_tokens_per_step=65_536)
    text = np.arange(1000)
    parts_of(scheduler, text)
    assert parts_of(scheduler, np.append(text[:640], np.full(360, 9)))[0] == [640, 1000]
    assert parts_of(scheduler, np.append(text[:640], np.full(400, 9)))[1] == 960


def test_limits_of_a_step_still_hold_and_parts_end_on_the_grid():
    scheduler = Scheduler(make_cache(), max_tokens_per_step=1000, chunked_prefill_size=700)
    ends, _ = parts_of(scheduler, np.arange(5000))
    assert ends == [640, 1280, 1920, 2560, 2944, 3584, 4224, 4480, 5000]
    assert parts_of(Scheduler(make_cache(), max_tokens_per_step=50), np.arange(100))[0] == [50, 64, 100]


def test_a_prompt_that_does_not_fit_a_step_has_states_although_others_take_a_part_of_it():
    cache = make_cache()
    scheduler = Scheduler(cache, max_tokens_per_step=1000)
    scheduler.add(Request("short", np.arange(9000, 9123), 0))
    run = scheduler.add(Request("long", np.arange(1800), 0))
    step = scheduler.schedule()
    assert step.counts == [123, 832]  # 877 tokens are left, which would end off the grid
    scheduler.commit(step)
    assert cache.checkpoint(run.sequence)[1] == 832


def test_parts_shorter_than_the_grid_end_at_its_points_whenever_they_reach_one():
    assert parts_of(Scheduler(make_cache(), max_tokens_per_step=50), np.arange(200))[0] == [
        50,
        64,
        114,
        128,
        178,
        192,
        200,
    ]
    ends, _ = parts_of(Scheduler(make_cache(), max_tokens_per_step=63), np.arange(129))
    assert ends == [63, 64, 127, 128, 129]
    scheduler = Scheduler(make_cache(), max_tokens_per_step=30, prompt_checkpoints=0)
    assert parts_of(scheduler, np.arange(100))[0] == [30, 60, 90, 100]


def test_a_step_full_of_decodes_leaves_prompts_their_checkpoints():
    """Seven of eight tokens of a step are decodes': the prompt has one, 300 times."""
    cache = make_cache()
    scheduler = Scheduler(cache, max_tokens_per_step=8)
    for number in range(7):
        scheduler.add(Request(number, [number], 400))
    text = np.arange(100, 400)
    run = scheduler.add(Request("long", text, 1))
    while not run.has_ended:
        step = scheduler.schedule()
        scheduler.commit(step)
        scheduler.accept(step, [1] * len(step.outputs))
    assert cache.match_length(text) == 256


def serve_in_parts(cache, parts, tokens, budgets):
    """Compute a prompt in parts, each within the next budget; return the tokens that it reuses."""
    run = Run(Request(0, tokens, 0))
    with cache.add_sequence(tokens) as held:
        run.held = held
        reused = held.num_computed_tokens
        while held.num_computed_tokens < len(tokens):
            budget = next(budgets)
            count = parts.count(run, budget)
            assert 0 < count <= budget
            cache.commit(cache.prepare([held], count))
    cache.check_invariants()
    return reused


@pytest.mark.parametrize("recompute_last_block", [False, True])
@pytest.mark.parametrize("most", [1, 3, 20, 90, 400])
@pytest.mark.parametrize(("chunk", "block", "drafts"), [(64, 16, 0), (4, 2, 3), (6, 4, 0), (8, 16, 9), (1, 1, 2)])
def test_prompts_in_random_parts_leave_at_least_the_states_of_prompts_in_one(
    chunk, block, drafts, most, recompute_last_block
):
    """The oracle is a set of prefixes: each prompt keeps the last point before its end, and that of its branch."""
    random = np.random.default_rng(most)
    state = StateSpec(
        (Plane("temporal", (1,), "float32", per="sequence"),), chunk=chunk, interval=4 * chunk, draft_tokens=drafts
    )
    cache = PagedKVCache(
        [AttentionSpec(1, 8), state], block_size=block, num_blocks=9000, num_states=3000, max_sequences=2,
        max_tokens_per_sequence=1024, device="none", recompute_last_block=recompute_last_block,
    )  # fmt: skip
    unmatched = 1 + block * recompute_last_block
    grid, parts = math.lcm(chunk, block), choose_parts(cache, 2**20, None)
    budgets = iter(lambda: int(random.integers(1, most + 1)), 0)
    texts, kept, blocks = [np.arange(450)], set(), set()
    for number in range(12):
        base = texts[random.integers(len(texts))]
        cut, added = int(random.integers(0, len(base))), int(random.integers(1, 200))
        text = np.append(base[:cut], np.arange(number * 1000, number * 1000 + added))[:450]
        names = [text[:end].tobytes() for end in range(len(text) + 1)]
        last = max(0, len(text) - unmatched) // grid * grid
        matched = max(end for end in range(0, len(text), block) if not end or names[end] in blocks)
        matched = max(0, matched - block * recompute_last_block)
        found = max(end for end in range(0, matched + 1, grid) if not end or names[end] in kept)
        reused = serve_in_parts(cache, parts, text, budgets)
        assert reused >= found
        assert cache.match_length(text) >= last
        kept.update(names[end] for end in (last, matched // grid * grid) if end)
        blocks.update(names[block::block])
        texts.append(text)
    assert all(cache.match_length(text) >= max(0, len(text) - unmatched) // grid * grid for text in texts[1:])


def test_caches_without_states_or_without_reuse_are_computed_in_as_few_steps_as_possible():
    plain = Scheduler(make_cache([AttentionSpec(1, 8)]), max_tokens_per_step=65_536)
    assert parts_of(plain, np.arange(5000))[0] == [5000]
    unshared = make_cache(prefix_cache=False)
    assert choose_parts(unshared, 100, None) == PromptParts(100, 64, 0, short=1)
    assert parts_of(Scheduler(unshared, max_tokens_per_step=65_536), np.arange(5000))[0] == [5000]
    assert choose_parts(unshared, 100, 2) == PromptParts(100, 64, 2, short=1)


def test_bad_numbers_of_checkpoints_are_refused():
    for bad in (-1, 17, 1.5, "4", True):
        with pytest.raises(ShapeError, match="prompt_checkpoints"):
            Scheduler(make_cache(), prompt_checkpoints=bad)
    with pytest.raises(UnsupportedOption, match="prompt_checkpoints is 4, but the cache has no states"):
        Scheduler(make_cache([AttentionSpec(1, 8)]), prompt_checkpoints=4)
