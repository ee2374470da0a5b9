"""Replay of conversations as turns of resumable requests: figures by hand, and sums over random conversations."""

import json
import random

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from pagecore.serving.replay import ReplayOptions, replay, replayer, turns
from pagecore.serving.replay.trace import TraceError, read_trace
from pagecore.serving.replay.trace_request import TraceUnits
from pagecore.serving.replay.trace_turns import find_turns
from pagecore.serving.tables import replay_rows
from tests.models.published import PUBLISHED

SMALL = {"blocks": 33, "block_size": 4, "hash_block": 8, "time_unit": "ms"}
# A millisecond a step, and no time for tokens.
TIMED = SMALL | {"prefill_rate": 1e12, "step_ms": 1}


def line(timestamp, tokens, answer, ids, chat=None, parent=None, **more):
    """Return a line with hash ids, and the ids of a conversation."""
    one = {"timestamp": timestamp, "input_length": tokens, "output_length": answer, "hash_ids": ids}
    return one | ({"chat_id": chat, "parent_chat_id": parent} if chat is not None else {}) | more


# Prompts of 10, 10 + 3 + 5 and 18 + 2 + 4 tokens.
CHAT = [
    line(0, 10, 3, [1, 2], 50, -1),
    line(1000, 18, 2, [1, 3, 4], 51, 50),
    line(2000, 24, 1, [1, 3, 5], 52, 51),
]


def earlier_of(lines, turns="ids", units=SMALL):
    found = find_turns(read_trace(lines, units=TraceUnits(units["hash_block"], "ms")), turns, "of a test")
    return found.earlier, found.num_unlike


