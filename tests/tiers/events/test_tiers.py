"""Events of device, host and stores: a mirror of all media equals the cache and its tiers at every sequence number."""

import itertools
import sys
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagecore import AttentionSpec, PagedKVCache, Plane, StateSpec
from pagecore.errors import StoreError
from pagecore.index import RadixTree
from pagecore.tiers.disk import DiskStore
from pagecore.tiers.guard import Deadline, Guard
from pagecore.tiers.host.tier import HostTier
from pagecore.tiers.keys import Fingerprint
from pagecore.tiers.manager.tiers import Tiers
from pagecore.tiers.remote.mooncake import MooncakeStore
from pagecore.tiers.remote.resp import RespStore
from pagecore.tiers.store import KEY_BYTES
from tests.capabilities import require
from tests.faults import is_full
from tests.machines import drawn
from tests.tiers.events.following import contents, ids, state_of
from tests.tiers.memory_store import MemoryStore
from tests.tiers.remote.resp_servers import command

require("msgspec")
require("zmq")

from pagecore.tiers.events import EventPublisher, Mirror  # noqa: E402
from pagecore.tiers.events.wire import decode_batch  # noqa: E402

NUMBERS = itertools.count()
BLOCK = 4
FULL = AttentionSpec(1, 8, dtype="float32", num_query_heads=1)
WIDE = AttentionSpec(2, 8, dtype="float32", num_query_heads=2)
WINDOWED = AttentionSpec(1, 8, dtype="float32", num_query_heads=1, window=6)
STATE = StateSpec((Plane("state", (2,), "float32", per="sequence"),), chunk=4, interval=4)
MODELS = {
    "plain": ([FULL], {}),
    "two plain and a window": ([WINDOWED, FULL, WIDE], {}),
    "state": ([FULL, STATE], {"num_states": 9}),
    "states alone": ([STATE], {"num_states": 9}),
}
PATTERN = [int(bit) for bit in "01001101000110111010010111001011"]


def patient(store):
    """Guard a store; a busy machine is not a fault."""
    return Guard(store, deadline=Deadline(20.0))


class Followed:
    """A cache with tiers, its publisher, and a mirror that applies every batch."""

    def __init__(self, model="plain", write="through", stores=None):
        layers, sizes = MODELS[model]
        has_blocks = layers != [STATE]
        self.cache = PagedKVCache(
            layers, num_blocks=14 if has_blocks else None, block_size=BLOCK, max_sequences=2, **sizes
        )
        self.stores = [MemoryStore(), MemoryStore(medium="DISK")][::-1] if stores is None else stores
        self.host = HostTier(self.cache, num_blocks=20 if has_blocks else None, **({"num_states": 12} if sizes else {}))
        fingerprint = Fingerprint.of(self.cache, model="m")
        self.stores = self.stores(fingerprint) if callable(self.stores) else self.stores
        self.tiers = Tiers(self.cache, self.host, self.stores, fingerprint=fingerprint, write=write, min_tokens=1)
        endpoint = f"inproc://tiers-{next(NUMBERS)}"
        self.publisher = EventPublisher(self.cache, self.tiers, endpoint=endpoint, interval=None)
        self.mirror, self.late, self.seen = Mirror(), None, -1
        self.follow()

    def serve(self, tokens, **options):
        request = self.tiers.wait(self.tiers.request(tokens, **options), 20.0)
        with self.cache.add_sequence(tokens, **options) as sequence:
            while sequence.num_computed_tokens < len(tokens):
                self.cache.commit(
                    self.cache.prepare([sequence], min(BLOCK, len(tokens) - sequence.num_computed_tokens))
                )
        request.release()

    def follow(self):
        """Publish, and compare every mirror with what all media hold."""
        with_all = self.publisher.publish()
        held = contents(self.publisher)
        for number, payload in self.publisher._batches:
            if number > self.seen:
                assert self.mirror.apply(number, decode_batch(payload))
                if self.late is not None:
                    self.late.apply(number, decode_batch(payload))
        self.seen = with_all
        assert state_of(self.mirror) == held
        assert self.late is None or state_of(self.late) == held
        return held

    def snapshot(self):
        frames = list(self.publisher._state(b""))
        self.late = Mirror()
        self.late.load(frames[0][0], [decode_batch(payload) for _, payload in frames])
        assert state_of(self.late) == contents(self.publisher)

    def close(self):
        self.publisher.close()
        self.tiers.close()


class TierEventMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(sorted(MODELS)), write=st.sampled_from(["through", "on_evict", "second_hit", "explicit"])
    )
    def start(self, model, write):
        self.followed = Followed(model, write)

    @rule(
        size=st.integers(5, 32),
        changed=st.integers(0, 60),
        namespace=st.sampled_from([None, "adapter", ("tenant", 7)]),
        spans=st.sampled_from([None, [(3, 9, b"cat"), (17, 18, -3)]]),
    )
    def serve(self, size, changed, namespace, spans):
        tokens = PATTERN[:size]
        if changed < size:
            tokens[changed] = 2
        self.followed.serve(np.array(tokens, np.int32), namespace=namespace, spans=spans)

    @rule(store=st.integers(0, 1), share=st.integers(1, 3))
    def lose(self, store, share):
        """A store gives entries up, which it does not report."""
        data = self.followed.stores[store].data
        for key in list(data)[::share]:
            data.pop(key, None)

    @rule()
    def forget(self):
        self.followed.cache.clear_prefix_cache()
        self.followed.host.clear()

    @rule()
    def settle(self):
        assert self.followed.tiers.drain(20.0)

    @rule()
    def publish(self):
        self.followed.follow()

    @rule()
    def take_a_snapshot(self):
        self.followed.snapshot()

    def teardown(self):
        if hasattr(self, "followed"):
            self.followed.follow()
            self.followed.close()


TestTierEvents = pytest.mark.slow(drawn(TierEventMachine))
TestTierEvents.settings = settings(max_examples=12 if is_full() else 8, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_written_found_and_lost_blocks_have_events_of_their_medium(model):
    followed = Followed(model)
    followed.serve(range(17))
    followed.tiers.drain(20.0)
    held = followed.follow()
    for medium in ("GPU", "CPU", "DISK", "EXTERNAL"):
        assert len(held[medium, 0]) > 0
    followed.stores[0].data.clear()
    followed.cache.clear_prefix_cache()
    followed.host.clear()
    request = followed.tiers.wait(followed.tiers.request(range(17)), 20.0)
    assert request.loaded_tokens == {"EXTERNAL": 16}
    request.release()
    followed.tiers.drain(20.0)
    held = followed.follow()
    assert held["DISK", 0]
    assert set(held["DISK", 0]) <= set(held["EXTERNAL", 0]), "copied to the nearer store again"
    followed.close()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_prefix_that_is_evicted_everywhere_has_its_events(model):
    followed = Followed(model)
    for start in (0, 100):
        followed.serve(range(start, start + 17))
    followed.tiers.drain(20.0)
    before = followed.follow()
    followed.tiers.evict_prefix(range(17))
    followed.tiers.drain(20.0)
    after = followed.follow()
    for place, blocks in before.items():
        assert 0 < len(after[place]) < len(blocks)
    followed.tiers.evict_prefix(range(100, 117))
    followed.tiers.drain(20.0)
    assert not any(followed.follow().values())
    followed.close()


@pytest.mark.parametrize("media", [["GPU"], ["DISK"], ["GPU", "CPU", "DISK"]])
def test_media_that_are_cleared_have_their_events(tmp_path, media):
    def store(fingerprint):
        return [patient(DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=1 << 20))]

    followed = Followed("two plain and a window", stores=store)
    for start in (0, 100):
        followed.serve(range(start, start + 17))
    followed.tiers.drain(20.0)
    before = {medium for (medium, _), blocks in followed.follow().items() if blocks}
    assert before == {"GPU", "CPU", "DISK"}
    followed.tiers.clear(media)
    followed.tiers.drain(20.0)
    assert {medium for (medium, _), blocks in followed.follow().items() if blocks} == before - set(media)
    followed.close()


