"""Requests that meet: equal prompts, longer prompts, and the ranks of a model."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from pagecore.tiers.manager.writing.stream_parts import StreamedPrefix
from tests.tiers.manager.request_world import BLOCK, PROMPT, put


def test_requests_end_in_any_order(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    other = PROMPT + 1000
    put(w.stores[0], w.host, other)
    first, second = w.side.request(PROMPT), w.side.request(other)
    w.stores[0].finish(2)
    w.side.poll()
    w.stores[0].finish(3)
    assert w.side.poll() == [second]
    w.stores[0].finish_all()
    w.side.poll()
    w.stores[0].finish_all()
    assert w.side.poll() == [first]


def test_two_requests_for_one_prefix_publish_it_once(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    requests = [w.side.request(PROMPT), w.side.request(PROMPT)]
    for _ in range(2):
        w.stores[0].finish_all()
        ended = w.side.poll()
    assert ended == requests
    assert [request.num_tokens for request in requests] == [24, 24]
    assert len(w.host.entries[0]) == 6


def two_ranks():
    """Return the `agree` of two ranks. Each call waits for the vectors of both: the polls run in two threads."""
    vectors, barrier = [None, None], Barrier(2)

    def agree_for(rank):
        def agree(own):
            vectors[rank] = own
            barrier.wait(10)
            least = np.minimum(*vectors)
            barrier.wait(10)
            return least

        return agree

    return agree_for(0), agree_for(1)


@pytest.mark.parametrize("stops", [(24, 12), (8, 24), (0, 24), (24, 24)])
def test_ranks_agree_on_the_shortest_prefix(world, stops):
    worlds = [world(agree=agree, chunk_bytes=512) for agree in two_ranks()]
    for w, stop in zip(worlds, stops, strict=True):
        put(w.stores[0], w.host, PROMPT, stop=stop)

    def serve(w):
        request = w.side.request(PROMPT)
        for _ in range(20):
            w.stores[0].finish_all()
            if request in w.side.poll():
                return request
        raise AssertionError("no agreement")

    with ThreadPoolExecutor(2) as pool:
        requests = list(pool.map(serve, worlds))
    assert [request.num_tokens for request in requests] == [min(stops)] * 2


@pytest.mark.parametrize(
    ("stops", "in_host"), [((24, 24), (0, 0)), ((24, 12), (0, 0)), ((24, 24), (0, 8)), ((0, 24), (0, 0))]
)
def test_equal_requests_of_ranks_load_once(world, stops, in_host):
    worlds = [world(agree=agree, chunk_bytes=512) for agree in two_ranks()]
    for w, stop, there in zip(worlds, stops, in_host, strict=True):
        put(w.stores[0], w.host, PROMPT, stop=stop)
        w.host.fill(PROMPT, stop=there)

    def serve(rank):
        w = worlds[rank]
        requests = [w.side.request(PROMPT) for _ in range(3)]
        ended = []
        for number in range(40):
            if number % (rank + 1) == 0:  # one rank is slower
                w.stores[0].finish_all()
            ended += w.side.poll()
            if len(ended) == 3:
                return requests
        raise AssertionError("no agreement")

    with ThreadPoolExecutor(2) as pool:
        served = list(pool.map(serve, range(2)))
    for requests in served:
        assert [one.num_tokens for one in requests] == [min(stops)] * 3
        assert [bool(one.loaded_tokens) for one in requests] == [min(stops) > 0, False, False]
        for one in requests:
            one.release()


@pytest.mark.parametrize("seed", range(8))
def test_ranks_agree_whatever_their_stores_and_hosts_have(world, seed):
    worlds = [world(agree=agree, chunk_bytes=512, slots=10) for agree in two_ranks()]
    random = np.random.default_rng(seed)
    prompts = [np.concatenate([PROMPT[:cut], PROMPT[:9] + 50]) for cut in random.integers(0, len(PROMPT), 4)]
    asked = [
        tuple(one) for one in np.stack([np.sort(random.integers(0, 30, 12)), random.integers(0, 4, 12)], 1).tolist()
    ]
    for w in worlds:
        for prompt in prompts:
            put(w.stores[0], w.host, prompt, stop=int(random.integers(0, 8)) * BLOCK)

    def serve(rank):
        w, own = worlds[rank], np.random.default_rng((seed, rank))
        requests, ended = [], []
        for turn in range(120):
            requests += [w.side.request(prompts[which]) for at, which in asked if at == turn]
            while w.stores[0].batches and own.random() < 0.5:
                w.stores[0].finish()
            ended += w.side.poll()
            if own.random() < 0.1:
                w.host.evict(0, 2)
            for one in ended:
                one.release()
        assert len(ended) == len(requests)
        return requests

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(serve, range(2))
    assert [one.num_tokens for one in first] == [one.num_tokens for one in second]
    assert any(one.num_tokens for one in first)


def test_equal_requests_load_once(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first, second = w.side.request(PROMPT), w.side.request(PROMPT)
    assert len(w.stores[0].batches) == 1
    w.stores[0].finish()  # the look-up
    assert w.side.poll() == []
    assert [batch[0] for batch in w.stores[0].batches.values()] == ["load"]
    w.stores[0].finish_all()
    assert w.side.poll() == [first, second]
    assert [(one.state, one.num_tokens) for one in (first, second)] == [("ready", 24)] * 2
    assert first.loaded_tokens
    assert second.loaded_tokens == {}
    first.release()
    second.release()


@pytest.mark.parametrize("count", [2, 5, 12])
def test_equal_requests_miss_after_two_look_ups(world, count):
    w = world()
    requests = [w.side.request(PROMPT) for _ in range(count)]
    for _ in range(2):
        assert not any(one.has_ended for one in requests[1:])
        w.stores[0].finish_all()
        w.side.poll()
    assert [(one.state, one.num_tokens) for one in requests] == [("ready", 0)] * count


def test_requests_whose_older_one_ends_early_load_once(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first, *others = (w.side.request(PROMPT) for _ in range(4))
    first.cancel()
    for _ in range(4):
        w.stores[0].finish_all()
        w.side.poll()
    assert [(one.state, one.num_tokens) for one in others] == [("ready", 24)] * 3
    assert [bool(one.loaded_tokens) for one in others] == [True, False, False]
    for one in (first, *others):
        one.release()


def test_a_longer_request_loads_what_an_older_one_does_not(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first, second = w.side.request(PROMPT, max_tokens=12), w.side.request(PROMPT)
    for _ in range(4):
        w.stores[0].finish_all()
        w.side.poll()
    assert (first.num_tokens, second.num_tokens) == (12, 24)
    assert (sum(first.loaded_tokens.values()), sum(second.loaded_tokens.values())) == (12, 12)
    first.release()
    second.release()


@pytest.mark.parametrize("ends", ["fails", "cancelled", "late"])
def test_a_request_that_waited_searches_after_the_older_one_ended_short(world, ends):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first = w.side.request(PROMPT, deadline=1.0)
    second = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    if ends == "cancelled":
        first.cancel()
    if ends == "late":
        w.clock.now = 2.0
        w.side.poll()
        assert first.state == "late"
    w.stores[0].finish(fails=range(100) if ends == "fails" else ())
    for _ in range(3):
        w.side.poll()
        w.stores[0].finish_all()
    assert (second.state, second.num_tokens) == ("ready", 24)
    first.release()
    second.release()


def test_the_deadline_of_a_request_that_waits_holds(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first, second = w.side.request(PROMPT), w.side.request(PROMPT, deadline=1.0)
    w.clock.now = 2.0
    assert w.side.poll() == [second]
    assert (second.state, second.num_tokens, second.is_retired) == ("late", 0, True)
    for _ in range(3):
        w.stores[0].finish_all()
        w.side.poll()
    assert first.num_tokens == 24
    first.release()


def test_a_request_that_is_released_while_it_waits_searches_nothing(world):
    """The stores have not answered: what they were given stays known."""
    w = world()
    put(w.stores[0], w.host, PROMPT)
    prefix = StreamedPrefix(PROMPT[:24], None, None)
    w.side._passed.add(PROMPT[:24], prefix)
    first, second = w.side.request(PROMPT), w.side.request(PROMPT)
    second.release()
    for _ in range(3):
        w.stores[0].finish_all()
        w.side.poll()
    assert (first.num_tokens, second.has_ended) == (24, True)
    assert w.side._passed.match(PROMPT, prefix) == 24
    first.release()


def test_prompts_that_differ_do_not_wait_for_each_other(world):
    w = world()
    other = np.concatenate([PROMPT[:4] + 500, PROMPT[4:]])
    first, second, third = w.side.request(PROMPT), w.side.request(other), w.side.request(PROMPT, namespace="n")
    assert len(w.stores[0].batches) == 3
    w.stores[0].finish_all()
    assert w.side.poll() == [first, second, third]


def test_a_request_that_waits_searches_as_soon_as_the_last_batch_of_a_late_one_ends(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first = w.side.request(PROMPT, deadline=1.0)
    second = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    w.clock.now = 2.0
    assert w.side.poll() == [first]
    w.stores[0].finish(fails=range(100))
    w.side.poll()  # no descriptor becomes readable afterwards
    assert [batch[0] for batch in w.stores[0].batches.values()] == ["lookup"]
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert second.num_tokens == 24
    first.release()
    second.release()
