"""Prompts longer than the host tier pass through it: to the stores, and from them to the device."""

import threading

import numpy as np
import pytest

from pagecore import ShapeError
from pagecore.errors import PagecoreError
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.keys import content_chain, lane_keys
from pagecore.tiers.manager.writing.stream_parts import StreamedPrefix
from pagecore.tiers.remote.objects import ObjectStore
from tests.tiers.manager.plain_device import PlainDevice, StreamingHost
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served, vectors
from tests.tiers.memory_store import MemoryStore

# 25 blocks and a token, more than three times what the host has.
PROMPT = np.arange(101, dtype=np.int32)
HOST = 9
LONG = {"num_blocks": 40, "host_blocks": HOST}


def stored(store, fingerprint, prompt=PROMPT, lane=0):
    """Return True for each block of a prompt that a store has."""
    keys = lane_keys(content_chain(fingerprint, prompt[: len(prompt) // BLOCK * BLOCK]), lane)
    return [key.tobytes() in store.data for key in keys]


def compute_in_steps(served, tokens, step):
    """Compute a prompt in steps, with a poll after each, as an engine does; return the tokens reused."""
    with served.tiers.add_sequence(tokens) as sequence:
        cached = sequence.num_cached_tokens
        served.verify(sequence, tokens, None, cached)
        while sequence.num_computed_tokens < len(tokens):
            begin = sequence.num_computed_tokens
            batch = served.cache.prepare([sequence], min(step, len(tokens) - begin))
            end = min(begin + step, len(tokens))
            for layer in range(len(served.layers)):
                rows = _vectors(tokens, layer)[begin:end]
                served.cache.write(layer, rows, -rows, batch)
            served.cache.commit(batch)
            served.tiers.poll()
            served.tiers.check_invariants()
        return cached


def _vectors(tokens, layer):
    return vectors(tokens, None, layer)


def check_at_rest(served):
    served.tiers.check_invariants()
    assert served.tiers.host.num_leases == served.tiers.stats().streams.num_leased_blocks == 0


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["full", "window"])
@pytest.mark.parametrize("kind", ["memory", "disk", "objects"])
def test_a_prompt_longer_than_the_host_comes_back_whole(kind, layers, tmp_path):
    make = {
        "memory": MemoryStore(medium="DISK"),
        "disk": lambda fingerprint: DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20),
        "objects": lambda fingerprint: ObjectStore(f"file://{tmp_path}", fingerprint=fingerprint),
    }[kind]
    with Served([make], layers=layers, **LONG) as served:
        served.serve(PROMPT)
        served.flush()
        streams = served.tiers.stats().streams
        assert streams.num_stored_blocks >= 25 - (HOST - 1)
        assert (streams.num_dropped_blocks, streams.num_open) == (0, 0)
        check_at_rest(served)
        served.forget()
        request = served.serve(PROMPT)  # compares what is reused
        assert (request.state, request.num_tokens, request.error) == ("ready", 100, None)
        assert (served.reused, served.computed) == (100, 102)
        assert sum(served.tiers.stats().hit_tokens.values()) == sum(request.loaded_tokens.values()) == 100
        assert served.tiers.stats().streams.num_loaded_blocks == 25
        check_at_rest(served)


def test_chunked_prefill_streams_what_each_step_publishes():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        compute_in_steps(served, PROMPT, 8)
        served.flush()
        assert all(stored(store, served.fingerprint))
        assert store.counts["store"] <= 27  # the windows, and the blocks of the host that made room for them
        check_at_rest(served)


def test_blocks_that_are_generated_after_a_long_prompt_are_stored():
    store = MemoryStore()
    with Served([store], num_blocks=60, host_blocks=HOST) as served:
        longer = np.arange(161, dtype=np.int32)
        with served.tiers.add_sequence(PROMPT) as sequence:
            for end in [101, *range(105, 161, 4)]:
                if end > 101:
                    served.cache.append_tokens([sequence], longer[end - 4 : end].reshape(1, -1))
                batch = served.cache.prepare([sequence], end - sequence.num_computed_tokens)
                begin = sequence.num_computed_tokens
                for layer in range(len(served.layers)):
                    rows = _vectors(longer, layer)[begin:end]
                    served.cache.write(layer, rows, -rows, batch)
                served.cache.commit(batch)
        served.flush()
        assert sum(stored(store, served.fingerprint, longer)) == 157 // BLOCK
        served.forget()
        assert served.serve(longer[:157]).num_tokens == 156


def test_a_prefix_that_is_streamed_costs_other_sequences_no_backup(monkeypatch):
    with Served([MemoryStore()], num_blocks=60, host_blocks=HOST) as served:
        cache, host = served.cache, served.tiers.host
        sequences = [cache.add_sequence(tokens) for tokens in (PROMPT, range(500, 505), range(600, 607))]
        cache.commit(cache.prepare(sequences, [101, 5, 7]))
        assert served.tiers._stores.streams.has_owners
        offered, backup = [], host.backup
        monkeypatch.setattr(host, "backup", lambda one, **options: (offered.append(one), backup(one, **options))[1])
        cache.append_tokens(sequences, [[1], [2], [3]])
        cache.commit(cache.prepare(sequences, 1))
        assert offered == [sequences[0], sequences[2]], "that which is streamed, and that which has completed a block"
        for sequence in sequences:
            cache.remove(sequence)


def test_blocks_that_are_computed_again_after_a_truncation_are_stored():
    """The sequence is as long as when its prefix was streamed, with other tokens."""
    store = MemoryStore()
    with Served([store], num_blocks=60, host_blocks=HOST) as served:
        other = np.append(PROMPT[:81], np.arange(500, 520, dtype=np.int32))
        with served.tiers.add_sequence(PROMPT) as sequence:
            for tokens in (PROMPT, other):
                begin = sequence.num_computed_tokens
                batch = served.cache.prepare([sequence], 101 - begin)
                for layer in range(len(served.layers)):
                    rows = _vectors(tokens, layer)[begin:]
                    served.cache.write(layer, rows, -rows, batch)
                served.cache.commit(batch)
                served.flush()
                assert all(stored(store, served.fingerprint, tokens))
                if tokens is PROMPT:
                    served.cache.truncate([sequence], [81])
                    served.cache.append_tokens([sequence], [other[81:]])


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_no_more_blocks_are_leased_than_allowed(slots):
    store = MemoryStore(manual=True)
    with Served([store], stream_blocks=slots, **LONG) as served:
        served.compute(PROMPT)
        leased = []
        while not served.tiers.drain(0):
            store.release(store.hanging[0].ticket if store.hanging else None)
            served.tiers.poll()
            served.tiers.check_invariants()
            leased.append(served.tiers.stats().streams.num_leased_blocks)
        assert max(leased) == slots
        assert all(stored(store, served.fingerprint))
        store.manual = False
        served.forget()
        store.manual = True
        request = served.tiers.request(PROMPT)
        leased = []
        while not request.has_ended:
            store.release()
            served.tiers.poll()
            served.tiers.check_invariants()
            leased.append(served.tiers.stats().streams.num_leased_blocks)
        assert max(leased) == slots
        assert served.compute(PROMPT) == 100
        request.release()
        store.manual = False
        store.release()


def test_a_prompt_that_fits_does_not_pass_through():
    with Served([MemoryStore()], num_blocks=40, host_blocks=30) as served:
        served.serve(PROMPT)
        served.forget()
        served.serve(PROMPT)
        streams = served.tiers.stats().streams
        assert (streams.num_streams, streams.num_loaded_blocks) == (0, 0)
        assert served.tiers.host.match(PROMPT) == 100


def test_streams_are_turned_off():
    store = MemoryStore()
    with Served([store], stream_blocks=0, **LONG) as served:
        served.serve(PROMPT)
        served.flush()
        assert sum(stored(store, served.fingerprint)) == HOST - 1
        served.forget()
        assert served.serve(PROMPT).num_tokens == (HOST - 1) * BLOCK
    with pytest.raises(ShapeError, match="stream_blocks"):
        Served([MemoryStore()], stream_blocks=HOST, **LONG)


def test_the_second_sequence_of_a_prompt_streams_nothing():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        before = served.tiers.stats().streams
        served.compute(PROMPT)
        served.cache.clear_prefix_cache()
        served.compute(PROMPT)
        served.flush()
        assert served.tiers.stats().streams == before


def test_a_host_full_of_pins_stores_nothing_and_drain_returns():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        lease = served.tiers.host.reserve([np.arange(HOST - 1)])
        served.compute(PROMPT)
        served.flush()
        assert not store.data
        assert served.tiers.stats().streams.num_dropped_blocks == 25
        lease.release()
        check_at_rest(served)


def test_blocks_that_the_device_has_lost_end_a_stream():
    store = MemoryStore(manual=True)
    with Served([store], stream_blocks=2, **LONG) as served:
        served.compute(PROMPT)
        served.cache.clear_prefix_cache()
        while not served.tiers.drain(0):
            store.release()
        there = stored(store, served.fingerprint)
        assert 0 < sum(there) < 25
        assert there == sorted(there, reverse=True)  # a prefix
        check_at_rest(served)
        store.manual = False


@pytest.mark.parametrize("fault", ["error", "raise", "part", "hang"])
def test_a_store_that_fails_ends_the_stream_and_a_later_sequence_streams_again(fault):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        with served.tiers.add_sequence(PROMPT) as sequence:
            batch = served.cache.prepare([sequence], len(PROMPT))
            for layer in range(len(served.layers)):
                rows = _vectors(PROMPT, layer)
                served.cache.write(layer, rows, -rows, batch)
            store.faults["store"].extend([None, fault])  # the tree's part is stored, the first window is not
            served.cache.commit(batch)
        if fault == "hang":
            while not store.hanging:
                served.tiers.poll()
            store.release(fault="error")
        served.flush()
        assert sum(stored(store, served.fingerprint)) < 25
        check_at_rest(served)
        served.compute(PROMPT)
        served.flush()
        assert all(stored(store, served.fingerprint))
        check_at_rest(served)


@pytest.mark.parametrize("gone", [0, 3, 12, 24])
def test_a_load_that_fails_leaves_the_prefix_before_it(gone):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        request = served.tiers.request(PROMPT)
        keys = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)
        store.data.pop(keys[gone].tobytes(), None)  # after the look-up
        served.tiers.wait(request, 20.0)
        served.flush()
        usable = request.num_tokens // BLOCK
        assert usable == gone == served.tiers.stats().streams.num_loaded_blocks  # a window has one block
        assert store.counts["load"] <= gone + 3  # what follows is not loaded
        assert store.stats().num_held == 0
        check_at_rest(served)
        assert served.compute(PROMPT) == request.num_tokens
        request.release()


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_load_that_is_given_up_holds_nothing(how):
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    store = MemoryStore(data=data)
    with Served([store], stream_blocks=2, **LONG) as served:
        store.faults["load"].extend([None, None, "hang"])
        request = served.tiers.request(PROMPT, deadline=None)
        while not store.hanging:
            served.tiers.poll()
        assert request.state == "loading"
        assert served.tiers.stats().streams.num_leased_blocks
        if how == "cancel":
            request.cancel()
        elif how == "deadline":
            request.deadline_at = 0.0
        else:
            served.tiers.close()
            assert not store.holds
            return
        served.tiers.poll()
        assert (request.state, request.num_tokens >= 2 * BLOCK) == ("late", True)
        loads = store.counts["load"] + len(store.hanging)
        store.release()
        served.flush()
        assert request.is_retired
        assert store.counts["load"] == loads  # no more windows
        assert not store.holds
        check_at_rest(served)
        assert served.compute(PROMPT) >= request.num_tokens
        request.release()