class Lister(MemoryStore):
    """A store that lists its entries, and reports nothing that it has lost."""

    can_list = True

    def keys(self):
        return np.frombuffer(b"".join(self.data), np.uint8).reshape(-1, KEY_BYTES)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_store_that_reports_nothing_has_no_blocks_once_it_is_cleared(model):
    store, other = Lister(medium="DISK"), Lister()
    followed = Followed(model, stores=[store, other])
    for start in (0, 100):
        followed.serve(range(start, start + 17))
    followed.tiers.drain(20.0)
    before = followed.follow()
    store.inject("remove", "error")
    with pytest.raises(StoreError, match="has kept"):
        followed.tiers.clear(["DISK"])
    assert followed.follow() == before, "what a store keeps stays listed"
    for key in list(store.data)[:-1]:
        del store.data[key]  # another process
    followed.tiers.clear(["DISK"])
    after = followed.follow()
    for place, blocks in before.items():
        assert blocks
        assert after.get(place, {}) == ({} if place[0] == "DISK" else blocks)
    followed.close()


def test_blocks_of_a_store_that_another_process_wrote_are_announced_when_they_are_found():
    data = {}
    writer = Followed(stores=[MemoryStore(data=data)])
    writer.serve(range(17))
    writer.tiers.drain(20.0)
    writer.close()
    reader = Followed(stores=[MemoryStore(data=data)])
    assert ("EXTERNAL", 0) not in reader.follow()
    reader.serve(range(17))
    held = reader.follow()
    assert set(held["EXTERNAL", 0]) == set(held["CPU", 0])
    reader.close()


def test_a_ledger_forgets_the_oldest_blocks_and_reports_an_overflow():
    followed = Followed()
    ledger = followed.tiers.ledgers[0][0]
    ledger._max_blocks = 3
    followed.serve(range(17))
    followed.tiers.drain(20.0)
    assert len(followed.follow()["DISK", 0]) == 3
    ledger._max_changes = 1
    followed.serve(range(100, 117))
    followed.tiers.drain(20.0)
    assert ledger._has_overflowed
    followed.follow()
    followed.close()


@pytest.mark.parametrize("model", ["plain", "two plain and a window"])
def test_what_a_disk_evicts_has_its_events_at_once(tmp_path, model):
    def store(fingerprint):
        size = len(fingerprint.payload_bytes) * (60 << 10)
        return [patient(DiskStore(tmp_path, fingerprint=fingerprint, max_bytes=size))]

    followed = Followed(model, stores=store)
    disk = followed.stores[0].store
    random = np.random.default_rng(3)
    evicted = 0
    for number in range(40):
        start = int(random.integers(0, 4)) * 100
        followed.serve(range(start, start + int(random.integers(5, 30))))
        if number % 3 == 0:
            followed.cache.clear_prefix_cache()
            followed.host.clear()
        assert followed.tiers.drain(20.0)
        held = followed.follow()
        followed.tiers.poll()
        if model == "plain":
            assert len(held["DISK", 0]) == disk.num_entries
        else:  # a block of a component has an entry in every lane of it
            present = {key for lane in disk._lanes for key in lane.entries}
            ledger = followed.tiers.ledgers[0][0]
            assert ledger._places.keys() == present
        evicted += followed.stores[0].stats().num_stored > disk.num_entries
    assert evicted > 10
    followed.close()


def test_a_poll_with_a_publisher_asks_for_no_protocol_again(tmp_path):
    cache = PagedKVCache(FULL, num_blocks=9, block_size=BLOCK)
    fingerprint = Fingerprint.of(cache, model="m")
    store = DiskStore(tmp_path, fingerprint=fingerprint, max_bytes="1MiB")
    asked = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__instancecheck__":
            asked.append(frame.f_locals["instance"])

    with (
        Tiers(cache, HostTier(cache, num_blocks=9), [store], fingerprint=fingerprint) as tiers,
        EventPublisher(cache, tiers, endpoint="tcp://127.0.0.1:*"),
    ):
        for times in range(2):
            sys.setprofile(note)
            try:
                tiers.poll()
            finally:
                sys.setprofile(None)
            # `isinstance` with a protocol takes longer than the rest of a poll.
            assert bool(asked) == (times == 0)
            asked.clear()


