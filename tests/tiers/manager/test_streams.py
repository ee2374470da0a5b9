"""Prompts longer than the host tier are streamed to the stores, and come back from them."""

import numpy as np
import pytest

from pagecore import ShapeError
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.remote.objects import ObjectStore
from tests.tiers.manager.long_prompts import HOST, LONG, PROMPT, check_at_rest, compute_in_steps, stored
from tests.tiers.manager.served import BLOCK, LAYERS, WINDOWED, Served, vectors
from tests.tiers.memory_store import MemoryStore


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
                    rows = vectors(longer, None, layer)[begin:end]
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
                    rows = vectors(tokens, None, layer)[begin:]
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
                    rows = vectors(tokens, None, layer)[begin : begin + (101 if tokens is PROMPT else 97) - begin]
                    served.cache.write(layer, rows, -rows, batch)
                served.cache.commit(batch)
        served.flush()
        assert all(stored(store, served.fingerprint))
        assert sum(stored(store, served.fingerprint, other)) == 24
        served.forget()
        assert served.serve(other[:97]).num_tokens == 96


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
