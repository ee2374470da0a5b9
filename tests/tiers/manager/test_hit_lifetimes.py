"""Reused tokens by medium of sequences that are swapped out, cut, copied or interrupted."""

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest

from pagecore import AttentionSpec, InvalidSequence, PagedKVCache
from pagecore.cache import Sequence, SwapSpace
from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.serving import Request, Reuse, Scheduler
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager import observer
from pagecore.tiers.manager.tiers import Tiers
from tests.cache.prefixes import computed, kept
from tests.serving.runs import advance, drain
from tests.tiers.manager.served import Served, vectors
from tests.tiers.memory_store import MemoryStore

FULL, WINDOW = AttentionSpec(1, 8), AttentionSpec(1, 8, window=6)
PROMPT = np.arange(33, dtype=np.int32)


def tiered(*prompts, specs=FULL, num_blocks=60, host_blocks=100, **options):
    """Return a cache without bytes whose prompts are in the host alone, and its tiers."""
    cache = PagedKVCache(specs, block_size=4, num_blocks=num_blocks, max_sequences=8, device="none")
    tiers = Tiers(cache, HostTier(cache, num_blocks=host_blocks), min_tokens=1, **options)
    for prompt in prompts:
        kept(cache, prompt)
    tiers.drain()
    cache.clear_prefix_cache()
    return cache, tiers


def check_sums(cache, tiers, sequences):
    """Compare the hits of sequences, whose first steps have run, with the totals."""
    hits = [cache.hit_tokens(sequence) for sequence in sequences]
    assert [sum(each.values()) for each in hits] == [sequence.num_cached_tokens for sequence in sequences]
    total = {medium: sum(each[medium] for each in hits) for medium in ("GPU", "CPU")}
    assert tiers.stats().hit_tokens == total


@pytest.mark.parametrize("write", ["through", "second_hit"])
def test_a_sequence_that_is_removed_while_swapped_out_leaves_nothing(write):
    prompts = [range(1000 * number, 1000 * number + 8) for number in range(7)]
    cache, tiers = tiered(*prompts, *prompts, write=write)
    space = SwapSpace(cache, num_blocks=60)
    with tiers:
        gc.collect()
        before = sum(isinstance(each, Sequence) for each in gc.get_objects())
        for prompt in prompts:
            sequence = computed(cache, [*prompt, 9])
            assert cache.hit_tokens(sequence) == {"GPU": 0, "CPU": 8}
            cache.swap_out([sequence], space)
            assert cache.hit_tokens(sequence) == {"GPU": 0, "CPU": 8}
            cache.remove(sequence)
        del sequence
        gc.collect()
        assert sum(isinstance(each, Sequence) for each in gc.get_objects()) == before
        others = [cache.add_sequence([7, 8, 9]) for _ in range(8)]
        assert [cache.hit_tokens(each) for each in others] == [{"GPU": 0, "CPU": 0}] * 8


@pytest.mark.parametrize("host_blocks", [[9, 100], [100, 9]])
def test_long_prefixes_keep_their_media_where_a_group_has_few_blocks(host_blocks):
    specs = [WINDOW, FULL] if host_blocks[0] == 9 else [FULL, WINDOW]
    cache, tiers = tiered(range(100), specs=specs, host_blocks=host_blocks)
    with tiers:
        assert cache.hit_tokens(cache.add_sequence(range(101))) == {"GPU": 0, "CPU": 100}


def test_long_prefixes_keep_their_media_where_all_groups_have_windows():
    cache, tiers = tiered(range(100), specs=WINDOW, host_blocks=9)
    with tiers:
        assert cache.hit_tokens(cache.add_sequence(range(101))) == {"GPU": 0, "CPU": 100}


def test_blocks_that_the_host_copied_itself_are_not_those_of_a_store():
    data = {}
    with Served([MemoryStore(data=data)]) as writer:
        writer.serve(PROMPT)
        writer.flush()
    with Served([MemoryStore(data=data, medium="DISK")]) as served:
        request = served.tiers.request(PROMPT)
        served.tiers.wait(request, 20.0)
        assert request.loaded_tokens == {"DISK": 32}
        request.release()
        served.tiers.host.clear()
        with served.cache.add_sequence(PROMPT) as sequence:
            batch = served.cache.prepare([sequence], 33)
            for layer in range(2):
                content = vectors(PROMPT, None, layer)
                served.cache.write(layer, content, -content, batch)
            served.cache.commit(batch)
        served.flush()
        served.cache.clear_prefix_cache()
        with served.cache.add_sequence(PROMPT) as sequence:
            served.cache.commit(served.cache.prepare([sequence], 1))
            assert served.cache.hit_tokens(sequence) == {"GPU": 0, "CPU": 32}


