"""Requests against a host in plain Python and stores whose batches end on command."""

import os
import select
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.keys import Fingerprint, content_chain, lane_keys
from pagecore.tiers.manager.stores import StoreSide
from tests.tiers.manager.plain_host import NO_DEVICE, PlainHost, payload
from tests.tiers.manager.scripted_store import ScriptedStore

BLOCK = 4
MEDIUMS = ("DISK", "EXTERNAL", "EXTERNAL")
FINGERPRINT = Fingerprint.of(
    PagedKVCache(AttentionSpec(1, 8), block_size=BLOCK, num_blocks=9, device="none"), model="plain"
)
# A prompt of 6 whole blocks and the last token, which is always computed.
PROMPT = np.arange(100, 125, dtype=np.int32)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def chain_of(tokens, namespace=None):
    return content_chain(FINGERPRINT, tokens, namespace=namespace)


def put(store, host, tokens, *, namespace=None, lanes=None, stop=None):
    """Keep the entries of a prefix in a store."""
    stop = len(tokens) // BLOCK if stop is None else stop // BLOCK
    chain = chain_of(tokens, namespace)
    for lane in range(host.num_lanes) if lanes is None else lanes:
        for index, key in enumerate(lane_keys(chain, lane)[:stop]):
            before = [int(token) for token in tokens[: (index + 1) * BLOCK]]
            store.entries[bytes(key)] = bytes(payload(namespace, before, lane, host.payload_bytes[lane]))


@pytest.fixture
def world():
    """Make a StoreSide, and check at the end that nothing is held and everything is as it must be."""
    made = []

    def make(stores=1, *, device=NO_DEVICE, min_tokens=1, chunk_bytes=1 << 20, agree=None, mediums=MEDIUMS, **options):
        host = PlainHost(**options)
        stores = [ScriptedStore(f"s{number}", mediums[number]) for number in range(stores)]
        clock = Clock()
        side = StoreSide(
            device,
            host,
            stores,
            fingerprint=FINGERPRINT,
            tree_lanes=host.lanes,
            min_tokens=min_tokens,
            chunk_bytes=chunk_bytes,
            agree=agree,
            clock=clock,
        )
        made.append((side, host, stores))
        return SimpleNamespace(side=side, host=host, stores=stores, clock=clock)

    descriptors = len(os.listdir("/proc/self/fd"))
    yield make
    for side, host, stores in made:
        side.check_invariants()
        host.check()
        side.close(timeout=0.0)
        host.check()
        assert not host.pins
        assert not host.leases
        assert all(not store.holds and not store.batches for store in stores)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_request_without_stores_is_ready_at_once(world):
    w = world(0)
    w.host.fill(PROMPT, stop=8)
    request = w.side.request(PROMPT)
    assert (request.state, request.num_tokens, request.num_host_tokens) == ("ready", 8, 8)
    assert w.side.poll() == []


def test_a_miss_takes_no_host_memory(world):
    w = world(2)
    request = w.side.request(PROMPT)
    for store in w.stores:
        assert [batch[0] for batch in store.batches.values()] == ["lookup"]
        store.finish_all()
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens) == ("ready", 0)
    assert w.host.now == 0


def test_a_prefix_of_a_store_is_loaded_and_verified(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    assert request.state == "searching"
    w.stores[0].finish_all()
    assert w.side.poll() == []
    assert request.state == "loading"
    w.stores[0].finish_all()
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens, request.loaded_tokens) == ("ready", 24, {"DISK": 24})
    assert request.is_retired
    assert w.host.match(PROMPT) == 24


def test_one_batch_a_store_looks_up_only_what_the_host_lacks(world):
    w = world()
    w.host.fill(PROMPT, stop=8)
    w.side.request(PROMPT)
    ((kind, keys, _),) = w.stores[0].batches.values()
    assert (kind, keys) == ("lookup", [bytes(key) for key in lane_keys(chain_of(PROMPT)[2:], 0)])


def test_the_nearest_store_wins_entry_by_entry(world):
    w = world(2)
    put(w.stores[0], w.host, PROMPT, stop=12)
    put(w.stores[1], w.host, PROMPT, stop=20)
    request = w.side.request(PROMPT)
    for _ in range(2):
        for store in w.stores:
            store.finish_all()
        w.side.poll()
    assert (request.num_tokens, request.loaded_tokens) == (20, {"DISK": 12, "EXTERNAL": 8})