@pytest.mark.parametrize("ends", [True, False])
def test_closing_while_copies_run_gives_every_block_back(world, ends):
    made = world(1, host_type=StreamingHost, device=PlainDevice(), late_copies=True, slots=8, num_slots=4)
    made.host.device.fill(PROMPT)
    made.side.stream("owner", StreamedPrefix(PROMPT[:100], None, None), 0, 0)
    assert made.side.stream_stats().num_leased_blocks == 4
    if ends:
        made.host.finish_copies()
        made.side.poll()
    assert len(made.stores[0].batches) == (4 if ends else 0)
    # The fixture closes the stores, and finds no lease.


def test_closing_while_stores_read_leased_blocks_leaves_nothing():
    store = MemoryStore(manual=True, stubborn=True)
    served = Served([store], **LONG)
    served.compute(PROMPT)
    assert served.tiers.stats().streams.num_leased_blocks == 0  # the host's own blocks are still being read
    while not served.tiers.stats().streams.num_leased_blocks:
        store.release()
        served.tiers.poll()
    host = served.tiers.host
    served.tiers._stores.close(timeout=0.0)
    assert host.num_leases == 0
    host.check_invariants()
    served.tiers.close()


@pytest.mark.parametrize("direction", ["stage", "deliver"])
def test_a_copy_that_fails_leaves_everything_as_it_was(direction, monkeypatch):
    store = MemoryStore()
    with Served([store], **LONG) as served:
        transfers = served.tiers.host._transfers
        name = {"stage": "backup", "deliver": "promote"}[direction]
        real, fails = getattr(type(transfers), name), []

        def failing(self, first, *rest):
            if fails:
                fails.pop()
                raise PagecoreError("planted")
            return real(self, first, *rest)

        monkeypatch.setattr(type(transfers), name, failing)
        if direction == "stage":
            served.compute(PROMPT[:33])  # fills the host
            served.flush()
            fails.append(1)
            with served.tiers.add_sequence(PROMPT) as sequence:
                served.cache.commit(served.cache.prepare([sequence], len(PROMPT) - sequence.num_cached_tokens))
            assert not fails
            served.flush()
            check_at_rest(served)
            assert served.tiers.stats().host.num_failed == 1
            return
        served.compute(PROMPT)
        served.forget()
        fails.append(1)
        request = served.tiers.wait(served.tiers.request(PROMPT), 20.0)
        served.flush()
        assert (request.state, request.num_tokens, fails) == ("ready", 0, [])
        assert served.cache.match_length(PROMPT) == 0
        assert not store.holds
        check_at_rest(served)
        request.release()