def test_what_a_resp_server_gives_up_has_its_events(private_resp):
    private_resp.command += ["--notify-keyspace-events", "Egex"]
    private_resp.kill()
    private_resp.start()
    url = private_resp.url
    followed = Followed(stores=lambda own: [patient(RespStore(url, fingerprint=own, watch_evictions=True))])
    followed.serve(range(17))
    assert followed.tiers.drain(20.0)
    assert len(followed.follow()["EXTERNAL", 0]) == 4
    command(url, b"FLUSHDB")  # announces nothing
    followed.tiers.poll()
    assert len(followed.follow()["EXTERNAL", 0]) == 4
    followed.serve(range(100, 117))
    assert followed.tiers.drain(20.0)
    store = followed.stores[0].store
    own = next(
        key for key in followed.tiers.ledgers[0][0]._places if command(url, b"EXISTS", store._prefix + key) == b":1"
    )
    command(url, b"DEL", store._prefix + own)
    limit = time.monotonic() + 20
    while len(followed.follow()["EXTERNAL", 0]) > 7:
        assert time.monotonic() < limit
        followed.tiers.poll()
        time.sleep(0.005)
    followed.close()


def test_what_others_remove_from_a_cluster_has_its_events(mooncake_master):
    require("mooncake.store")
    addresses = {"master": f"127.0.0.1:{mooncake_master.port}", "admin": f"127.0.0.1:{mooncake_master.second_port}"}
    options = {**addresses, "segment_bytes": 16 << 20, "list_seconds": 0.02}
    followed = Followed(stores=lambda own: [patient(MooncakeStore(fingerprint=own, **options))])
    followed.serve(range(17))
    assert followed.tiers.drain(20.0)
    assert len(followed.follow()["EXTERNAL", 0]) == 4
    store = followed.stores[0].store
    assert store._client.remove_by_regex(f"^{store._prefix}", True) == 4
    limit = time.monotonic() + 20
    while ("EXTERNAL", 0) in followed.follow():
        assert time.monotonic() < limit
        followed.tiers.poll()
        time.sleep(0.005)
    followed.close()


def test_an_entry_that_is_damaged_on_disk_is_removed_by_an_event(tmp_path):
    followed = Followed(stores=lambda own: [patient(DiskStore(tmp_path, fingerprint=own, max_bytes=1 << 20))])
    followed.cache.key(0).numpy()[:] = 1.5
    followed.serve(range(17))
    assert followed.tiers.drain(20.0)
    assert len(followed.follow()["DISK", 0]) == 4
    (slab,) = followed.stores[0].store.path.glob("*.slab")
    with slab.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        content = file.read()
        begin = next(at for at in range(size - 4096, 0, -4096) if any(content[at : at + 256]))
        file.seek(begin)
        file.write(bytes(byte ^ 1 for byte in content[begin : begin + 16]))
    followed.cache.clear_prefix_cache()
    followed.host.clear()
    followed.tiers.wait(followed.tiers.request(range(17)), 20.0).release()
    followed.tiers.poll()
    assert len(followed.follow()["DISK", 0]) == 3
    followed.close()


def test_a_window_of_one_token_needs_its_block():
    """As the tree, which cannot find a prefix of which a window has nothing."""
    spec = AttentionSpec(1, 8, window=1)
    cache = PagedKVCache([FULL, spec], num_blocks=9, block_size=BLOCK, device="none")
    host = RadixTree(BLOCK, windows=[1])
    with EventPublisher(cache, [(host, "CPU")], endpoint="inproc://one", interval=None) as publisher:
        host.insert(ids(8), (np.array([1, 2], np.int32), np.array([1, 2], np.int32)))
        mirror = Mirror()
        for evicted in (0, 1):
            host.evict("window", 2 * evicted)
            publisher.publish()
            for number, payload in publisher._batches:
                mirror.apply(number, decode_batch(payload))
            assert mirror.match(ids(8), media="CPU") == host.match(ids(8)).num_tokens == [8, 0][evicted]