def test_a_sequence_that_is_cut_counts_once_and_its_media_add_up():
    cache, tiers = tiered(range(8))
    with tiers:
        sequence = computed(cache, range(9))
        check_sums(cache, tiers, [sequence])
        for length, expected in ((8, 8), (6, 6), (4, 4), (0, 0)):
            cache.truncate([sequence], [length])
            assert cache.hit_tokens(sequence) == {"GPU": 0, "CPU": expected}
            cache.append_tokens([sequence], [[50, 51]])
            cache.commit(cache.prepare([sequence], 2))
            assert cache.hit_tokens(sequence) == {"GPU": 0, "CPU": expected}
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 8}


def test_a_sequence_that_is_cut_before_its_first_step_adds_up():
    cache, tiers = tiered(range(8))
    with tiers:
        sequence = cache.add_sequence(range(9))
        cache.truncate([sequence], [6])
        assert cache.hit_tokens(sequence) == {"GPU": 2, "CPU": 4}  # a part of a block has no medium before the step
        cache.append_tokens([sequence], [[50, 51]])
        cache.commit(cache.prepare([sequence], 2))
        check_sums(cache, tiers, [sequence])


def test_copies_of_a_sequence_that_has_not_run_count_once():
    cache, tiers = tiered(range(8))
    with tiers:
        sequence = cache.add_sequence(range(9))
        copies = [cache.fork(sequence) for _ in range(2)]
        cache.commit(cache.prepare([sequence, *copies], 1))
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 8}
        assert [cache.hit_tokens(each) for each in copies] == [{"GPU": 8, "CPU": 0}] * 2


@pytest.mark.parametrize("copies", ["fork", "reorder"])
@pytest.mark.parametrize("length", [8, 9])
def test_a_prefix_that_only_a_copy_computes_after_counts_once(copies, length):
    cache, tiers = tiered(range(8))
    with tiers:
        other = cache.add_sequence([50])
        template = cache.add_sequence(range(length), tentative=True)
        if length == 8:
            cache.truncate([template], [4])
        reused = template.num_cached_tokens
        if copies == "fork":
            other = cache.fork(template)
        else:
            cache.reorder([other], [template])
        expected = {"GPU": reused, "CPU": 0} if copies == "fork" else {"GPU": 0, "CPU": reused}
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": reused}
        assert cache.hit_tokens(template) == {"GPU": 0, "CPU": reused}
        assert cache.hit_tokens(other) == expected
        cache.remove(template)
        cache.append_tokens([other], [[60]])
        cache.commit(cache.prepare([other], 1))
        assert cache.hit_tokens(other) == expected
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": reused}
        again = computed(cache, range(9))
        assert cache.hit_tokens(again)["CPU"] == again.num_cached_tokens - reused


@pytest.mark.parametrize("copies", ["fork", "reorder"])
def test_prompts_that_only_copies_compute_are_second_hits(copies):
    cache, tiers = tiered(write="second_hit")
    with tiers:
        for prompt in range(3):
            other = cache.add_sequence([50])
            template = cache.add_sequence(range(20))
            if copies == "fork":
                other = cache.fork(template)
            else:
                cache.reorder([other], [template])
            cache.remove(template)
            cache.commit(cache.prepare([other], other.num_tokens - other.num_computed_tokens))
            tiers.drain()
            assert tiers.host.match_ids(PROMPT[:20], RetentionOptions(), 20)[1] == (0 if prompt == 0 else 20)


def test_a_reorder_that_is_refused_counts_nothing():
    cache, tiers = tiered(range(8))
    with tiers:
        template = cache.add_sequence(range(9), tentative=True)
        with pytest.raises(InvalidSequence):
            cache.reorder([template, template], [template, template])
        removed = cache.add_sequence([50])
        cache.remove(removed)
        with pytest.raises(InvalidSequence):
            cache.reorder([removed], [template])
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 0}