def test_clear_waits_for_streams_and_everything_is_streamed_again():
    store = MemoryStore(delay=0.001)
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.tiers.clear(["GPU", "CPU"])
        assert all(stored(store, served.fingerprint))
        store.data.clear()
        served.compute(PROMPT)
        served.flush()
        assert all(stored(store, served.fingerprint))


def test_an_evicted_prefix_is_deleted_and_streamed_again():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        served.tiers.evict_prefix(PROMPT)
        served.flush()
        assert not store.data
        served.compute(PROMPT)
        served.flush()
        assert all(stored(store, served.fingerprint))


def test_a_block_that_a_store_has_lost_is_streamed_again_after_a_look_up():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        keys = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)
        del store.data[keys[20].tobytes()]
        assert served.serve(PROMPT).num_tokens == 80
        served.flush()
        assert all(stored(store, served.fingerprint))


def test_a_busy_device_loads_to_the_host_what_it_has_room_for():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        other = np.arange(1000, 1141, dtype=np.int32)  # 36 of 39 blocks
        with served.tiers.add_sequence(other) as sequence:
            served.cache.commit(served.cache.prepare([sequence], len(other)))
            served.flush()
            request = served.tiers.wait(served.tiers.request(PROMPT), 20.0)
            assert served.tiers.host.match(PROMPT) == request.num_tokens == (HOST - 1) * BLOCK
            request.release()
        served.tiers.check_invariants()


