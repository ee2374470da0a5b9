"""Look-ups that load nothing, and requests that ask stores of some media alone."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from tests.tiers.manager.request_world import BLOCK, PROMPT, put
from tests.tiers.manager.test_equal_requests import two_ranks


def end(w, request):
    """End all batches of the stores until a request has ended."""
    while not request.has_ended:
        for store in w.stores:
            store.finish_all()
        w.side.poll()
    return request


def test_a_look_up_counts_what_host_and_stores_have_and_loads_nothing(world):
    w = world(2)
    w.host.fill(PROMPT, stop=4)
    put(w.stores[0], w.host, PROMPT, stop=12)
    put(w.stores[1], w.host, PROMPT, stop=20)
    before = w.host.now
    found = end(w, w.side.request(PROMPT, loads=False))
    assert (found.state, found.num_found_tokens, found.num_tokens, found.loaded_tokens) == ("ready", 20, 4, {})
    assert w.host.match(PROMPT) == 4
    assert w.host.now == before
    assert not any(store.holds for store in w.stores)
    assert found.is_retired


@pytest.mark.parametrize("seed", range(12))
def test_a_request_brings_what_a_look_up_found(world, seed):
    random = np.random.default_rng(seed)
    w = world(3, windows=(6,) if seed % 2 else (), states=seed % 3 == 0, slots=64)
    w.host.fill(PROMPT, stop=int(random.integers(0, 6)) * BLOCK)
    for store in w.stores:
        for lane in range(w.host.num_lanes):
            put(store, w.host, PROMPT, lanes=[lane], stop=int(random.integers(0, 7)) * BLOCK)
    media = [None, ("DISK",), ("EXTERNAL",), (), ("DISK", "EXTERNAL")][seed % 5]
    found = end(w, w.side.request(PROMPT, media=media, loads=False))
    loaded = end(w, w.side.request(PROMPT, media=media))
    assert loaded.num_tokens == loaded.num_found_tokens == found.num_found_tokens
    assert found.num_tokens == found.num_host_tokens


@pytest.mark.parametrize("loads", [True, False])
def test_only_stores_of_the_given_media_are_asked(world, loads):
    w = world(3)  # of which the first is a disk
    for store in w.stores:
        put(store, w.host, PROMPT)
    none = w.side.request(PROMPT, media=(), loads=loads)
    assert (none.state, none.num_found_tokens) == ("ready", 0)
    w.side.request(PROMPT, media={"EXTERNAL"}, loads=loads)
    assert [len(store.batches) for store in w.stores] == [0, 1, 1]


def test_few_missing_tokens_are_looked_up_all_the_same(world):
    w = world(min_tokens=9)
    w.host.fill(PROMPT, stop=16)
    put(w.stores[0], w.host, PROMPT)
    assert end(w, w.side.request(PROMPT)).num_found_tokens == 16
    assert end(w, w.side.request(PROMPT, loads=False)).num_found_tokens == 24


def test_a_look_up_waits_for_no_load_and_delays_none(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    first = w.side.request(PROMPT, loads=False)
    loaded = w.side.request(PROMPT)
    last = w.side.request(PROMPT, loads=False)
    assert [batch[0] for batch in w.stores[0].batches.values()] == ["lookup"] * 3
    for ticket in sorted(w.stores[0].batches, reverse=True):
        w.stores[0].finish(ticket)
    w.side.poll()
    assert (first.num_found_tokens, last.num_found_tokens, loaded.state) == (24, 24, "loading")
    assert end(w, loaded).num_tokens == 24


@pytest.mark.parametrize(("first", "second"), [(None, ()), (("EXTERNAL",), ("DISK",)), (("DISK",), ("CPU",)), ((), ())])
def test_a_request_waits_for_no_load_of_stores_that_it_does_not_ask(world, first, second):
    w = world(3)
    put(w.stores[0], w.host, PROMPT)
    put(w.stores[1], w.host, PROMPT)
    older = w.side.request(PROMPT, media=first)
    newer = w.side.request(PROMPT, media=second)
    for _ in range(2 * ("DISK" in second)):
        w.stores[0].finish_all()
        w.side.poll()
    assert newer.has_ended
    assert newer.num_tokens == (24 if "DISK" in second else 0)
    assert older.has_ended == (first == ())
    end(w, older)
    assert older.num_tokens == (0 if first == () else 24)


def test_those_that_wait_for_a_request_of_fewer_media_load_once(world):
    w = world(2)
    put(w.stores[1], w.host, PROMPT)
    disk = w.side.request(PROMPT, media=("DISK",))
    both = [w.side.request(PROMPT), w.side.request(PROMPT)]
    assert [len(store.batches) for store in w.stores] == [1, 0]
    w.stores[0].finish_all()
    assert w.side.poll() == [disk]
    assert [len(store.batches) for store in w.stores] == [1, 1], "the first of both searches, the other one waits"
    for request in both:
        assert end(w, request).num_tokens == 24


def test_a_look_up_pins_the_host_until_it_is_released(world):
    w = world()
    w.host.fill(PROMPT, stop=8)
    found = end(w, w.side.request(PROMPT, loads=False))
    assert w.side.num_pins == 1
    found.release()
    assert w.side.num_pins == 0


def test_a_look_up_that_is_late_counts_what_is_there(world):
    w = world()
    w.host.fill(PROMPT, stop=8)
    put(w.stores[0], w.host, PROMPT)
    found = w.side.request(PROMPT, deadline=1.0, loads=False)
    w.clock.now = 1.0
    assert w.side.poll() == [found]
    assert (found.state, found.num_found_tokens, found.num_tokens) == ("late", 8, 8)
    w.stores[0].finish_all()
    w.side.poll()
    assert found.is_retired


@pytest.mark.parametrize(("stops", "in_host"), [((24, 24), (0, 0)), ((24, 12), (4, 8)), ((0, 24), (8, 0))])
def test_ranks_agree_on_what_a_look_up_found(world, stops, in_host):
    worlds = [world(agree=agree) for agree in two_ranks()]
    for w, stop, there in zip(worlds, stops, in_host, strict=True):
        put(w.stores[0], w.host, PROMPT, stop=stop)
        w.host.fill(PROMPT, stop=there)

    def look_up(w):
        found = w.side.request(PROMPT, loads=False)
        for _ in range(20):
            w.stores[0].finish_all()
            if found in w.side.poll():
                return found
        raise AssertionError("no agreement")

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(look_up, worlds))
    least = min(max(stop, there) for stop, there in zip(stops, in_host, strict=True))
    assert [(found.num_found_tokens, found.num_tokens) for found in both] == [(least, min(in_host))] * 2


@pytest.mark.parametrize("media", ["DISK", b"DISK", 7, ["TAPE"], [None], ["DISK", 3]])
def test_other_media_are_refused(world, media):
    w = world()
    with pytest.raises(UnsupportedOption, match="media"):
        w.side.request(PROMPT, media=media)
    assert w.side.stats().num_requests == 0