def test_a_load_does_not_wait_for_a_farther_store_that_cannot_matter(world):
    w = world(2)
    put(w.stores[0], w.host, PROMPT)
    put(w.stores[1], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    w.stores[0].finish_all()
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens, request.is_retired) == ("ready", 24, False)
    w.stores[1].finish_all()
    assert w.stores[1].holds
    w.side.poll()
    assert not w.stores[1].holds
    assert request.is_retired


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


def test_a_failed_entry_ends_the_prefix_and_later_chunks_are_given_back(world):
    w = world(chunk_bytes=512)
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    loads = sorted(w.stores[0].batches)
    assert len(loads) == 3
    w.stores[0].finish(loads[2])
    w.side.poll()
    assert len(w.host.leases) == 3
    w.stores[0].finish(loads[1], fails=[1], error="flipped bit")
    w.stores[0].finish(loads[0])
    assert w.side.poll() == [request]
    assert (request.num_tokens, request.error) == (12, "flipped bit")


def test_a_deadline_publishes_the_chunks_that_are_there_and_the_others_later(world):
    w = world(chunk_bytes=512)
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT, deadline=1.0)
    w.stores[0].finish_all()
    w.side.poll()
    w.stores[0].finish()
    w.clock.now = 0.99
    assert w.side.poll() == []
    w.clock.now = 1.0
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens, request.is_retired) == ("late", 8, False)
    w.stores[0].finish_all()
    assert w.side.poll() == []
    assert request.is_retired
    assert w.side.request(PROMPT).num_tokens == 24


def test_a_deadline_during_the_search_gives_up_the_holds(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT, deadline=0.5)
    w.clock.now = 1.0
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens) == ("late", 0)
    w.stores[0].finish_all()
    assert w.stores[0].holds
    w.side.poll()
    assert not w.stores[0].holds
    assert request.is_retired