def test_what_the_host_has_of_a_prefix_comes_before_the_windows():
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        served.cache.clear_prefix_cache()
        assert 0 < served.tiers.host.match(PROMPT) < 100
        there = served.tiers.host.match(PROMPT)
        request = served.serve(PROMPT)
        assert (request.num_tokens, request.num_host_tokens) == (100, there)
        assert request.loaded_tokens == {"EXTERNAL": 100 - there}
        assert served.tiers.stats().hit_tokens == {"GPU": 0, "CPU": there, "EXTERNAL": 100 - there}


def test_two_requests_for_one_long_prompt_load_it_once():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        served.compute(PROMPT)
        served.forget()
        first, second = (served.tiers.request(PROMPT) for _ in range(2))
        for request in (first, second):
            served.tiers.wait(request, 20.0)
            assert request.num_tokens == 100
        assert store.counts["load"] == 25
        assert served.compute(PROMPT) == 100
        first.release()
        second.release()


def test_loads_from_a_far_store_reach_the_near_one():
    far, near = {}, {}
    with Served([MemoryStore(data=far)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    with Served([MemoryStore(data=near, medium="DISK"), MemoryStore(data=far)], **LONG) as served:
        assert served.serve(PROMPT).num_tokens == 100
        served.flush()
        assert near == far


@pytest.mark.parametrize("write", ["second_hit", "on_release", "explicit"])
def test_policies_stream_what_they_write(write):
    store = MemoryStore()
    with Served([store], write=write, **LONG) as served:
        served.compute(PROMPT)
        if write == "second_hit":
            served.flush()
            assert not store.data
            served.compute(PROMPT)
        if write == "explicit":
            served.flush()
            assert not store.data
            with served.tiers.add_sequence(PROMPT) as sequence:
                served.tiers.save(sequence, max_tokens=64)
        served.flush()
        assert sum(stored(store, served.fingerprint)) == (16 if write == "explicit" else 25)
        check_at_rest(served)


def test_a_truncated_sequence_streams_its_new_tokens():
    store = MemoryStore()
    with Served([store], **LONG) as served:
        other = np.concatenate([PROMPT[:60], PROMPT[60:] + 500])
        with served.tiers.add_sequence(PROMPT) as sequence:
            for tokens in (PROMPT, other):
                if tokens is other:
                    served.cache.truncate(sequence, 60)
                    served.cache.append_tokens([sequence], other[60:].reshape(1, -1))
                begin = sequence.num_computed_tokens
                batch = served.cache.prepare([sequence], 101 - begin if tokens is PROMPT else 97 - begin)
                for layer in range(len(served.layers)):
                    rows = _vectors(tokens, layer)[begin : begin + (101 if tokens is PROMPT else 97) - begin]
                    served.cache.write(layer, rows, -rows, batch)
                served.cache.commit(batch)
        served.flush()
        assert all(stored(store, served.fingerprint))
        assert sum(stored(store, served.fingerprint, other)) == 24
        served.forget()
        assert served.serve(other[:97]).num_tokens == 96


def test_threads_that_serve_long_prompts_lose_nothing():
    store = MemoryStore(delay=0.0005)
    with Served([store], num_blocks=80, host_blocks=HOST) as served:
        errors = []

        def serve(base):
            try:
                for number in range(3):
                    served.compute(PROMPT + base + number % 2)
                    served.tiers.poll()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(1000 * n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        served.flush()
        check_at_rest(served)


def test_a_cache_that_writes_on_eviction_loads_long_prompts():
    data = {}
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
    with Served([MemoryStore(data=data)], write="on_evict", **LONG) as served:
        served.compute(PROMPT[:61] + 2000)
        assert served.serve(PROMPT).num_tokens == 100
        served.compute(PROMPT[:61] + 3000)
        served.tiers.check_invariants()


def test_ranks_end_a_long_load_with_the_shortest_prefix():
    data, ends = {}, [None, None]
    with Served([MemoryStore(data=data)], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        lost = lane_keys(content_chain(served.fingerprint, PROMPT[:100]), 0)[15].tobytes()
    barrier, offers = threading.Barrier(2, timeout=20), [None, None]

    def rank(number):
        def agree(values):
            offers[number] = values.copy()
            barrier.wait()
            least = np.minimum(*offers)
            barrier.wait()
            return least

        own = {key: payload for key, payload in data.items() if number == 0 or key != lost}
        with Served([MemoryStore(data=own)], agree=agree, **LONG) as served:
            request = served.tiers.request(PROMPT)
            while not request.has_ended:
                served.tiers.poll()
            ends[number] = request.num_tokens, served.compute(PROMPT)
            request.release()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [(60, 60), (60, 60)]


def test_events_report_the_streamed_blocks_of_a_store():
    with Served([MemoryStore(medium="DISK")], **LONG) as served:
        ((ledger, medium),) = served.tiers.ledgers
        ledger.start_journal()
        served.compute(PROMPT)
        served.flush()
        changes = ledger.take_changes().to_list()
        assert (medium, all(change.is_stored for change in changes)) == ("DISK", True)
        assert sorted(change.first for change in changes) == list(range(25))


def test_bytes_that_pass_through_count_as_copied():
    with Served([MemoryStore()], **LONG) as served:
        served.compute(PROMPT)
        served.flush()
        each, host = served.tiers.host.payload_bytes[0], served.tiers.host
        streams = served.tiers.stats().streams
        assert host.backed_up_bytes == (HOST - 1 + streams.num_stored_blocks) * each
        assert streams.bytes_stored == streams.num_stored_blocks * each
        served.forget()
        served.serve(PROMPT)
        assert host.promoted_bytes == served.tiers.stats().streams.bytes_loaded == 25 * each
