"""The demo: every token is verified, and wrong tokens are found."""

import dataclasses

import numpy as np
import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import NotEnoughMemory, UnsupportedOption
from pagecore.serving.demo import DemoConfig, chat, chat_turns, demo
from pagecore.serving.demo.hybrid import HybridSizes
from pagecore.serving.demo.model import Model, ModelSizes
from pagecore.serving.demo.verify import Verdict, verify
from pagecore.serving.scheduling.request import Request, Run
from pagecore.serving.scheduling.reuse import POLICIES
from pagecore.serving.scheduling.scheduler import Scheduler
from pagecore.serving.tables import demo_rows

pytestmark = pytest.mark.slow

SMALL = ModelSizes(vocab_size=64, width=32, num_layers=2, head_dim=8, hidden_width=64)
SMALL_HYBRID = HybridSizes(
    vocab_size=64, width=32, num_layers=3, head_dim=8, hidden_width=64, key_dim=8, value_dim=8
)  # fmt: skip
FEW = DemoConfig(num_requests=7, model=SMALL)


def noted(config):
    """Return the report of a demo, and the runs of its requests."""
    asked = []

    class Noted(Scheduler):
        def add(self, request):
            run = super().add(request)
            asked.append(run)
            return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "Scheduler", Noted)
        return demo(config), {run.request.id: run for run in asked}


@pytest.fixture(scope="module")
def noted_demo():
    return noted(None)


@pytest.fixture(scope="module")
def report(noted_demo):
    return noted_demo[0]


def test_every_token_of_the_demo_is_verified(report):
    turns = chat_turns(DemoConfig())
    assert report.requests == len(turns) == 24
    assert report.sequences == sum(turn.samples for turn in turns)
    assert report.generated_tokens == sum(turn.samples * turn.max_new_tokens for turn in turns)
    assert report.verdict.tokens == report.generated_tokens
    assert report.verdict.passed
    assert report.verdict.ties <= 3


def test_the_demo_preempts_forks_and_copies_on_write(report):
    assert report.preemptions > 0
    assert report.forks == sum(turn.samples - 1 for turn in chat_turns(DemoConfig())) > 0
    assert report.copied_blocks > 0
    assert report.num_groups == 2
    assert report.utilization_peak > 0.9
    assert report.static_nbytes > 2 * report.nbytes


@pytest.mark.parametrize(("seed", "least"), [(0, 6), (3, 2)])
def test_follow_up_turns_reuse_their_own_history(noted_demo, seed, least):
    config = DemoConfig(seed=seed, model=SMALL if seed else ModelSizes())
    report, runs = noted(config) if seed else noted_demo
    turns = chat_turns(config)
    follow_ups = [turn for turn in turns if turn.after is not None]
    assert len(follow_ups) == report.follow_ups == 10
    beyond = 0
    for turn in follow_ups:
        before, now = runs[turn.after], runs[turn.number]
        history = before.tokens.tolist()
        assert len(history) == len(before.request.prompt) + before.request.max_new_tokens
        assert now.request.prompt.tolist() == history + turn.text.tolist()
        # All chats share the 24 tokens of the system prompt; the rest of the history belongs to this chat.
        beyond += now.num_reused_tokens > 24
    assert beyond >= least
    assert report.history_tokens == sum(len(runs[turn.after].tokens) for turn in follow_ups)
    assert report.history_hit_tokens == sum(runs[turn.number].num_reused_tokens for turn in follow_ups) > 24 * 6
    assert report.verdict.passed


def test_the_demo_reuses_recovers_and_evicts(report):
    assert report.prefix_query_tokens == report.prompt_tokens
    assert report.prefix_hit_tokens > report.history_hit_tokens
    assert report.evicted_blocks > 50
    assert report.saved_prefill_tokens == report.prefix_hit_tokens + report.recovered_tokens
    rows = dict(demo_rows(report))
    found = f"{report.history_hit_tokens:,} of {report.history_tokens:,} history tokens reused"
    assert rows["follow-up turns"] == f"{report.follow_ups}; {found}"
    assert rows["prefix hits"].startswith(f"{report.prefix_hit_tokens:,} of {report.prompt_tokens:,} prompt tokens")


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_every_token_is_verified_with_every_eviction_policy(policy):
    report = demo(DemoConfig(evict=policy, num_requests=10, model=SMALL))
    assert report.evict == policy
    assert report.evicted_blocks > 0
    assert report.prefix_hit_tokens > 0
    assert report.verdict.tokens == report.generated_tokens
    assert report.verdict.passed


