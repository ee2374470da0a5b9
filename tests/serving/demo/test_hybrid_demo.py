"""The demo of a hybrid model: every token is verified against the recurrence, and wrong states are found."""

import dataclasses

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.serving.demo import DemoConfig, chat_turns, demo, served
from pagecore.serving.demo.hybrid import HybridSizes
from pagecore.serving.tables import demo_rows
from tests.thinning import in_turn

pytestmark = pytest.mark.slow

SMALL = HybridSizes(vocab_size=64, width=32, num_layers=3, head_dim=8, hidden_width=64, key_dim=8, value_dim=8)
WHOLE = DemoConfig.hybrid(model=SMALL)
FEW = DemoConfig.hybrid(num_requests=6, model=SMALL)


@pytest.fixture(scope="module")
def report():
    return demo(WHOLE)


def test_every_token_of_the_hybrid_demo_is_verified(report):
    turns = chat_turns(WHOLE)
    assert report.requests == len(turns) == 24
    assert report.sequences == sum(turn.samples for turn in turns)
    assert report.verdict.tokens == report.generated_tokens == sum(turn.samples * turn.max_new_tokens for turn in turns)
    assert report.verdict.passed
    assert report.verdict.ties <= 3


def test_the_hybrid_demo_preempts_forks_and_reuses_states(report):
    assert report.preemptions > 0
    assert report.forks > 0
    assert report.num_groups == 1
    assert 0 < report.states.hits <= report.states.queries == report.requests
    assert report.states.checkpoints > report.requests
    assert report.prefix_hit_tokens > 0
    assert report.history_hit_tokens > 0
    assert report.evicted_blocks > 0
    assert report.states.evicted > 0


def test_the_table_of_the_hybrid_demo_reports_states(report):
    rows = dict(demo_rows(report))
    states = report.states
    assert rows["checked"].startswith(f"{report.verdict.tokens:,} tokens against recurrence and attention from scratch")
    assert states.num_states == WHOLE.num_states - 1
    assert rows["state slots"] == f"{states.num_states}, at most {states.peak} of them held"
    assert rows["state hits"] == f"{states.hits} of {states.queries} requests"
    assert rows["checkpoints"] == f"{states.checkpoints} kept, {states.evicted} evicted"


OPTIONS = [
    {"kinds": ("mamba2", "attention")},
    {"kinds": ("delta", "attention")},
    {"in_place": False},
    {"chunk": 32, "interval": 64},
    {"kinds": ("mamba2", "window", "delta", "attention")},
]


@pytest.mark.parametrize(("options", "swap"), in_turn(OPTIONS, over=[[True, False]]), ids=str)
def test_every_token_is_verified_with_other_layers_and_grids(options, swap):
    layers = len(options.get("kinds", SMALL.kinds))
    sizes = dataclasses.replace(SMALL, num_layers=layers, **options)
    config = DemoConfig.hybrid(num_requests=8, model=sizes, num_blocks=(75, 53)[: sizes.num_groups], swap=swap)
    report = demo(config)
    assert report.verdict.tokens == report.generated_tokens
    assert report.verdict.passed
    assert report.states.checkpoints > 0


def test_every_token_is_verified_when_states_are_swapped():
    report = demo(DemoConfig.hybrid(swap=True, num_requests=8, num_blocks=(44,), model=SMALL))
    assert report.swaps == report.preemptions > 0
    assert report.swap_nbytes == report.nbytes
    assert report.verdict.tokens == report.generated_tokens
    assert report.verdict.passed


def test_every_token_is_verified_without_reuse():
    report = demo(dataclasses.replace(FEW, evict="none"))
    assert report.verdict.passed
    assert (report.states.hits, report.prefix_hit_tokens) == (0, 0)


def test_the_hybrid_demo_is_deterministic():
    timeless = {"serve_s": 0.0, "verify_s": 0.0}
    first, again = (dataclasses.replace(demo(FEW), **timeless) for _ in range(2))
    assert first == again


def without_conv(slots, conv, temporal):
    conv[slots.write] = 0


def without_state(slots, conv, temporal):
    temporal[slots.write] = 0


def late_checkpoints(slots, conv, temporal):
    """A checkpoint gets the state at the end of the step."""
    kept = np.flatnonzero(slots.cuts)
    temporal[slots.checkpoint[kept]] = temporal[slots.write[kept]]


@pytest.mark.parametrize("broken", [without_conv, without_state, late_checkpoints])
def test_verification_fails_when_states_are_wrong(monkeypatch, broken):
    advance = served.advance

    def wrong(layer, inputs, conv, temporal, slots, chunk):
        output = advance(layer, inputs, conv, temporal, slots, chunk)
        broken(slots, conv, temporal)
        return output

    monkeypatch.setattr(served, "advance", wrong)
    verdict = demo(FEW).verdict
    assert not verdict.passed
    assert "the computation from scratch chooses" in verdict.wrong[0]


def test_verification_fails_when_a_cached_state_is_overwritten(monkeypatch):
    """A follow-up turn begins with a state that another sequence has changed."""
    add = PagedKVCache.add_sequence

    def careless(self, tokens, **options):
        sequence = add(self, tokens, **options)
        if sequence.num_cached_tokens:
            with np.errstate(invalid="ignore"):  # slots that were never written may be signalling NaNs
                self.plane("temporal", 0).numpy()[1:] *= 0.5
        return sequence

    monkeypatch.setattr(PagedKVCache, "add_sequence", careless)
    assert not demo(FEW).verdict.passed


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_states": None}, ShapeError, "num_states"),
        ({"num_states": 1}, ShapeError, "num_states is 1"),
        ({"num_blocks": (85, 53)}, ShapeError, "one number for each of the 1 groups"),
        ({"num_blocks": (85, 53), "model": DemoConfig().model}, UnsupportedOption, "the model has no states"),
    ],
)
def test_configurations_that_do_not_fit_the_model_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        DemoConfig.hybrid(**options)
