"""Requests with images and with priorities of their blocks: the scheduler passes both to the cache."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagecore import AttentionSpec, EmbeddingCache, PagedKVCache, ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.serving import DraftTree, Request, RequestError, Scheduler
from pagecore.serving.scheduling.parts import PromptParts

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


def ends_of(scheduler, *requests):
    """Serve requests that arrive together; return where the steps of each prompt end."""
    ends = {scheduler.add(request): [] for request in requests}
    while (step := scheduler.schedule()) is not None:
        parts = step.runs[step.num_decodes :]
        assert parts == [run for run in scheduler.running if run.prefilling][: len(parts)]  # no prompt passes another
        for run, count in zip(step.runs, step.counts, strict=True):
            if run.prefilling:
                ends[run].append(run.sequence.num_computed_tokens + count)
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
        scheduler.cache.check_invariants()
        scheduler.check_invariants()
    return list(ends.values())


def wholes(num_blocks=200, spec=None, **options):
    cache = PagedKVCache(spec or AttentionSpec(1, 8), num_blocks=num_blocks, block_size=16, device="none")
    return Scheduler(cache, whole_spans=True, **options)


@pytest.mark.parametrize(
    ("spans", "budget", "ends"),
    [
        ([(400, 1200, 1)], 1024, [400, 1200]),  # as in vLLM's test of disable_chunked_mm_input
        ([(0, 600, 1), (600, 1200, 2)], 1024, [600, 1200]),
        ([(0, 600, 1), (600, 1024, 2), (1024, 1025, 3)], 1024, [1024, 1200]),
        ([(100, 5000, 1)], 1100, [100, 1200]),  # the span continues in the answer
        ([(300, 400, 1), (700, 710, 2)], 350, [300, 650, 1000, 1200]),
    ],
)
def test_parts_of_prompts_end_outside_of_whole_spans(spans, budget, ends):
    request = Request(0, np.zeros(1200, np.int32), 1, spans=spans)
    assert ends_of(wholes(max_tokens_per_step=budget), request) == [ends]


def test_a_span_waits_for_a_step_with_room_and_nothing_passes_it():
    scheduler = wholes(max_tokens_per_step=100)
    lengths, spans, counts = (30, 150, 40), [(50, 150, b"cat")], []
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, np.full(length, number), 3, spans=spans if number == 1 else None))
    while (step := scheduler.schedule()) is not None:
        counts.append(step.counts)
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
    assert counts == [[30, 50, 20], [1], [1], [100], [1, 20], [1, 1], [1]]


def test_admissions_end_with_a_run_that_has_no_tokens_in_the_step(monkeypatch):
    counted, count = set(), PromptParts.count

    def count_once(parts, run, budget, load):
        """Leave the third run without tokens when it is counted again, as if it had lost its cached prefix since."""
        is_again = run in counted
        counted.add(run)
        return 0 if is_again and run.request.id == 2 and run not in later else count(parts, run, budget, load)

    monkeypatch.setattr(PromptParts, "count", count_once)
    scheduler, later = wholes(), set()
    for number in range(5):
        scheduler.add(Request(number, np.full(30, number), 2))
    step = scheduler.schedule()
    assert [run.request.id for run in step.runs] == [0, 1]
    assert [run.request.id for run in scheduler.running] == [0, 1, 2]
    scheduler.commit(step)
    scheduler.accept(step, [5, 5])
    later.update(scheduler.running)
    assert [run.request.id for run in scheduler.schedule().runs] == [0, 1, 2, 3, 4]


def test_a_reused_prefix_may_end_inside_a_span():
    scheduler = wholes(max_tokens_per_step=100)
    prompt = np.arange(140)
    spans = [(10, 100, b"cat")]
    assert ends_of(scheduler, Request(0, prompt, 1, spans=spans)) == [[100, 140]]
    assert scheduler.cache.evict_prefix(prompt, keep=50, spans=spans) == 4
    run = scheduler.add(Request(1, prompt, 1, spans=spans, max_reused_tokens=50))
    step = scheduler.schedule()
    assert (run.num_reused_tokens, step.counts) == (48, [92])


def test_windows_that_are_short_do_not_cut_a_span():
    spec = [AttentionSpec(1, 8), AttentionSpec(1, 8, window=16)]
    scheduler = wholes([200, 8], spec, max_tokens_per_step=400)
    assert scheduler.cache.max_step_tokens == 82
    prompts = [np.full(400, i, np.int32) for i in range(3)]
    spans = [[(start, start + 80, 1) for start in (3, 101, 250)], None, [(318, 400, 2)]]
    requests = [Request(i, prompt, 2, spans=each) for i, (prompt, each) in enumerate(zip(prompts, spans, strict=True))]
    for ends, each in zip(ends_of(scheduler, *requests), spans, strict=True):
        assert not any(first < end < last for end in ends for first, last, _ in each or ())
    with pytest.raises(RequestError, match="span of 83 tokens, which one step must compute; a step computes 82 tokens"):
        scheduler.add(Request(4, prompts[0], 1, spans=[(0, 83, 1), (390, 500, 2)]))
    assert not scheduler.waiting


@pytest.mark.parametrize(
    ("held", "counts"),
    [
        (11, [[30, 80], [80, 64]]),
        (15, [[30, 80], [80]]),
    ],
)
def test_no_prompt_passes_a_span_while_windows_are_short(held, counts):
    scheduler = wholes([200, 24], [AttentionSpec(1, 8), AttentionSpec(1, 8, window=16)], chunked_prefill_size=80)
    for number, spans in enumerate([[(30, 110, b"cat")], None]):
        scheduler.add(Request(number, np.full(150, number), 2, spans=spans))
    found = []
    while (step := scheduler.schedule()) is not None:
        found.append(step.counts)
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
        if len(found) == 1:
            other = scheduler.cache.prepare([scheduler.cache.add_sequence(np.full(16 * held, 7))], 16 * held)
    assert found[:2] == counts
    scheduler.cache.abandon(other)


def test_prompts_after_one_whose_span_waits_have_no_part():
    def prompt(spans):
        request = SimpleNamespace(spans=spans, prompt=range(60))
        return SimpleNamespace(num_tokens_left=60, request=request, sequence=SimpleNamespace(num_computed_tokens=0))

    prompts = [prompt(None), prompt([(0, 50, b"cat")]), prompt(None)]
    assert PromptParts(100, whole_spans=True).cut(prompts, [20, 20, 20]) == [20, 0, 0]


@pytest.mark.parametrize(
    ("first", "length", "counts"),
    [
        (0, 4, [[4], [1, 60, 20], [4]]),
        (5, 4, [[4], [4, 5, 8], [1, 55, 12], [4]]),
        (0, 60, [[60], [4], [4], [4]]),  # four blocks of seven: the request with the span waits for blocks
    ],
)
def test_a_step_has_no_trees_if_their_rows_are_too_short_for_a_span(first, length, counts):
    scheduler = wholes(8, max_tokens_per_step=512, max_tree_tokens=8)
    scheduler.add(Request(0, np.zeros(length, np.int32), 50))
    found = []
    while len(found) < len(counts):
        step = scheduler.schedule(DraftTree([-1, -1, 0]))
        found.append(step.counts)
        scheduler.commit(step, accepted_path=[[0]] * len(step.outputs) if step.parents else None)
        scheduler.accept(step, [[5]] * len(step.outputs))
        scheduler.check_invariants()
        if len(found) == 1:
            scheduler.add(Request(1, np.full(60, 1), 1, spans=[(first, first + 50, b"cat")]))
            scheduler.add(Request(2, np.full(20, 2), 1))
    assert found == counts


@pytest.mark.parametrize("seed", range(6))
def test_whole_spans_hold_in_random_schedules(seed):
    random = np.random.default_rng(seed)
    options = ({"max_encoder_tokens": 50}, {"max_prefill_tokens": 60}, {"chunked_prefill_size": 50})[seed % 3]
    scheduler = wholes(40, max_tokens_per_step=64, max_running=5, policy=("fcfs", "lpm")[seed % 2], **options)
    requests = []
    for number in range(25):
        length = int(random.integers(1, 200))
        edges = np.unique(random.integers(0, 220, int(random.integers(0, 12)))).tolist()
        spans = [(start, end, start % 3) for start, end in zip(edges[::2], edges[1::2], strict=False)]
        requests.append(Request(number, random.integers(0, 2, length), int(random.integers(1, 30)), spans=spans))
    served = []
    for each in requests:
        lengths = [last - first for first, last, _ in each.spans if first < len(each.prompt)]
        served += [each] if max(lengths, default=0) <= 50 else []
    assert len(served) > 15
    for request, ends in zip(served, ends_of(scheduler, *served), strict=True):
        length = len(request.prompt)
        assert not any(first < end < min(last, length) for end in ends for first, last, _ in request.spans)


def test_a_step_computes_encoder_outputs_within_their_budget():
    embeddings = EmbeddingCache("1MiB")
    scheduler = make(max_encoder_tokens=20, embeddings=embeddings)
    prompts = np.arange(3 * 24).reshape(3, 24)
    spans = [[(2, 12, b"cat"), (12, 20, b"dog")], [(0, 10, b"cat"), (20, 24, b"owl")], None]
    for number, each in enumerate(spans):
        scheduler.add(Request(number, prompts[number], 1, spans=each))
    counts, encoded = [], []
    while (step := scheduler.schedule()) is not None:
        counts.append(step.counts)
        encoded.append(step.encoder_spans)
        for *_, digest in step.encoder_spans:
            embeddings.put(digest, np.zeros(8))
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
    assert counts == [[24, 20, 24], [4]]
    assert encoded == [[(0, 2, 12, b"cat"), (0, 12, 20, b"dog")], [(0, 20, 24, b"owl")]]


def test_without_kept_outputs_each_part_of_a_span_counts():
    scheduler = make(max_encoder_tokens=10, chunked_prefill_size=8)
    scheduler.add(Request(0, np.zeros(24, np.int32), 1, spans=[(4, 14, b"cat"), (14, 20, b"dog")]))
    scheduler.add(Request(1, np.ones(24, np.int32), 1, spans=[(4, 14, b"cat")]))
    counts, encoded = [], []
    while (step := scheduler.schedule()) is not None:
        counts.append(step.counts)
        encoded.append([digest for *_, digest in step.encoder_spans])
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
    assert counts == [[8, 8], [6, 8], [8, 8], [2]]
    assert encoded == [[b"cat"], [b"cat"], [b"dog"], []]


@pytest.mark.parametrize(
    ("budget", "first", "others", "counts", "encoded"),
    [
        (None, (10, 30, b"cat"), [(0, 20, b"cat")], [12, 24], [(0, 10, 30, b"cat")]),  # an encoder makes all of it
        (21, (10, 30, b"cat"), [(0, 19, b"dog")], [12], [(0, 10, 30, b"cat")]),
        (21, (2, 7, b"cat"), [(0, 20, b"cat")], [12, 24], [(1, 0, 20, b"cat")]),  # the longest of a digest
        (21, (2, 7, b"cat"), [(0, 10, b"cat"), (10, 22, b"dog")], [12, 10], [(1, 0, 10, b"cat")]),
    ],
)
def test_encoder_outputs_count_and_are_listed_whole(budget, first, others, counts, encoded):
    scheduler = make(max_encoder_tokens=budget)
    scheduler.add(Request(0, np.zeros(12, np.int32), 1, spans=[first]))
    scheduler.add(Request(1, np.ones(24, np.int32), 1, spans=others))
    step = scheduler.schedule()
    assert step.counts == counts
    assert step.encoder_spans == encoded


def test_spans_after_a_prompt_need_no_encoder():
    scheduler = make(max_encoder_tokens=5, chunked_prefill_size=24)
    scheduler.add(Request(0, np.zeros(12, np.int32), 12, spans=[(13, 30, b"cat")], max_reused_tokens=0))
    for number in range(8):
        step = scheduler.schedule()
        assert step.encoder_spans == []
        scheduler.commit(step)
        scheduler.accept(step, [5])
        if number == 5:
            scheduler.preempt_all()
    assert scheduler.num_preemptions == 1


def test_an_encoder_output_above_the_budget_is_refused():
    scheduler = make(max_encoder_tokens=10, embeddings={b"cat"})
    with pytest.raises(RequestError, match="needs 86 encoder tokens in one step; a step may compute 10: raise max_enc"):
        scheduler.add(Request(0, PROMPT, 1, spans=[(13, 99, b"cat")]))
    assert not scheduler.waiting
    for options, error in [
        ({"max_encoder_tokens": 0}, ShapeError),
        ({"embeddings": 5}, UnsupportedOption),
        ({"embeddings": "digests"}, UnsupportedOption),
    ]:
        with pytest.raises(error):
            make(**options)


def test_nothing_gives_way_to_a_request_whose_span_waits():
    options = {"policy": "priority", "preemption_threshold": 0, "max_encoder_tokens": 10}
    scheduler = make(num_blocks=14, **options)
    low = scheduler.add(Request(0, np.zeros(12, np.int32), 20))
    step = scheduler.schedule()
    scheduler.commit(step)
    scheduler.accept(step, [5])
    for number in (1, 2):
        prompt = np.full(28 - 8 * number, number, np.int32)
        scheduler.add(Request(number, prompt, 2, priority=3 - number, spans=[(0, 10, number)]))
    assert scheduler.schedule().counts == [1, 20]
    assert scheduler.num_preemptions == 0
    assert low in scheduler.running


def test_a_request_that_is_held_back_for_its_image_takes_no_row_of_an_idle_run():
    cache = PagedKVCache(AttentionSpec(1, 8), num_blocks=20, block_size=4, max_sequences=2, device="none")
    scheduler = Scheduler(cache)
    serve(scheduler, Request(0, [1, 2], 1, resumable=True))
    scheduler.add(Request(1, [7], 9))
    for number in range(3):
        step = scheduler.schedule(hold_prompts=number > 0)
        assert [run.request.id for run in step.runs] == [1]
        scheduler.commit(step)
        scheduler.accept(step, [5])
        if number == 0:
            scheduler.add(Request(2, [5], 9, spans=[(0, 1, b"cat")]))
    assert (scheduler.num_idle, scheduler.num_reclaimed) == (1, 0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_prompt_that_ends_in_an_image_waits_for_a_step_with_prompts_unless_the_scheduler_knows_what_is_kept(kept):
    scheduler = make(**({"embeddings": {b"cat"}} if kept else {}))
    serve(scheduler, Request(9, np.arange(16), 1))
    scheduler.add(Request(0, [7], 99))
    counts = []
    for number in range(5):
        step = scheduler.schedule(hold_prompts=number in (1, 2, 3))
        counts.append({run.request.id: count for run, count in zip(step.runs, step.counts, strict=True)})
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
        if number == 0:
            scheduler.add(Request(1, np.arange(17), 1, spans=[(16, 19, b"cat")]))
            scheduler.add(Request(2, [5], 1))
    waits = [{0: 1}] * 3 + [{0: 1, 1: 1, 2: 1}]
    assert counts[1:] == ([waits[3]] + [{0: 1}] * 3 if kept else waits)


def test_steps_that_hold_prompts_back_run_no_encoder():
    """The last token of three requests is in an image: in parts, after a cached prefix, and alone."""
    embeddings = EmbeddingCache("1MiB")
    scheduler = make(embeddings=embeddings, chunked_prefill_size=16)
    serve(scheduler, Request(9, np.arange(16), 1))

    def step(**options):
        step = scheduler.schedule(**options)
        counts = {run.request.id: count for run, count in zip(step.runs, step.counts, strict=True)}
        scheduler.commit(step)
        scheduler.accept(step, np.full(len(step.outputs), 5))
        return counts, [digest for *_, digest in step.encoder_spans]

    scheduler.add(Request(0, [7], 99))
    scheduler.add(Request(1, np.full(17, 1), 9, spans=[(16, 19, b"cat")]))
    assert step() == ({0: 1, 1: 16}, [])
    scheduler.add(Request(2, np.arange(17), 9, spans=[(16, 17, b"dog")]))
    scheduler.add(Request(3, [5], 9))
    assert step(hold_prompts=True) == ({0: 1}, [])
    embeddings.put(b"dog", np.zeros(8))
    assert step(hold_prompts=True) == ({0: 1, 2: 1, 3: 1}, [])
    assert step() == ({0: 1, 1: 1, 2: 1, 3: 1}, [b"cat"])
    scheduler.add(Request(4, [5], 9, spans=[(0, 1, b"owl")], samples=2))
    assert step(hold_prompts=True) == ({0: 1, 1: 1, 2: 1, 3: 1}, [])
    assert step() == ({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, [b"owl"])
    scheduler.check_invariants()
