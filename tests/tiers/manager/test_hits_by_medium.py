"""Reused tokens by the medium that had them: of sequences, of runs of a scheduler, and of all prompts together."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore import AttentionSpec, InvalidSequence, PagedKVCache
from pagecore.serving import Request, Scheduler
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.manager.hits.origins import DEVICE, HOST, Origins
from pagecore.tiers.manager.tiers import Tiers
from tests.serving.fake_cache import FakeCache
from tests.serving.runs import advance, drain
from tests.tiers.manager.served import Served
from tests.tiers.memory_store import MemoryStore

PROMPT = np.arange(41, dtype=np.int32)


def test_a_prompt_has_tokens_from_the_device_the_host_and_two_stores():
    near, far = {}, {}
    for data, count in ((near, 17), (far, 33)):
        with Served([MemoryStore(data=data)]) as writer:
            writer.serve(PROMPT[:count])
            writer.flush()
    stores = [MemoryStore(data=near, medium="DISK"), MemoryStore(data=far, medium="EXTERNAL")]
    with Served(stores) as served:
        served.compute(PROMPT[:9])
        served.flush()
        served.cache.evict_prefix(PROMPT[:8], keep=4)
        request = served.tiers.request(PROMPT)
        served.tiers.wait(request, 20.0)
        assert request.loaded_tokens == {"DISK": 8, "EXTERNAL": 16}
        expected = {"GPU": 4, "CPU": 4, "DISK": 8, "EXTERNAL": 16}
        for _ in range(2):  # one that finds no room, and is added again, finds on the device what was promoted for it
            with served.cache.add_sequence(PROMPT) as sequence:
                assert served.cache.hit_tokens(sequence) == expected
        sequence, other = served.cache.add_sequence(PROMPT), served.cache.add_sequence(PROMPT)
        served.cache.commit(served.cache.prepare([sequence], 1))
        assert served.cache.hit_tokens(sequence) == expected
        assert served.cache.hit_tokens(other) == {"GPU": 32, "CPU": 0}
        assert served.cache.hit_tokens(served.cache.fork(sequence)) == {"GPU": 32, "CPU": 0}
        served.cache.commit(served.cache.prepare([other], 1))
        assert served.tiers.stats().hit_tokens == expected | {"GPU": 4 + 32}
        for each in list(served.cache.sequences.values()):
            served.cache.remove(each)
        with pytest.raises(InvalidSequence):
            served.cache.hit_tokens(sequence)
        request.release()


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_each_run_has_its_tokens_by_medium_and_they_add_up(policy, has_room):
    cache = PagedKVCache(
        AttentionSpec(1, 8),
        block_size=4,
        num_blocks=80 if has_room else 33,
        max_sequences=6,
        device="none",
        eviction_policy=policy,
    )
    choice, runs = random.Random(0), []
    with Tiers(cache, HostTier(cache, num_blocks=200), min_tokens=1) as tiers:
        scheduler = Scheduler(cache, headroom=0.0)
        for number in range(60):
            prompt = [number % 9] * choice.randint(8, 40) + [number]
            runs.append(scheduler.add(Request(number, prompt, choice.randint(0, 6), samples=1 + number % 2)))
            if not has_room and choice.random() < 0.3:
                advance(scheduler, choice.randint(0, 4) if scheduler.num_waiting else 0)
            if has_room and number % 5 == 4:
                runs += [run for run in drain(scheduler) if run.sample]
                cache.clear_prefix_cache()
        runs += [run for run in drain(scheduler) if run.sample]
        for run in runs:
            assert sum(run.hit_tokens.values()) == (run.parent or run).num_reused_tokens
            if run.parent is not None:
                assert run.hit_tokens == run.parent.hit_tokens
        firsts = [run for run in runs if run.parent is None]
        promoted = sum(run.hit_tokens["CPU"] for run in firsts)
        assert promoted > 100
        assert tiers.stats().hit_tokens["CPU"] <= tiers.host.num_promoted_tokens
        if has_room:
            assert not scheduler.num_preemptions
            total = {medium: sum(run.hit_tokens[medium] for run in firsts) for medium in ("GPU", "CPU")}
            assert tiers.stats().hit_tokens == total


def test_without_tiers_all_is_of_the_device():
    scheduler = Scheduler(FakeCache(20))
    runs = []
    for number in range(2):
        runs.append(scheduler.add(Request(number, range(9), 1)))
        assert runs[-1].hit_tokens == {}
        drain(scheduler)
    assert [run.hit_tokens for run in runs] == [{"GPU": 0}, {"GPU": 8}]


def test_origins_are_those_of_a_dictionary_of_prefixes():
    choice, known = random.Random(1), {}
    origins = Origins(2, 1000)
    for _ in range(300):
        options = SimpleNamespace(namespace=choice.choice([None, "tenant"]), spans=None)
        ids = np.array([choice.randint(0, 1) for _ in range(choice.randint(0, 14))], np.int32)
        names = [(options.namespace, ids[: end + 2].tobytes()) for end in range(0, len(ids) - 1, 2)]
        if choice.random() < 0.5 and names:
            first = choice.randrange(len(names))
            media = np.array([choice.randint(HOST, 3) for _ in names[first:]], np.int64)
            origins.note(ids[: 2 * len(names)], options, 2 * first, media)
            known |= dict(zip(names[first:], media.tolist(), strict=True))
        elif choice.random() < 0.3:
            origins.forget(ids, options)
            for name in names:
                known.pop(name, None)
        assert origins.media_of(ids, options).tolist() == [known.get(name, DEVICE) for name in names]
    assert len(known) > 20


def test_origins_forget_the_oldest_prefixes():
    options = SimpleNamespace(namespace=None, spans=None)
    origins = Origins(1, 5)
    for start in range(0, 60, 3):
        ids = np.arange(start, start + 3, dtype=np.int32)
        origins.note(ids, options, 0, np.full(3, HOST, np.int64))
        assert origins.media_of(ids, options).tolist() == [HOST] * 3
        assert origins.media_of(np.arange(start - 6, start - 3, dtype=np.int32), options).tolist() == [DEVICE] * 3
    long = np.arange(9, dtype=np.int32)
    origins.note(long, options, 2, np.full(7, HOST, np.int64))
    assert origins.media_of(long, options).tolist() == [DEVICE] * 2 + [HOST] * 2 + [DEVICE] * 5