def test_a_demo_without_reuse_has_no_rows_about_it():
    report = demo(dataclasses.replace(FEW, evict="none"))
    assert (report.prefix_hit_tokens, report.history_hit_tokens, report.evicted_blocks) == (0, 0, 0)
    assert report.verdict.passed
    assert not {"prefix hits", "follow-up turns", "evicted"} & dict(demo_rows(report)).keys()


def test_an_unknown_policy_is_refused():
    with pytest.raises(UnsupportedOption, match="evict is 'random'; use one of lru, "):
        DemoConfig(evict="random")


def test_verification_fails_when_a_reused_block_is_wrong(monkeypatch):
    """A follow-up turn gets a block with other values than those of its history."""
    add = PagedKVCache.add_sequence

    def careless(self, tokens, **options):
        sequence = add(self, tokens, **options)
        if sequence.num_cached_tokens > 24:
            table = self.block_table(0).numpy()[sequence.row]
            values = self.value(0).numpy()
            values[table[1]] = np.roll(values[table[1]], 1, axis=0)
        return sequence

    monkeypatch.setattr(PagedKVCache, "add_sequence", careless)
    assert not demo(DemoConfig(num_requests=14, model=SMALL)).verdict.passed


def test_every_token_is_verified_when_preempted_sequences_are_swapped(report):
    swapped = demo(DemoConfig(swap=True, num_requests=18, model=SMALL))
    assert swapped.swaps == swapped.preemptions > 0
    assert swapped.swap_nbytes == swapped.nbytes
    assert swapped.verdict.tokens == swapped.generated_tokens
    assert swapped.verdict.passed
    assert dict(demo_rows(swapped))["preemptions"] == f"{swapped.swaps}: {swapped.swaps} swapped out, 0 recomputed"
    assert "swap space" in dict(demo_rows(swapped))
    assert (report.swaps, report.swap_nbytes) == (0, 0)
    assert "swap space" not in dict(demo_rows(report))


def test_verification_fails_when_swap_in_corrupts_a_block(monkeypatch):
    swap_in = PagedKVCache.swap_in

    def spoilt(self, sequences):
        swap_in(self, sequences)
        for sequence in sequences:
            first = self.make_batch().group(0).block_table.numpy()[sequence.row, 0]
            self.value(0).numpy()[first] *= -1

    monkeypatch.setattr(PagedKVCache, "swap_in", spoilt)
    assert not demo(DemoConfig(swap=True, num_requests=18, model=SMALL)).verdict.passed


def test_the_demo_is_deterministic():
    timeless = {"serve_s": 0.0, "verify_s": 0.0}
    first, again = (dataclasses.replace(demo(FEW), **timeless) for _ in range(2))
    assert first == again


def test_progress_reaches_the_end_of_both_stages():
    seen = {}
    demo(FEW, lambda stage, done, total: seen.__setitem__(stage, (done, total)))
    assert seen.keys() == {"serve", "verify"}
    assert all(done == total for done, total in seen.values())


def zero_attention(attend):
    return lambda self, layer, query, batch, **options: np.zeros_like(query)


def without_window(attend):
    return lambda self, layer, query, batch, **options: attend(self, layer, query, batch, window=None)


def one_layer_shifted(attend):
    def wrong(self, layer, query, batch, **options):
        out = attend(self, layer, query, batch, **options)
        return np.roll(out, 1, axis=1) if layer == 1 else out

    return wrong


