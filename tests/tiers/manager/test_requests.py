"""Requests against a host in plain Python and stores whose batches end on command."""

import select
from types import SimpleNamespace

import pytest

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.tiers.keys import lane_keys
from pagecore.tiers.manager.stores import StoreSide
from tests.tiers.manager.plain_host import NO_DEVICE, PlainHost
from tests.tiers.manager.request_world import PROMPT, chain_of, put
from tests.tiers.manager.scripted_store import ScriptedStore


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


@pytest.mark.parametrize("namespace", ["tenant", ("a", 1)])
def test_tenants_share_nothing(world, namespace):
    w = world()
    put(w.stores[0], w.host, PROMPT, namespace=namespace)
    other, own = w.side.request(PROMPT), w.side.request(PROMPT, namespace=namespace)
    for _ in range(2):
        w.stores[0].finish_all()
        w.side.poll()
    assert (other.num_tokens, own.num_tokens) == (0, 24)


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


def test_a_descriptor_shows_that_there_is_something_to_poll(world):
    w = world(2)
    w.side.request(PROMPT)
    assert not select.select([w.side.fileno()], [], [], 0)[0]
    w.stores[1].finish()
    assert select.select([w.side.fileno()], [], [], 0)[0]
    w.side.poll()
    assert not select.select([w.side.fileno()], [], [], 0)[0]


def test_refusals():
    host = PlainHost()
    with pytest.raises(UnsupportedOption, match="Fingerprint"):
        StoreSide(NO_DEVICE, host, [ScriptedStore()], fingerprint=None, tree_lanes=host.lanes)
    side = StoreSide(NO_DEVICE, host, [], fingerprint=None, tree_lanes=host.lanes)
    with pytest.raises(ShapeError, match="deadline is -1"):
        side.request(PROMPT, deadline=-1)
    side.close()


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
