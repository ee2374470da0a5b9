"""Drafts in the scheduler: outputs equal those without drafts, and drafts never cost a run its place."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagecore.serving.scheduling.request import State
from tests.faults import is_full
from tests.serving.drafted import DraftServer, some_right, some_trees
from tests.serving.served import add_random_requests, answer

WORK = st.tuples(
    st.integers(0, 2**32), st.sampled_from([None, 6, 40]), st.booleans(), st.sampled_from([5, 9, 30]), st.booleans(),
    st.booleans(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=600 if is_full() else 60, deadline=None)
@given(work=WORK)
def test_outputs_equal_those_without_drafts(work):
    seed, swap_blocks, prefix_cache, num_blocks, overlap, trees = work
    choice = random.Random(seed)

    def ends(number, token):
        return (token * 7 + number) % 9 == 0

    propose = some_trees(choice, 7) if trees else some_right(choice, choice.choice([1, 3, 9]))
    server = DraftServer(
        propose=propose, num_blocks=num_blocks, max_running=choice.randint(1, 5),
        max_tokens_per_step=choice.randint(2, 24), headroom=0.0, swap_blocks=swap_blocks, prefix_cache=prefix_cache,
        overlap=overlap, ends=ends if choice.random() < 0.5 else None, max_tree_tokens=20 if trees else 0,
        new_token_ratio=choice.choice([None, 0.5]),
    )  # fmt: skip
    requests = add_random_requests(server, choice, 15)

    def disturb():
        if choice.random() < 0.03:
            server.scheduler.cancel(choice.choice(list(server.runs.values())))
        server.scheduler.check_invariants()

    ended = server.drain(disturb)
    for one in requests:
        for sample in range(one.samples if one.max_new_tokens else 1):
            whole = answer(one, sample, server.ends or (lambda number, token: False))
            run = server.runs.get((one.id, sample))
            if run is None or run.state is State.CANCELLED:
                assert run is None or run.tokens.tolist() == whole[: len(run.tokens)]
            else:
                assert ended[one.id, sample] == whole
    server.check_empty()
