"""Parts of prompts: where the steps of a prompt end in a cache with states, and what that lets others reuse."""

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving import Request, Scheduler
from pagecore.serving.scheduling.parts import PromptParts, choose_parts

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
    assert parts_of(Scheduler(make_cache(), max_tokens_per_step=50), np.arange(100))[0] == [50, 100]


def test_a_prompt_that_does_not_fit_a_step_has_states_although_others_take_a_part_of_it():
    cache = make_cache()
    scheduler = Scheduler(cache, max_tokens_per_step=1000)
    scheduler.add(Request("short", np.arange(9000, 9123), 0))
    run = scheduler.add(Request("long", np.arange(1800), 0))
    step = scheduler.schedule()
    assert step.counts == [123, 832]  # 877 tokens are left, which would end off the grid
    scheduler.commit(step)
    assert cache.checkpoint(run.sequence)[1] == 832


def test_caches_without_states_or_without_reuse_are_computed_in_as_few_steps_as_possible():
    plain = Scheduler(make_cache([AttentionSpec(1, 8)]), max_tokens_per_step=65_536)
    assert parts_of(plain, np.arange(5000))[0] == [5000]
    unshared = make_cache(prefix_cache=False)
    assert choose_parts(unshared, 100, None) == PromptParts(100, 64, 0)
    assert parts_of(Scheduler(unshared, max_tokens_per_step=65_536), np.arange(5000))[0] == [5000]
    assert choose_parts(unshared, 100, 2) == PromptParts(100, 64, 2)


def test_bad_numbers_of_checkpoints_are_refused():
    for bad in (-1, 17, 1.5, "4", True):
        with pytest.raises(ShapeError, match="prompt_checkpoints"):
            Scheduler(make_cache(), prompt_checkpoints=bad)
    with pytest.raises(UnsupportedOption, match="prompt_checkpoints is 4, but the cache has no states"):
        Scheduler(make_cache([AttentionSpec(1, 8)]), prompt_checkpoints=4)