def test_a_cancelled_load_is_published_when_it_ends_all_the_same(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    request.cancel()
    assert w.stores[0].cancelled
    assert w.side.poll() == [request]
    assert (request.state, request.num_tokens) == ("late", 0)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.side.request(PROMPT).num_tokens == 24


def test_an_entry_that_is_gone_after_the_lookup_is_a_miss(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    del w.stores[0].entries[bytes(lane_keys(chain_of(PROMPT), 0)[2])]
    w.stores[0].finish_all()
    w.side.poll()
    assert request.num_tokens == 8


def test_a_host_full_of_pinned_entries_gives_a_miss(world):
    w = world(slots=6)
    other = PROMPT + 1000
    w.host.fill(other)
    put(w.stores[0], w.host, PROMPT)
    with w.host.hold(other):
        request = w.side.request(PROMPT)
        w.stores[0].finish_all()
        assert w.side.poll() == [request]
        assert (request.num_tokens, request.is_retired) == (0, True)
    assert not w.stores[0].holds


def test_a_host_with_room_for_some_chunks_loads_these(world):
    w = world(slots=6, chunk_bytes=512)
    other = PROMPT + 1000
    w.host.fill(other)
    put(w.stores[0], w.host, PROMPT)
    with w.host.hold(other, max_tokens=8):
        request = w.side.request(PROMPT)
        w.stores[0].finish_all()
        w.side.poll()
        w.stores[0].finish_all()
        assert w.side.poll() == [request]
    assert request.num_tokens == 16


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


@pytest.mark.parametrize("namespace", ["tenant", ("a", 1)])
def test_tenants_share_nothing(world, namespace):
    w = world()
    put(w.stores[0], w.host, PROMPT, namespace=namespace)
    other, own = w.side.request(PROMPT), w.side.request(PROMPT, namespace=namespace)
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert (other.num_tokens, own.num_tokens) == (0, 24)


def test_a_store_that_raises_costs_hits_only(world):
    w = world(2)
    put(w.stores[1], w.host, PROMPT)
    w.stores[0].refuses = OSError("gone")
    request = w.side.request(PROMPT)
    for _ in range(2):
        w.stores[1].finish_all()
        w.side.poll()
    assert (request.num_tokens, request.error) == (24, "OSError: gone")


def test_few_missing_tokens_are_not_looked_up(world):
    w = world(min_tokens=9)
    w.host.fill(PROMPT, stop=16)
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    assert (request.state, request.num_tokens) == ("ready", 16)
    assert not w.stores[0].batches


def test_the_device_may_have_more_than_host_and_stores(world):
    w = world(device=SimpleNamespace(match_length=lambda _tokens, max_tokens, **_: min(max_tokens, 20)))
    put(w.stores[0], w.host, PROMPT, stop=16)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    assert w.side.poll() == [request]
    assert (request.num_tokens, request.num_device_tokens, request.loaded_tokens) == (20, 20, {})


def test_max_tokens_bounds_the_load(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT, max_tokens=15)
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert request.num_tokens == 12


def test_the_pin_outlives_the_request_until_it_is_released_or_its_time_is_over(world):
    w = world(slots=6)
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert w.side.num_pins == 1
    assert not w.host.evict(0, 6)
    request.release()
    assert w.side.num_pins == 0
    again = w.side.request(PROMPT)
    assert again.state == "ready"
    w.clock.now = 11.0
    w.side.poll()
    assert w.side.num_pins == 0


def test_windows_and_states_are_loaded_only_where_they_are_needed(world):
    w = world(windows=(6,), states=True, num_full=2)
    put(w.stores[0], w.host, PROMPT, lanes=[0, 1, 2])
    put(w.stores[0], w.host, PROMPT, lanes=[3], stop=16)
    request = w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    ((_, keys, _),) = w.stores[0].batches.values()
    chain = chain_of(PROMPT)
    wanted = [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [2, 3]), (3, [0, 1, 2, 3])]
    wanted[3] = (3, [3])
    assert keys == [bytes(key) for lane, at in wanted for key in lane_keys(chain[at], lane)]
    w.stores[0].finish_all()
    w.side.poll()
    assert request.num_tokens == 16


def test_a_copy_pins_what_stores_read(world):
    w = world(2, chunk_bytes=512)
    w.host.fill(PROMPT)
    prefix = SimpleNamespace(tokens=PROMPT, namespace=None, spans=None, start=8, stop=24)
    assert w.side.write([prefix]) == 4
    assert w.side.num_pins == 1
    assert not w.host.evict(0, 16)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.side.num_pins == 1
    w.stores[1].finish_all()
    w.side.poll()
    assert w.side.num_pins == 0
    chain = chain_of(PROMPT)
    for store in w.stores:
        assert set(store.entries) == {bytes(key) for key in lane_keys(chain[2:6], 0)}


def test_a_descriptor_shows_that_there_is_something_to_poll(world):
    w = world(2)
    w.side.request(PROMPT)
    assert not select.select([w.side.fileno()], [], [], 0)[0]
    w.stores[1].finish()
    assert select.select([w.side.fileno()], [], [], 0)[0]
    w.side.poll()
    assert not select.select([w.side.fileno()], [], [], 0)[0]


def test_close_ends_everything(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    w.side.request(PROMPT)
    w.stores[0].finish_all()
    w.side.poll()
    assert w.host.leases
    w.side.close(timeout=0.0)
    assert not w.host.leases
    assert not w.host.pins
    with pytest.raises(UnsupportedOption, match="closed"):
        w.side.poll()


def test_refusals():
    host = PlainHost()
    with pytest.raises(UnsupportedOption, match="Fingerprint"):
        StoreSide(NO_DEVICE, host, [ScriptedStore()], fingerprint=None, tree_lanes=host.lanes)
    side = StoreSide(NO_DEVICE, host, [], fingerprint=None, tree_lanes=host.lanes)
    with pytest.raises(ShapeError, match="deadline is -1"):
        side.request(PROMPT, deadline=-1)
    side.close()


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


def test_prompts_that_differ_do_not_wait_for_each_other(world):
    w = world()
    other = np.concatenate([PROMPT[:4] + 500, PROMPT[4:]])
    first, second, third = w.side.request(PROMPT), w.side.request(other), w.side.request(PROMPT, namespace="n")
    assert len(w.stores[0].batches) == 3
    w.stores[0].finish_all()
    assert w.side.poll() == [first, second, third]


def test_entries_of_a_far_store_are_copied_to_the_nearer_ones(world):
    w = world(3)
    put(w.stores[1], w.host, PROMPT, stop=12)
    put(w.stores[2], w.host, PROMPT)
    request = w.side.request(PROMPT)
    for _ in range(4):
        for store in w.stores:
            store.finish_all()
        w.side.poll()
    assert request.num_tokens == 24
    assert w.stores[0].entries == w.stores[2].entries
    assert w.stores[1].entries == w.stores[2].entries
    request.release()


def test_a_request_keeps_its_tokens_when_the_caller_reuses_the_array(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    tokens = PROMPT.copy()
    request = w.side.request(tokens)
    tokens[:] = 7
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert request.num_tokens == w.host.match(PROMPT) == 24
    request.release()


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        ([1.5] * 9, {}, "give integers"),
        ([2**40] * 9, {}, "token id"),
        (7, {}, "pass a list"),
        (PROMPT, {"max_tokens": -1}, "max_tokens"),
        (PROMPT, {"max_tokens": 8.5}, "max_tokens"),
        (PROMPT, {"deadline": "soon"}, "deadline"),
    ],
)
def test_invalid_arguments_of_a_request_are_refused(world, tokens, options, says):
    w = world()
    with pytest.raises((ShapeError, UnsupportedDtype), match=says):
        w.side.request(tokens, **options)
    assert w.side.stats().num_requests == 0


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


def test_close_copies_nothing_to_nearer_stores(world):
    w = world(2, chunk_bytes=256)
    put(w.stores[1], w.host, PROMPT)
    w.side.request(PROMPT)
    for store in w.stores:
        store.finish_all()
    w.side.poll()
    w.stores[1].finish()  # the first of several chunks
    w.side.poll()
    w.side.close(timeout=0.0)
    assert not w.host.pins
    assert not w.stores[0].batches


def test_a_store_that_cannot_be_closed_keeps_nothing_open(world):
    w = world(2)
    put(w.stores[1], w.host, PROMPT)
    close = w.stores[0].close

    def broken():
        close()
        raise OSError("planted")

    w.stores[0].close = broken
    w.side.request(PROMPT)
    with pytest.raises(OSError, match="planted"):
        w.side.close(timeout=0.0)
    assert not w.host.pins
    assert w.stores[1].event == -1


def test_a_release_waits_for_a_poll_of_another_thread(world):
    w = world()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    hold, releasing = w.host.hold, []

    def hold_while_another_thread_releases(*args, **options):
        pin = hold(*args, **options)
        if not releasing:
            releasing.append(Thread(target=request.release))
            releasing[0].start()
            releasing[0].join(0.05)
        return pin

    w.host.hold = hold_while_another_thread_releases
    w.stores[0].finish_all()
    w.side.poll()
    releasing[0].join()
    assert not w.host.pins


@pytest.mark.parametrize("medium", ["DISK", "EXTERNAL"])
def test_a_block_that_one_store_lacks_stays_listed_while_another_of_the_medium_has_it(world, medium):
    w = world(2, mediums=[medium, medium])
    ((ledger, name),) = w.side.ledgers
    assert name == medium
    ledger.start_journal()
    put(w.stores[0], w.host, PROMPT)
    request = w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    w.stores[1].finish()  # the answer of the store without the blocks comes last
    w.side.poll()
    assert [change.is_stored for change in ledger.take_changes().to_list()] == [True] * 6
    assert len(ledger.list_contents().to_list()) == 6
    w.stores[0].finish_all()
    w.side.poll()
    request.release()
    w.side.poll()
    w.host.evict(0, 16)
    w.stores[0].entries.clear()
    w.side.request(PROMPT)
    for store in w.stores:
        store.finish_all()
    w.side.poll()
    assert ledger.list_contents().to_list() == []


def test_a_failure_of_a_store_removes_nothing_from_its_ledger(world):
    w = world()
    ((ledger, _),) = w.side.ledgers
    ledger.start_journal()
    put(w.stores[0], w.host, PROMPT)
    w.side.request(PROMPT)
    w.stores[0].finish()
    w.side.poll()
    w.stores[0].finish(fails=range(100), error="planted")  # the load
    w.side.poll()
    assert len(ledger.list_contents().to_list()) == 6
    w.side.request(PROMPT)
    w.stores[0].finish(fails=range(100), error="planted")  # the look-up
    w.side.poll()
    assert len(ledger.list_contents().to_list()) == 6
    w.side.request(PROMPT)
    w.stores[0].finish(fails=range(100))  # the entries are gone
    w.side.poll()
    assert ledger.list_contents().to_list() == []