@pytest.mark.parametrize("broken", [zero_attention, without_window, one_layer_shifted])
def test_verification_fails_when_attention_is_broken(monkeypatch, broken):
    monkeypatch.setattr(PagedKVCache, "attend", broken(PagedKVCache.attend))
    verdict = demo(FEW).verdict
    assert not verdict.passed
    assert "dense attention chooses" in verdict.wrong[0]


def test_verification_fails_when_writes_are_wrong(monkeypatch):
    write = PagedKVCache.write

    def zeros_in_the_last_layer(self, layer, key, value, batch):
        write(self, layer, key, value * (layer < 1), batch)

    monkeypatch.setattr(PagedKVCache, "write", zeros_in_the_last_layer)
    assert not demo(FEW).verdict.passed


@pytest.fixture(scope="module")
def model():
    return Model(DemoConfig().model, 0, np.float64)


def finished_run(model, new=4, samples=1):
    """Return a finished run that took the best token each time."""
    request = Request(0, np.arange(10), new, samples)
    run = Run(request)
    verdict = Verdict()
    for _ in range(new):
        # The message of a failed check names the expected token.
        run.tokens = np.append(run.tokens, -1)
        verdict.wrong.clear()
        probe = Run(Request(0, request.prompt, len(run.tokens) - 10, samples))
        probe.tokens = run.tokens
        verdict = verify([probe], model, 0, 1.0)
        run.tokens[-1] = int(verdict.wrong[-1].rsplit(" ", 1)[1])
    return run


@pytest.mark.parametrize("samples", [1, 2])
def test_tokens_chosen_by_dense_attention_pass(model, samples):
    verdict = verify([finished_run(model, samples=samples)], model, 0, 1.0)
    assert verdict.passed
    assert (verdict.tokens, verdict.ties) == (4, 0)


def test_a_wrong_token_is_reported_by_position(model):
    run = finished_run(model)
    run.tokens[-1] = (run.tokens[-1] + 1) % 512
    verdict = verify([run], model, 0, 1.0)
    assert not verdict.passed
    assert "request 0, sample 0, position 13" in verdict.wrong[0]


def test_a_token_outside_the_vocabulary_is_wrong(model):
    run = finished_run(model)
    run.tokens[-1] = 512
    assert not verify([run], model, 0, 1.0).passed


def test_a_lost_token_is_wrong(model):
    run = finished_run(model)
    run.tokens = run.tokens[:-1]
    verdict = verify([run], model, 0, 1.0)
    assert "got 3 tokens, expected 4" in verdict.wrong[0]


def test_verification_of_no_tokens_does_not_pass(model):
    assert not verify([], model, 0, 1.0).passed


def test_scores_within_rounding_are_counted_as_ties(model, monkeypatch):
    run = finished_run(model, new=1)
    best = int(run.tokens[-1])
    run.tokens[-1] = (best + 1) % 512
    forward = model.logits

    def nearly_equal(hidden):
        logits = forward(hidden)
        logits[:, run.tokens[-1]] = logits[:, best] * (1 - 1e-6)
        return logits

    monkeypatch.setattr(model, "logits", nearly_equal)
    verdict = verify([run], model, 0, 1.0)
    assert verdict.passed
    assert verdict.ties == 1


@pytest.mark.parametrize(
    "config",
    [
        DemoConfig(host="64MiB", num_requests=14, model=SMALL),
        DemoConfig.hybrid(host="64MiB", num_requests=12, num_blocks=(60,), model=SMALL_HYBRID),
    ],
)
def test_evicted_chats_come_back_from_the_host(config):
    report = demo(config)
    assert report.verdict.passed
    assert report.host.num_promotions > 0
    assert report.host.num_promoted_tokens > 0
    assert ("host tier", dict(demo_rows(report))["host tier"]) in demo_rows(report)
    with pytest.raises(UnsupportedOption, match="evict is 'none'"):
        dataclasses.replace(config, evict="none")


def test_a_host_tier_without_room_names_its_option():
    with pytest.raises(NotEnoughMemory, match=r"^host: memory is 1 bytes"):
        demo(DemoConfig(host=1))