def random_conversations(seed, count):
    """Return requests at intervals of 10 ms; about seven in ten continue an earlier one."""
    choice, lines, chats = random.Random(seed), [], []
    for number in range(count):
        if chats and choice.random() < 0.7:
            parent, length, ids = chats.pop(choice.randrange(len(chats)))
        else:
            parent, length, ids = -1, 0, [100 * number]
        length += choice.randint(1, 30)
        ids = [*ids[: max(length // 8, 1)], *(100 * number + 1 + i for i in range(20))][: -(-length // 8)]
        answer = choice.randint(0, 6)
        lines.append(line(10 * number, length, answer, ids, number, parent))
        chats.append((number, length + answer, ids))
    return lines


def test_a_turn_computes_its_new_tokens_and_the_last_one_before_them():
    report = replay(CHAT, ReplayOptions(**TIMED, turns="ids"))
    turns = report.turns
    assert (report.requests_total, report.requests_finished) == (3, 3)
    assert (report.prompt_tokens, report.generated_tokens) == (10 + 18 + 24, 6)
    assert report.computed_tokens == (10 + 2) + (6 + 1) + 5
    assert (turns.conversations, turns.turns, turns.turns_separate) == (1, 2, 0)
    assert (turns.prompt_tokens, turns.kept_tokens, turns.found_tokens) == (18 + 24, 12 + 19, 0)
    assert turns.computed_tokens == 6 + 5
    assert (turns.reclaimed, turns.idle_runs_peak, turns.idle_blocks_peak) == (0, 0, 0), "no step runs between them"
    assert (report.prefix_query_tokens, report.recovered_tokens) == (10, 0)


def test_separate_requests_compute_the_answers_again():
    report = replay(CHAT, ReplayOptions(**SMALL))
    assert report.turns is None
    assert report.computed_tokens == (10 + 2) + (18 - 8 + 1) + (24 - 16)


@pytest.mark.parametrize("attend", [False, True])
def test_idle_runs_hold_their_blocks_until_the_next_turn_arrives(attend):
    """Another request decodes meanwhile: 100 ms a step, and no time for tokens."""
    other = [line(0, 8, 30, [7], 90, -1)]
    lines = sorted([*CHAT, *other], key=lambda one: one["timestamp"])
    options = SMALL | {"prefill_rate": 1e12, "step_ms": 100, "attend": attend}
    report = replay(lines, ReplayOptions(**options, turns="ids"))
    turns = report.turns
    # Steps 1 to 3 compute the first turn; it is idle in steps 4 to 10, with 12 tokens in 3 blocks. Steps 11 and 12 are
    # the second turn, which leaves 19 tokens in 5 blocks until step 20. Step 21 is the third.
    assert report.steps == 30
    assert (turns.idle_runs_peak, turns.idle_blocks_peak) == (1, 5)
    assert turns.idle_runs_mean == pytest.approx((7 + 8) / 30)
    assert turns.idle_blocks_mean == pytest.approx((7 * 3 + 8 * 5) / 30)
    assert turns.kept_tokens == 12 + 19
    assert report.clock.first_token_s["max"] == pytest.approx(0.1, rel=0.01), "each turn arrives by its timestamp"
    assert report.passed


def test_a_turn_that_arrives_early_waits_for_the_end_of_the_one_before():
    lines = [CHAT[0], CHAT[1] | {"timestamp": 50}]
    report = replay(lines, ReplayOptions(**SMALL, prefill_rate=1e12, step_ms=100, turns="ids"))
    assert report.clock.duration_s == pytest.approx(0.5)
    assert report.clock.first_token_s["mean"] == pytest.approx(0.1), "measured from the end of the turn before"
    assert report.turns.turns == 1


def test_idle_runs_have_rows_of_their_own():
    lines = [CHAT[0], line(500, 8, 3, [7], 90, -1), CHAT[1]]
    report = replay(lines, ReplayOptions(**SMALL, max_running=1, prefill_rate=1e12, step_ms=100, turns="ids"))
    assert (report.turns.reclaimed, report.turns.kept_tokens) == (0, 12)


@pytest.mark.parametrize(("swap", "kept", "found"), [(None, 0, 8), ("64MiB", 12, 0)])
def test_a_run_that_gave_its_blocks_up_finds_its_prefix_or_comes_back_from_the_swap_space(swap, kept, found):
    """Of 8 blocks the idle run holds 3; another request takes 6, so that the prefix cache keeps 2 of the 3."""
    lines = [CHAT[0], line(500, 20, 3, [7, 8, 9], 90, -1), CHAT[1]]
    options = SMALL | {"blocks": 9, "prefill_rate": 1e12, "step_ms": 100, "swap_memory": swap}
    report = replay(lines, ReplayOptions(**options, turns="ids"))
    assert report.turns.reclaimed == 1
    assert (report.turns.kept_tokens, report.turns.found_tokens, report.recovered_tokens) == (kept, found, found)


WINDOWS = PUBLISHED["gemma-2-9b"] | {"sliding_window": 8}


MAMBA = {
    "model_type": "mamba2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "conv_kernel": 4,
    "expand": 2,
    "vocab_size": 100,
    "torch_dtype": "float16",
}


class IdleBlocks:
    """A watcher that counts the blocks of all idle runs in each step: those from `held_from` on."""

    def __init__(self):
        self.counts, self.runs = [], []

    def __call__(self, scheduler, _metrics):
        cache, blocks = scheduler.cache, 0
        for run in scheduler.idle:
            one = cache.sequences.get(run)
            if one is not None and not one.is_swapped:
                begins = [cache.held_from(one, group) // cache.block_size for group in range(cache.num_groups)]
                blocks += sum(-(-one.capacity // cache.block_size) - begin for begin in begins)
        self.counts.append(blocks)
        self.runs.append(len(scheduler.idle))


@pytest.mark.parametrize("more", [{}, {"swap_memory": "1MiB"}, {"model": WINDOWS}])
@pytest.mark.parametrize("blocks", [40, 400])
def test_idle_figures_are_those_of_all_idle_runs(more, blocks):
    lines = random_conversations(7, 60)
    watcher = IdleBlocks()
    options = SMALL | {"blocks": blocks, "prefill_rate": 1e5, "step_ms": 2, "max_running": 8} | more
    turns = replay(lines, ReplayOptions(**options, turns="ids"), watchers=[watcher]).turns
    assert turns.idle_runs_peak == max(watcher.runs) > 5
    assert turns.idle_blocks_peak == max(watcher.counts) > 0
    assert turns.idle_runs_mean == pytest.approx(sum(watcher.runs) / len(watcher.runs))
    assert turns.idle_blocks_mean == pytest.approx(sum(watcher.counts) / len(watcher.counts))
    assert (turns.reclaimed > 0) == (blocks == 40)


def test_idle_runs_of_a_model_with_states_alone_hold_no_blocks():
    lines = [CHAT[0], line(0, 8, 30, [7], 90, -1), CHAT[1] | {"timestamp": 10}]
    options = {name: value for name, value in TIMED.items() if name != "blocks"} | {"model": MAMBA, "memory": "8MiB"}
    turns = replay(lines, ReplayOptions(**options, turns="ids")).turns
    assert (turns.turns, turns.idle_runs_peak, turns.idle_blocks_peak) == (1, 1, 0)


@pytest.mark.parametrize(
    ("lines", "earlier", "unlike"),
    [
        (CHAT, {1: 0, 2: 1}, 0),
        ([CHAT[0], CHAT[1], CHAT[1] | {"chat_id": 60}], {1: 0}, 1),  # a second answer to one turn
        ([CHAT[0], CHAT[1] | {"input_length": 13, "hash_ids": [1, 3]}], {}, 1),  # no new tokens
        ([CHAT[0], CHAT[1] | {"input_length": 14, "hash_ids": [1, 3]}], {1: 0}, 0),
        ([CHAT[0], CHAT[1] | {"hash_ids": [4, 3, 2]}], {}, 1),  # another beginning
        ([CHAT[0], CHAT[1] | {"parent_chat_id": 99}], {}, 0),  # a conversation that began before the trace
        ([CHAT[0], CHAT[1] | {"parent_chat_id": None}], {}, 0),
    ],
)
def test_ids_name_the_turn_before(lines, earlier, unlike):
    assert earlier_of(lines) == (earlier, unlike)
    report = replay(lines, ReplayOptions(**TIMED, turns="ids"))
    assert (report.turns.turns, report.turns.turns_separate) == (len(earlier), unlike)
    assert report.requests_finished == len(lines)


def test_equal_chat_ids_are_one_conversation_without_a_field_for_the_turn_before():
    lines = [
        {name: value for name, value in one.items() if name != "parent_chat_id"} | {"chat_id": "a"} for one in CHAT
    ]
    assert earlier_of(lines) == ({1: 0, 2: 1}, 0)
    assert earlier_of([one | {"chat_id": "ab"[i % 2]} for i, one in enumerate(lines)]) == ({2: 0}, 0)


def test_prompts_with_two_whole_blocks_of_hash_ids_are_found_in_later_prompts():
    assert earlier_of(CHAT, "prompts") == ({2: 1}, 0), "the first prompt has one whole block"
    longer = line(2000, 40, 2, [1, 3, 5, 6, 7])
    assert earlier_of([CHAT[1], CHAT[2], longer], "prompts") == ({1: 0, 2: 1}, 0)
    assert earlier_of([longer, CHAT[1] | {"timestamp": 2000}], "prompts") == ({}, 0)


def test_a_prompt_that_cannot_continue_the_longest_earlier_one_continues_the_next():
    short, long = line(0, 16, 2, [1, 2]), line(10, 24, 9, [1, 2, 3])
    assert earlier_of([short, long, line(20, 30, 1, [1, 2, 3, 4])], "prompts") == ({1: 0}, 1), "both are too long"
    apart = long | {"input_length": 24, "hash_ids": [1, 2, 8]}
    lines = [long, short | {"timestamp": 10}, line(20, 30, 1, [1, 2, 3, 4])]
    assert earlier_of(lines, "prompts") == ({2: 1}, 0), "no token after the answer of the longest"
    lines = [long, short | {"timestamp": 10}, line(20, 40, 1, [1, 2, 3, 4, 5]), line(30, 40, 1, [1, 2, 3, 6, 7])]
    assert earlier_of(lines, "prompts") == ({2: 0, 3: 1}, 0), "another request has continued the longest"
    assert earlier_of([*lines, line(40, 40, 1, [1, 2, 3, 8, 9])], "prompts") == ({2: 0, 3: 1}, 1)
    assert earlier_of([apart, short | {"timestamp": 10}, lines[2]], "prompts") == ({2: 1}, 0)
    ids = list(range(60))
    tokens = [{"token_ids": ids[:n], "output_length": answer} for n, answer in ((33, 9), (20, 2), (35, 1))]
    assert earlier_of(tokens, "prompts") == ({2: 1}, 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 40])
def test_prompts_of_token_ids_are_found_to_the_last_token(length):
    ids = np.arange(100)

    def one(tokens, answer=2, **more):
        return {"token_ids": list(map(int, tokens)), "output_length": answer} | more

    first = one(ids[:length])
    assert earlier_of([first, one(ids[: length + 3])], "prompts") == ({1: 0}, 0)
    assert earlier_of([first, one(ids[: length + 2])], "prompts") == ({}, 1), "no token after the answer"
    other = ids[: length + 20].copy()
    other[length - 1] = 999
    assert earlier_of([first, one(other)], "prompts") == ({}, 0)
    assert earlier_of([first | {"namespace": "a"}, one(ids[: length + 9])], "prompts") == ({}, 0)
    assert earlier_of([first, one(ids[: length + 3]), one(ids[: length + 30])], "prompts") == ({1: 0, 2: 1}, 0)


def test_a_turn_that_the_cache_cannot_hold_is_refused_and_later_ones_are_separate():
    """The second turn needs 30 + 8 - 1 slots of 32; the third one, which is refused too, is a request of its own."""
    second = line(1000, 30, 8, [1, 3, 4, 5], 51, 50)
    third = line(2000, 39, 1, [1, 3, 4, 5, 6], 52, 51)
    lines = [CHAT[0], second, third, line(3000, 20, 1, [9, 8, 7], 70, -1)]
    report = replay(lines, ReplayOptions(**TIMED | {"blocks": 9}, turns="ids"))
    assert (report.requests_total, report.requests_finished, report.requests_refused) == (4, 2, 2)
    assert report.first_refusal.startswith("line 2: request 1 needs 37 slots")
    assert (report.turns.turns, report.turns.turns_separate) == (0, 1)


def test_turns_after_a_refused_one_are_refused_although_the_queue_is_full():
    """The second and the third turn wait for the first one; another request fills the queue until this one ends."""
    second = line(10, 30, 8, [1, 3, 4, 5], 51, 50)
    third, fourth = line(20, 39, 1, [1, 3, 4, 5, 6], 52, 51), line(21, 41, 1, [1, 3, 4, 5, 6, 7], 53, 52)
    lines = [CHAT[0], line(1, 8, 3, [7], 90, -1), second, third, fourth]
    assert earlier_of(lines) == ({2: 0, 3: 2, 4: 3}, 0)
    options = SMALL | {"blocks": 9, "prefill_rate": 1e12, "step_ms": 100, "max_queued": 1, "max_running": 1}
    report = replay(lines, ReplayOptions(**options, turns="ids"))
    assert (report.requests_rejected, report.requests_refused, report.requests_finished) == (0, 3, 2)
    assert report.turns.turns == 0


def test_turns_that_wait_for_their_run_delay_no_other_request():
    """A separate request arrives after 40 turns of one conversation: it is admitted then, and not before."""
    turns = [line(0, 8 * (n + 1) + 2, 2, [*range(n + 1), 99], n, n - 1) for n in range(40)]
    seen = []

    def watch(scheduler, _metrics):
        seen.append({run.request.id for run in scheduler.running})

    options = ReplayOptions(**TIMED | {"blocks": 300, "max_running": 2, "max_tokens_per_step": 64}, turns="ids")
    report = replay([*turns, line(5, 8, 3, [700], 70, -1)], options, watchers=[watch])
    assert report.turns.turns == 39
    assert [number for number, running in enumerate(seen) if 40 in running][:3] == [5, 6, 7]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("most", [1, 5, 4096])
def test_turns_that_arrive_at_once_are_read_up_to_a_limit(most, tokens, monkeypatch):
    """6 conversations of 20 turns, one turn of each after the other: 114 wait for the first ones."""
    monkeypatch.setattr(turns, "WAITING_MAX", most)
    lines = [
        line(0, 8 * (turn + 1) + 2, 2, [*(1000 * chat + i for i in range(turn + 1)), 99], 100 * chat + turn, parent)
        for turn in range(20)
        for chat in range(6)
        for parent in [100 * chat + turn - 1 if turn else -1]
    ]
    if tokens:
        lines = [one | {"token_ids": [one["chat_id"] // 100] * one["input_length"]} for one in lines]
    made, waiting, held = [], [], []

    class Watched(turns.ReplayTurns):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(replayer, "ReplayTurns", Watched)

    def watch(_scheduler, _metrics):
        pairs = [pair for some in made[0]._coming.values() for pair in some]
        waiting.append(len(pairs))
        held.append(max((len(new) for _, new in pairs), default=0))
        assert all(len(one.prompt()) == one.input_length and one.token_ids is None for one, _ in pairs)

    options = TIMED | {"blocks": 400, "max_running": 8}
    report = replay(lines, ReplayOptions(**options, turns="ids"), watchers=[watch])
    assert (report.requests_finished, report.turns.turns) == (120, 114)
    assert max(waiting) == min(most, 114)
    assert max(held) == 6, "the tokens after the answer before"


def test_the_turns_of_a_rejected_request_are_separate():
    lines = [
        line(0, 8, 40, [7], 90, -1),
        line(1, 8, 5, [8], 91, -1),
        CHAT[0] | {"timestamp": 2},
        CHAT[1] | {"timestamp": 9000},
    ]
    options = ReplayOptions(**SMALL, prefill_rate=1e12, step_ms=100, max_queued=1, max_running=1, turns="ids")
    report = replay(lines, options)
    assert (report.requests_rejected, report.requests_finished) == (1, 3)
    assert (report.turns.turns, report.turns.turns_separate) == (0, 1)


def test_prompts_alone_are_replayed_as_turns_too():
    report = replay(CHAT, ReplayOptions(**TIMED, prefill_only=True, turns="ids"))
    assert (report.computed_tokens, report.turns.kept_tokens) == (24, 10 + 18)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("options", [{}, {"max_tokens_per_step": 16}, {"prefill_rate": 1000.0, "step_ms": 5.0}])
def test_random_conversations_compute_each_token_once_if_nothing_is_given_up(options, policy):
    lines = random_conversations(7, 60)
    earlier, _ = earlier_of(lines)
    assert len(earlier) > 20
    progress = []
    report = replay(
        lines, ReplayOptions(**TIMED | {"blocks": 3000, "policy": policy, "attend": True} | options, turns="ids"),
        lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    wanted = 0
    for number, one in enumerate(lines):
        slots = one["input_length"] + max(one["output_length"] - 1, 0)
        before = lines[earlier[number]] if number in earlier else None
        kept = 0 if before is None else before["input_length"] + max(before["output_length"] - 1, 0)
        wanted += slots - kept
    assert report.turns.reclaimed == report.turns.found_tokens == 0
    assert report.computed_tokens + report.prefix_hit_tokens == wanted
    assert (report.turns.turns, report.requests_finished) == (len(earlier), 60)
    assert progress[-1][0] == progress[-1][1]
    assert report.passed
    assert report.rows_checked > 0


@pytest.mark.parametrize(
    ("trace", "options", "message"),
    [
        (CHAT, {"turns": "chat"}, "turns is 'chat'; expected 'ids' or 'prompts'"),
        (CHAT, {"turns": True}, "turns is True"),
        ("-", {"turns": "ids"}, "turns is 'ids', but trace - is the standard input"),
        ([line(0, 10, 3, [1, 2])], {"turns": "ids"}, "no request of trace of 1 record has a chat_id; use 'prompts'"),
    ],
)
def test_turns_that_cannot_be_found_are_refused(trace, options, message):
    with pytest.raises(UnsupportedOption, match=message):
        replay(trace, ReplayOptions(**TIMED, **options))


@pytest.mark.parametrize("turns", ["ids", "prompts"])
def test_turns_without_a_clock_are_refused(turns):
    message = f"turns is '{turns}', but a replay without prefill_rate has no clock; give prefill_rate, too"
    with pytest.raises(UnsupportedOption, match=message):
        ReplayOptions(**SMALL, turns=turns)


def test_lengths_alone_have_no_turns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,3\n1,20,3\n")
    with pytest.raises(UnsupportedOption, match="has hash ids or token ids; leave turns out"):
        replay(path, ReplayOptions(blocks=33, turns="prompts", prefill_rate=1000))


@pytest.mark.parametrize("name", ["chat_id", "parent_chat_id"])
@pytest.mark.parametrize("value", [1.5, True, [1]])
def test_ids_of_conversations_are_integers_or_strings(name, value):
    with pytest.raises(TraceError, match=f"{name} is .*expected an integer or a string"):
        list(read_trace([CHAT[0] | {name: value}], units=TraceUnits(8)))


def test_the_table_and_the_json_have_the_turns(tmp_path):
    report = replay(CHAT, ReplayOptions(**TIMED, turns="ids"))
    rows = dict(replay_rows(report))
    assert rows["turns"] == "2 of 1 conversations; 0 as separate requests"
    assert rows["tokens of turns"] == "42, 73.8% of them reused: 31 kept, 0 found again"
    assert "given up 0 times" in rows["idle"]
    assert json.loads(json.dumps(report.as_json()))["turns"]["kept_tokens"] == 31