def test_sequences_that_change_places_have_the_media_of_their_parents():
    cache, tiers = tiered(range(40))
    with tiers:
        first, second = computed(cache, range(41)), computed(cache, [5, 5, 5])
        cache.reorder([first, second], [second, first])
        assert cache.hit_tokens(second) == {"GPU": 0, "CPU": 40}
        check_sums(cache, tiers, [first, second])
        cache.compact(second, [0, 1, 2, 20])
        assert sum(cache.hit_tokens(second).values()) == second.num_cached_tokens == 4


def test_a_sequence_that_ran_before_the_tiers_opened_is_not_counted():
    cache, tiers = tiered(range(8))
    sequences = [computed(cache, range(9))]
    tiers.close()
    sequences.append(computed(cache, [*range(8), 20]))
    with Tiers(cache, HostTier(cache, num_blocks=20), min_tokens=1) as tiers:
        cache.commit(cache.prepare(sequences, 1))
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 0}
        assert [cache.hit_tokens(each) for each in sequences] == [{"GPU": 0, "CPU": 8}, {"GPU": 8, "CPU": 0}]


def test_a_run_whose_first_step_was_abandoned_reuses_what_it_finds_later():
    cache, tiers = tiered(range(16))
    with tiers:
        scheduler = Scheduler(cache, swap_space=SwapSpace(cache, num_blocks=60))
        run = scheduler.add(Request(0, range(20), 5))
        scheduler.abandon(scheduler.schedule())
        assert (run.num_reused_tokens, run.hit_tokens) == (16, {})
        scheduler.preempt_all(swap=False)
        cache.clear_prefix_cache()
        tiers.host.clear()
        advance(scheduler, 1)
        assert (run.num_reused_tokens, run.hit_tokens) == (0, {"GPU": 0, "CPU": 0})
        scheduler.preempt_all(swap=False)
        drain(scheduler)
        assert (run.num_reused_tokens, run.hit_tokens) == (0, {"GPU": 0, "CPU": 0})


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_run_that_is_admitted_again_before_its_first_step_is_one_query(is_cleared):
    cache = PagedKVCache(FULL, block_size=4, num_blocks=60, max_sequences=4, device="none")
    kept(cache, range(64))
    scheduler = Scheduler(cache)
    run = scheduler.add(Request(0, range(66), 5))
    for _ in range(2):
        scheduler.abandon(scheduler.schedule())
        assert run.num_reused_tokens == 64
        assert scheduler.reuse.prefix_hit_tokens == 0  # until a first step is committed
        scheduler.preempt_all(swap=False)
    if is_cleared:
        cache.clear_prefix_cache()
    advance(scheduler, 1)
    expected = Reuse(66, *2 * [0 if is_cleared else 64], 16, 0 if is_cleared else 16)
    assert scheduler.reuse == expected
    assert scheduler.reuse.prefix_hit_tokens == run.num_reused_tokens
    scheduler.preempt_all(swap=False)
    advance(scheduler, 1)
    assert scheduler.reuse.num_recovered_tokens == 64
    assert scheduler.reuse == replace(expected, num_recovered_tokens=64)


def test_samples_have_copies_of_the_hits_of_their_first_sample():
    scheduler = Scheduler(PagedKVCache(FULL, block_size=4, num_blocks=20, max_sequences=4, device="none"))
    first = scheduler.add(Request(0, range(9), 3, samples=2))
    runs = drain(scheduler)
    runs[0].hit_tokens["GPU"] = 99
    assert sorted(run.hit_tokens["GPU"] for run in runs) == [0, 99]
    assert first in runs


def interrupt_at(line):
    """Return a trace function that interrupts the calls of the tiers at one of their lines."""
    seen = 0

    def follow(frame, event, _):
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return follow

    return lambda frame, event, _: follow if frame.f_code.co_filename == observer.__file__ else None


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_interrupted_commit_counts_all_of_a_prefix_or_nothing_yet(is_removed):
    line, is_interrupted = 0, True
    while is_interrupted:
        line += 1
        cache, tiers = tiered(range(16))
        sequence = cache.add_sequence(range(17))
        batch = cache.prepare([sequence], 1)
        is_interrupted = False
        sys.settrace(interrupt_at(line))
        try:
            cache.commit(batch)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.settrace(None)
        assert cache.hit_tokens(sequence) == {"GPU": 0, "CPU": 16}
        if is_removed:
            cache.remove(sequence)
        else:
            cache.commit(cache.prepare([sequence], 1))
        assert tiers.stats().hit_tokens == {"GPU": 0, "CPU": 16}
        cache.check_invariants()
        tiers.close()
    assert line > 10
